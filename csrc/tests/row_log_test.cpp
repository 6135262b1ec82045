#include "log/row_log.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "folder.hpp"
#include "log_fixture.hpp"
#include "log_model.hpp"

using namespace hotbed;
using model::Versions;

TEST(a_block_is_good_where_it_was_written_only) {
  BlockLayout layout(64);
  std::vector<uint8_t> block(layout.block_bytes);
  BlockHeader header{};
  header.log = 7;
  header.segment = 3;
  header.block = 2;
  header.store = 1;
  header.kind = BlockKind::records;
  header.count = static_cast<uint16_t>(layout.records);
  CHECK(check_block(block.data(), layout, header) == BlockState::empty);
  seal_block(block.data(), layout, header);
  CHECK(check_block(block.data(), layout, header) == BlockState::good);
  for (int field = 0; field < 4; ++field) {
    BlockHeader expected = header;
    if (field == 0) expected.log = 8;
    if (field == 1) expected.segment = 4;
    if (field == 2) expected.block = 1;
    if (field == 3) expected.store = 0;
    CHECK(check_block(block.data(), layout, expected) == BlockState::foreign);
  }
  block.back() ^= 1;
  CHECK(check_block(block.data(), layout, header) == BlockState::torn);
  block.back() ^= 1;
  ++header.count;
  seal_block(block.data(), layout, header);
  CHECK(check_block(block.data(), layout, header) == BlockState::foreign);
}

TEST(a_random_history_reads_like_a_map) {
  for (IoBackend backend : backends()) {
    for (bool background : {false, true}) {
      for (int64_t record_bytes : {4, 100, 512, 5000}) {
        Folder folder;
        std::mt19937_64 random(static_cast<uint64_t>(record_bytes));
        LogOptions options = small(backend);
        options.background = background;
        options.segment_bytes = record_bytes == 5000 ? 64 * 12288 : kSmallest;
        // Dynamic ids from all over, few enough to meet again.
        std::vector<LogStore> stores{
            {record_bytes, {{3, "item", 900}, {0, "user", -1}}},
            {64, {{1, "other", 50}}},
        };
        auto log = RowLog::create(folder / "log", stores, options);
        LogTier& tier = log->tier(0);
        Versions versions, other;
        auto any_key = [&]() -> RowKey {
          if (random() % 2) return {static_cast<int64_t>(random() % 900), 3};
          return {static_cast<int64_t>(mix(random() % 700)), 0};
        };
        auto distinct = [&](size_t most) {
          std::set<RowKey, model::Less> keys;
          for (size_t n = random() % most + 1; keys.size() < n;) keys.insert(any_key());
          std::vector<RowKey> shuffled(keys.begin(), keys.end());
          std::shuffle(shuffled.begin(), shuffled.end(), random);
          return shuffled;
        };
        int steps = record_bytes == 5000 ? 60 : 150;
        for (uint64_t step = 1; step <= static_cast<uint64_t>(steps); ++step) {
          switch (random() % 8) {
            case 0:
            case 1:
            case 2: {
              auto keys = distinct(400);
              model::write(tier, keys, step);
              for (const RowKey& key : keys) versions[key] = step;
              break;
            }
            case 3: {
              auto keys = distinct(random() % 4 ? 30 : 600);
              tier.erase(keys);
              for (const RowKey& key : keys) versions.erase(key);
              break;
            }
            case 4: {
              std::vector<RowKey> keys;
              for (size_t i = random() % 900; i > 0; --i) keys.push_back(any_key());
              model::check_rows(tier, keys, versions);
              break;
            }
            case 5:
              if (random() % 2) {
                log->flush();
              } else {
                log->sync();
              }
              break;
            case 6: tier.compact_step(); break;
            default:
              model::write(log->tier(1), range(0, 50, 1), step);
              for (const RowKey& key : range(0, 50, 1)) other[key] = step;
          }
        }
        model::check_all(tier, versions);
        model::check_all(log->tier(1), other);
        CHECK(record_bytes == 4 || tier.statistics().compactions > 0);
        CHECK(log->memory_bytes() >= tier.memory_bytes());
        log->close();
        CHECK_THROWS(model::write(tier, range(0, 1, 3), 1), TierError);

        auto again = RowLog::open_to_read(folder / "log", options.io);
        CHECK_EQ(again->recovery().at(0).dropped, 0u);
        model::check_all(again->tier(0), versions);
        model::check_all(again->tier(1), other);
        CHECK_THROWS(model::write(again->tier(0), range(0, 1, 3), 1), TierError);
        CHECK_THROWS(again->sync(), TierError);
      }
    }
  }
}

