// HostTier against a map of what it should hold, over a tier that fails when told to.
#include "tiers/host_tier.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.hpp"
#include "space_fixture.hpp"

using namespace hotbed;

TEST(the_host_tier_holds_what_it_is_given) {
  for (bool below : {false, true}) {
    std::mt19937_64 random(below);
    auto lower = below ? std::make_shared<MapTier>(16) : nullptr;
    HostTier host(16, {100, -1}, below ? 24 : 200, lower);
    std::map<Key, std::vector<uint8_t>> truth;
    std::vector<uint8_t> records(64 * 16);
    bool found[64];
    for (int round = 0; round < 3000; ++round) {
      std::vector<RowKey> keys = some_keys(random, 1 + static_cast<int>(random() % 40));
      if (below && random() % 8 == 0) lower->fail_writes(1 + static_cast<int>(random() % 3));
      switch (random() % 8) {
        case 0:
          host.erase(keys);
          for (const RowKey& key : keys) truth.erase({key.table, key.id});
          break;
        case 1: try { host.flush();
          } catch (const TierError&) {
          }
          break;
        case 2:
        case 3:
        case 4: {
          for (auto& byte : records) byte = static_cast<uint8_t>(random());
          bool failed = false;
          try {
            host.write(keys, records.data());
          } catch (const TierError&) {
            failed = true;
          }
          // Of a write that failed each row is as it was, or as it was to be.
          std::vector<uint8_t> now(keys.size() * 16);
          host.read(keys, now.data(), found);
          for (size_t i = 0; i < keys.size(); ++i) {
            std::vector<uint8_t> wanted(records.data() + i * 16, records.data() + i * 16 + 16);
            std::vector<uint8_t> row(now.data() + i * 16, now.data() + i * 16 + 16);
            Key key{keys[i].table, keys[i].id};
            if (failed && (truth.count(key) ? found[i] && row == truth[key] : !found[i])) continue;
            CHECK(found[i] && row == wanted);
            truth[key] = wanted;
          }
          break;
        }
        default: {
          std::fill(records.begin(), records.end(), 0xee);
          if (below && random() % 8 == 0) lower->fail_reads(1);
          try {
            host.read(keys, records.data(), found);
          } catch (const TierError&) {
            lower->fail_reads(0);
            host.read(keys, records.data(), found);
          }
          for (size_t i = 0; i < keys.size(); ++i) {
            auto at = truth.find({keys[i].table, keys[i].id});
            CHECK_EQ(found[i], at != truth.end());
            uint8_t untouched[16];
            std::memset(untouched, 0xee, 16);
            const uint8_t* wanted = found[i] ? at->second.data() : untouched;
            CHECK(!std::memcmp(records.data() + i * 16, wanted, 16));
          }
        }
      }
      if (below) lower->fail_writes(0), lower->fail_reads(0);
    }
    for (int32_t table : {0, 1}) {
      std::vector<int64_t> wanted;
      for (const auto& [key, record] : truth) {
        if (key.first == table) wanted.push_back(key.second);
      }
      std::vector<int64_t> ids(static_cast<size_t>(host.rows(table)));
      host.ids(table, ids.data());
      CHECK(ids == wanted && !wanted.empty());
      std::vector<RowKey> scanned(7);
      std::vector<int64_t> all;
      auto scan = host.scan({&table, 1});
      while (int64_t n = scan->next(7, scanned.data(), records.data())) {
        for (int64_t i = 0; i < n; ++i) {
          all.push_back(scanned[i].id);
          CHECK_EQ(scanned[i].table, table);
          CHECK(!std::memcmp(records.data() + i * 16, truth[{table, all.back()}].data(), 16));
        }
      }
      std::sort(all.begin(), all.end());
      CHECK(all == wanted);
      if (!below) continue;
      host.flush();
      CHECK_EQ(lower->rows(table), host.rows(table));
    }
  }
}