TEST(a_row_that_was_never_written_costs_no_reading) {
  Folder folder;
  auto log = RowLog::create(folder / "log", {{512, {{0, "item", 1000}, {1, "user", -1}}}}, small());
  LogTier& tier = log->tier(0);
  model::write(tier, range(0, 100), 1);
  log->flush();
  model::check_rows(tier, range(500, 1000), {});
  model::check_rows(tier, range(0, 1000, 1), {});
  CHECK_EQ(log->statistics().io.reads, 0u);
  CHECK_EQ(tier.statistics().rows_read, 0u);
}

TEST(rows_that_share_a_block_are_read_with_it_once) {
  Folder folder;
  auto log = RowLog::create(folder / "log", one_store(512, 10000), small());
  LogTier& tier = log->tier(0);
  Versions versions;
  for (const RowKey& key : range(0, 7000)) versions[key] = 1;
  model::write(tier, range(0, 7000), 1);
  model::check_rows(tier, range(6990, 7000), versions);
  CHECK_EQ(tier.statistics().rows_from_memory, 10u);
  CHECK_EQ(tier.statistics().blocks_read, 0u);
  log->flush();
  // 7 records lie in a block, 63 in nine, in no order and some of them twice.
  std::vector<RowKey> keys = range(0, 63);
  auto twice = range(20, 30);
  keys.insert(keys.end(), twice.begin(), twice.end());
  std::shuffle(keys.begin(), keys.end(), std::mt19937(1));
  model::check_rows(tier, keys, versions);
  StoreStatistics s = tier.statistics();
  CHECK_EQ(s.rows_from_memory, 10u);
  CHECK_EQ(s.rows_read, 83u);
  CHECK_EQ(s.blocks_read, 9u);
  CHECK_EQ(s.requests, 3u);  // of at most four blocks
  CHECK_EQ(log->statistics().io.reads, 3u);
}

TEST(rows_in_memory_on_their_way_and_on_disk_are_all_read) {
  Folder folder;
  for (IoBackend backend : backends()) {
    LogOptions options = small(backend);
    options.reset = true;
    auto log = RowLog::create(folder / "log", one_store(256, 100000), options);
    LogTier& tier = log->tier(0);
    Versions versions;
    for (int64_t begin = 0; begin < 20000; begin += 100) {
      model::write(tier, range(begin, begin + 100), 5);
      for (const RowKey& key : range(begin, begin + 100)) versions[key] = 5;
      model::check_rows(tier, range(std::max<int64_t>(0, begin - 3000), begin + 100), versions);
    }
    CHECK(tier.statistics().rows_from_memory > 0);
    CHECK(tier.statistics().blocks_read > 0);
  }
}