TEST(a_full_host_tier_refuses_a_write_whole) {
  HostTier host(8, {-1}, 10, nullptr);
  std::vector<RowKey> keys;
  for (int64_t id = 0; id < 9; ++id) keys.push_back({id, 0});
  std::vector<uint8_t> records(16 * 8, 1);
  host.write(keys, records.data());
  std::vector<RowKey> more;
  for (int64_t id = 5; id < 14; ++id) more.push_back({id, 0});
  std::vector<uint8_t> others(16 * 8, 2);
  std::string said = CHECK_THROWS(host.write(more, others.data()), TierError);
  CHECK(said.find("14 rows of 8 bytes do not fit into 10") != std::string::npos);
  bool found[9];
  std::vector<uint8_t> now(9 * 8);
  host.read(keys, now.data(), found);
  CHECK(std::all_of(now.begin(), now.end(), [](uint8_t byte) { return byte == 1; }));
  CHECK_EQ(host.rows(0), 9);
  std::vector<RowKey> same(more.begin(), more.begin() + 4);
  host.write(same, others.data());  // rows that are there need no room
}

// Every row of it was written, and none has gone below before.
TEST(a_host_tier_that_gets_less_memory_loses_no_row) {
  constexpr int64_t kRows = 24;
  for (int64_t limit : {1, 2, 10, 23}) {
    auto lower = std::make_shared<MapTier>(16);
    HostTier host(16, {100}, kRows, lower);
    int64_t allowed = kRows;
    host.allow([&](uint64_t) { return allowed; });
    std::vector<RowKey> keys;
    std::vector<uint8_t> records(kRows * 16);
    for (int64_t id = 0; id < kRows; ++id) {
      keys.push_back({id, 0});
      std::fill_n(records.begin() + id * 16, 16, static_cast<uint8_t>(id + 1));
      host.write({&keys.back(), 1}, records.data() + id * 16);
    }
    allowed = limit;
    host.write({&keys.back(), 1}, records.data() + (kRows - 1) * 16);
    bool found[kRows];
    std::vector<uint8_t> now(records.size());
    host.read(keys, now.data(), found);
    CHECK(std::all_of(found, found + kRows, [](bool here) { return here; }));
    CHECK(now == records);
  }
}

TEST(the_host_tier_counts_what_it_serves) {
  auto lower = std::make_shared<MapTier>(8);
  HostTier host(8, {-1}, 4, lower);
  std::vector<RowKey> keys;
  for (int64_t id = 0; id < 12; ++id) keys.push_back({id, 0});
  std::vector<uint8_t> records(12 * 8, 1);
  bool found[12];
  CHECK_EQ(host.own_traffic().rows_read, 0u);
  host.write(std::span(keys).first(10), records.data());
  CHECK_EQ(host.own_traffic().rows_written, 10u);
  uint64_t here = 10 - static_cast<uint64_t>(lower->rows(0));  // all are dirty: one place each
  CHECK(here > 0 && here <= 4);
  host.read(keys, records.data(), found);
  CHECK_EQ(host.own_traffic().rows_read, here);  // neither those below nor those nowhere
  lower->fail_reads(1);
  CHECK_THROWS(host.read(keys, records.data(), found), TierError);
  CHECK_EQ(host.own_traffic().rows_read, here);
  // New rows come in parts of two, each of which pushes two others out.
  lower->fail_writes(2);
  std::vector<RowKey> others = {{20, 0}, {21, 0}, {22, 0}, {23, 0}};
  CHECK_THROWS(host.write(others, records.data()), TierError);
  CHECK_EQ(host.own_traffic().rows_written, 12u);
  // Counts are read while rows move.
  std::atomic<bool> ended{false};
  std::thread watching([&] {
    TierTraffic last;
    while (!ended) {
      TierTraffic now = host.own_traffic();
      CHECK(now.rows_read >= last.rows_read && now.rows_written >= last.rows_written);
      last = now;
    }
  });
  for (int round = 0; round < 500; ++round) {
    host.write(keys, records.data());
    host.read(keys, records.data(), found);
  }
  ended = true;
  watching.join();
  CHECK_EQ(host.own_traffic().rows_written, 12u + 12 * 500);
}