TEST(threads_read_write_and_erase_while_segments_are_removed) {
  for (IoBackend backend : backends()) {
    Folder folder(Folder::On::memory);
    LogOptions options = small(backend);
    options.space_ratio = 1.15;
    auto log =
        RowLog::create(folder / "log", {{200, {{0, "item", 4000}, {1, "user", -1}}}}, options);
    LogTier& tier = log->tier(0);
    // Row i of either table belongs to writer i % 2; versions rise, and the last one published is
    // the least that a later read may see.
    constexpr int64_t kRows = 4000;
    std::vector<std::atomic<uint64_t>> least(kRows);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int64_t writer = 0; writer < 2; ++writer) {
      threads.emplace_back([&, writer] {
        std::mt19937_64 random(static_cast<uint64_t>(writer));
        for (uint64_t version = 1; version <= 60; ++version) {
          std::vector<RowKey> keys;
          for (int64_t id = writer; id < kRows; id += 2) {
            if (random() % 4 == 0) keys.push_back({id, static_cast<int32_t>(id / 2 % 2)});
          }
          std::shuffle(keys.begin(), keys.end(), random);
          model::write(tier, keys, version);
          for (const RowKey& key : keys) least[static_cast<size_t>(key.id)] = version;
          if (version % 20 == 0) log->sync();
        }
      });
    }
    for (uint64_t reader = 0; reader < 2; ++reader) {
      threads.emplace_back([&, reader] {
        std::mt19937_64 random(reader + 10);
        std::vector<uint8_t> records(300 * 200);
        auto found = std::make_unique<bool[]>(300);
        while (!stop) {
          std::vector<RowKey> keys;
          std::vector<uint64_t> before;
          for (int i = 0; i < 300; ++i) {
            auto id = static_cast<int64_t>(random() % kRows);
            keys.push_back({id, static_cast<int32_t>(id / 2 % 2)});
            before.push_back(least[static_cast<size_t>(id)]);
          }
          tier.read(keys, records.data(), found.get());
          for (size_t i = 0; i < keys.size(); ++i) {
            CHECK(found[i] || before[i] == 0);
            if (!found[i]) continue;
            uint64_t version;
            std::memcpy(&version, &records[i * 200], 8);
            CHECK(version >= before[i]);
            CHECK(model::is(&records[i * 200], 200, keys[i], version));
          }
        }
      });
    }
    threads.emplace_back([&] {
      while (!stop) {
        tier.erase(range(kRows, kRows + 40, 1));  // of nobody else
        model::write(tier, range(kRows, kRows + 40, 1), 1);
        log->statistics();
        CHECK(tier.rows(0) <= kRows);
        std::vector<int64_t> ids(static_cast<size_t>(kRows));
        tier.ids(0, ids.data());
      }
    });
    threads[0].join();
    threads[1].join();
    stop = true;
    for (size_t t = 2; t < threads.size(); ++t) threads[t].join();
    CHECK(tier.statistics().compactions > 10);
  }
}

TEST(space_stays_within_its_bound) {
  for (double ratio : {1.5, 1.15}) {
    Folder folder(Folder::On::memory);
    LogOptions options = small();
    options.space_ratio = ratio;
    auto log = RowLog::create(folder / "log", one_store(512, 20000), options);
    LogTier& tier = log->tier(0);
    std::mt19937_64 random(3);
    model::write(tier, range(0, 20000), 0);
    auto most_allowed = [&] {
      StoreStatistics s = tier.statistics();
      // One more for the segment that compaction fills before another is removed.
      return ratio * static_cast<double>(s.live_bytes) +
             static_cast<double>((kSlackSegments + 1) * kSmallest);
    };
    Versions versions;
    for (const RowKey& key : range(0, 20000)) versions[key] = 0;
    for (uint64_t version = 1; version <= 400; ++version) {
      std::set<int64_t> ids;
      while (ids.size() < 400) ids.insert(static_cast<int64_t>(random() % 20000));
      std::vector<RowKey> keys;
      for (int64_t id : ids) {
        keys.push_back({id, 0});
        versions[keys.back()] = version;
      }
      model::write(tier, keys, version);
      CHECK(static_cast<double>(bytes_in(folder / "log")) <= most_allowed());
    }
    StoreStatistics s = tier.statistics();
    CHECK(s.compactions > 20);
    CHECK_EQ(s.compaction_failure, "");
    model::check_all(tier, versions);
    // When all is forgotten nearly nothing stays.
    tier.erase(range(0, 20000));
    while (tier.compact_step()) {
    }
    CHECK(bytes_in(folder / "log") <= (kSlackSegments + 1) * kSmallest);
    CHECK_EQ(tier.statistics().live_records, 0u);
    log->close();
    auto again = RowLog::open_to_read(folder / "log");
    model::check_all(again->tier(0), {});
  }
}

TEST(an_index_takes_few_bytes_a_row) {
  Folder folder;
  LogOptions options;
  auto log = RowLog::create(folder / "log", {{4, {{0, "item", 3000000}}}, {4, {{1, "user", -1}}}},
                            options);
  // Pages of a static table's index are taken as rows are stored.
  CHECK(log->tier(0).memory_bytes() < (12 << 20));
  CHECK(log->tier(0).index_bytes() - 3000000 * 4 < (1 << 20));
  // A pattern of ids without a pattern; the KeyIndex is at its best from some size on.
  std::vector<RowKey> keys;
  for (uint64_t i = 0; i < 3000000; ++i) keys.push_back({static_cast<int64_t>(mix(i)), 1});
  std::vector<uint8_t> records(keys.size() * 4);
  log->tier(1).write(keys, records.data());
  CHECK(static_cast<double>(log->tier(1).memory_bytes()) < 24.0 * 3000000);
}
