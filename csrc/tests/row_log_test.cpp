#include "row_log.hpp"

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
#include "log_model.hpp"

using namespace hotbed;
using model::Versions;

namespace {

constexpr uint64_t kSmallest = 64 * 4096;  // a segment

LogOptions small(IoBackend backend = IoBackend::automatic,
                 std::shared_ptr<IoFaults> faults = nullptr) {
  LogOptions options;
  options.segment_bytes = kSmallest;
  options.append_bytes = 2 * kSmallest;
  options.io.backend = backend;
  options.io.threads = 4;
  options.io.depth = 32;
  options.io.faults = std::move(faults);
  return options;
}

std::vector<LogStore> one_store(int64_t record_bytes, int64_t rows) {
  return {{record_bytes, {{0, "item", rows}}}};
}

std::vector<RowKey> range(int64_t begin, int64_t end, int32_t table = 0) {
  std::vector<RowKey> keys;
  for (int64_t id = begin; id < end; ++id) keys.push_back({id, table});
  return keys;
}

// Bytes of the segments in a folder, as the file system counts them.
uint64_t bytes_in(const std::string& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code gone;  // removed meanwhile
    uint64_t size = entry.path().extension() == ".rows" ? entry.file_size(gone) : 0;
    if (!gone) bytes += size;
  }
  return bytes;
}

std::vector<std::string> segments_in(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".rows") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<IoBackend> backends() {
  if (ring_works()) return {IoBackend::threads, IoBackend::ring};
  return {IoBackend::threads};
}

}  // namespace

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
  uint64_t shared = log->tier(0).memory_bytes() - 3000000 * 4;
  CHECK(shared < (12 << 20));
  // A pattern of ids without a pattern; the KeyIndex is at its best from some size on.
  std::vector<RowKey> keys;
  for (uint64_t i = 0; i < 3000000; ++i) keys.push_back({static_cast<int64_t>(mix(i)), 1});
  std::vector<uint8_t> records(keys.size() * 4);
  log->tier(1).write(keys, records.data());
  CHECK(static_cast<double>(log->tier(1).memory_bytes()) < 24.0 * 3000000);
}

TEST(a_full_disk_loses_nothing_and_is_told) {
  for (IoBackend backend : backends()) {
    for (bool preallocate : {true, false}) {
      Folder folder;
      auto faults = std::make_shared<IoFaults>();
      LogOptions options = small(backend, faults);
      options.preallocate = preallocate;
      options.background = false;
      if (preallocate) {
        faults->full_after_preallocating(3 * kSmallest + 5000);
      } else {
        faults->full_after_writing(3 * kSmallest + 5000);
      }
      auto log = RowLog::create(folder / "log", one_store(512, 20000), options);
      LogTier& tier = log->tier(0);
      Versions versions;
      uint64_t version = 0;
      std::string message;
      auto write_until_full = [&] {
        message.clear();
        while (message.empty()) {
          CHECK(version < 2000);
          auto keys = range(static_cast<int64_t>(version % 190) * 100,
                            static_cast<int64_t>(version % 190) * 100 + 150);
          ++version;
          try {
            model::write(tier, keys, version);
            for (const RowKey& key : keys) versions[key] = version;
          } catch (const TierError& error) {
            message = error.what();
            CHECK(error.path.find(folder / "log") == 0);
            CHECK(error.bytes > 0);
          }
        }
      };
      write_until_full();
      CHECK(message.find("No space left") != std::string::npos);
      model::check_all(tier, versions);
      // Again, and still nothing is lost.
      write_until_full();
      model::check_all(tier, versions);
      if (!preallocate) {
        CHECK_THROWS(log->sync(), TierError);
        CHECK_THROWS(log->flush(), TierError);
        CHECK(log->statistics().writer.failed > 0);
      }
      faults->make_room();
      for (uint64_t i = 0; i < 100; ++i) {
        auto keys = range(static_cast<int64_t>(i) * 100, static_cast<int64_t>(i) * 100 + 130);
        ++version;
        model::write(tier, keys, version);
        for (const RowKey& key : keys) versions[key] = version;
      }
      log->sync();
      CHECK_EQ(log->statistics().writer.failed, 0u);
      model::check_all(tier, versions);
      log->close();
      auto again = RowLog::open_to_read(folder / "log");
      model::check_all(again->tier(0), versions);
      CHECK_EQ(again->recovery().at(0).dropped, 0u);
    }
  }
}

TEST(a_write_that_fails_is_told_at_the_next_call_and_tried_again) {
  Folder folder;
  auto faults = std::make_shared<IoFaults>();
  faults->fail_write(2, EIO);
  auto log = RowLog::create(folder / "log", one_store(512, 20000), small({}, faults));
  LogTier& tier = log->tier(0);
  Versions versions;
  for (const RowKey& key : range(0, 3000)) versions[key] = 1;
  model::write(tier, range(0, 3000), 1);
  // The second buffer was refused once; the next write tries it again, and goes through.
  model::check_all(tier, versions);
  model::write(tier, range(3000, 3100), 1);
  for (const RowKey& key : range(3000, 3100)) versions[key] = 1;
  log->sync();
  model::check_all(tier, versions);
  CHECK(log->statistics().io.errors > 0);
}

TEST(a_failed_sync_is_never_taken_back) {
  Folder folder;
  auto faults = std::make_shared<IoFaults>();
  faults->fail_sync(1, EIO);
  auto log = RowLog::create(folder / "log", one_store(512, 100), small({}, faults));
  model::write(log->tier(0), range(0, 100), 1);
  CHECK_THROWS(log->sync(), TierError);
  std::string message = CHECK_THROWS(log->sync(), TierError);
  CHECK(message.find("earlier sync failed") != std::string::npos);
  CHECK_THROWS(log->close(), TierError);
  log->close();
}

TEST(what_cannot_be_read_is_an_error_and_never_another_row) {
  for (IoBackend backend : backends()) {
    Folder folder;
    auto faults = std::make_shared<IoFaults>();
    auto log = RowLog::create(folder / "log", one_store(512, 20000), small(backend, faults));
    LogTier& tier = log->tier(0);
    Versions versions;
    for (const RowKey& key : range(0, 5000)) versions[key] = 1;
    model::write(tier, range(0, 5000), 1);
    log->flush();
    auto read_ten = [&] { model::check_rows(tier, range(70, 80), versions); };
    // A short read goes on; a bit that flips on the way is right the second time.
    faults->shorten_read(1, 100);
    read_ten();
    CHECK_EQ(log->statistics().io.retries, 1u);
    faults->flip_bit(3, 8 * 600 + 1);
    read_ten();
    CHECK_EQ(tier.statistics().rereads, 2u);  // both blocks of the request
    // One that is wrong on the disk is not. (The fifth read is the one that asks again.)
    uint64_t next = faults->reads() + 1;
    faults->flip_bit(next, 8 * 600 + 1).flip_bit(next + 1, 8 * 600 + 1);
    std::string message = CHECK_THROWS(read_ten(), TierError);
    CHECK(message.find(segments_in(folder / "log")[0]) != std::string::npos);
    CHECK(message.find("offset 40960") != std::string::npos);
    CHECK(message.find("Row 70 of table number 0") != std::string::npos);
    read_ten();
    faults->fail_read(faults->reads() + 1, EIO);
    message = CHECK_THROWS(read_ten(), TierError);
    CHECK(message.find("offset 40960") != std::string::npos);
    CHECK(message.find("8192 bytes") != std::string::npos);
    read_ten();
    // Another block in the place of the right one, checksum and all.
    log->sync();
    std::string path = segments_in(folder / "log")[0];
    std::vector<char> block(4096), theirs(4096);
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(4096 * 10);
      file.read(block.data(), 4096);
      file.seekg(4096 * 20);
      file.read(theirs.data(), 4096);
      file.seekp(4096 * 10);
      file.write(theirs.data(), 4096);
    }
    CHECK_THROWS(read_ten(), TierError);
    // The segment with the damage cannot be emptied, and is kept.
    for (uint64_t version = 2; version < 6; ++version) {
      std::vector<RowKey> keys;
      for (int64_t id = 0; id < 5000; ++id) {
        if (id / 7 != 10) keys.push_back({id, 0});
      }
      model::write(tier, keys, version);
      for (const RowKey& key : keys) versions[key] = version;
    }
    for (int step = 0; step < 40; ++step) {
      try {
        if (!tier.compact_step()) break;
      } catch (const TierError& error) {
        CHECK(std::string(error.what()).find("offset 40960") != std::string::npos);
      }
    }
    CHECK_EQ(tier.statistics().damaged_segments, 1u);
    CHECK(!tier.statistics().compaction_failure.empty());
    CHECK_THROWS(read_ten(), TierError);
    auto rest = range(0, 70);
    model::check_rows(tier, rest, versions);
  }
}

TEST(a_torn_last_record_is_dropped_and_told) {
  Folder folder;
  Versions versions;
  {
    auto log = RowLog::create(folder / "log", one_store(512, 20000), small());
    for (const RowKey& key : range(0, 100)) versions[key] = 1;
    model::write(log->tier(0), range(0, 100), 1);
  }
  // The last block (rows 98 and 99) was half written.
  std::string path = segments_in(folder / "log")[0];
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 * 14 + 512);
    std::vector<char> zeros(4096 - 512);
    file.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
  }
  versions.erase({98, 0});
  versions.erase({99, 0});
  auto log = RowLog::open_to_read(folder / "log");
  model::check_all(log->tier(0), versions);
  const RecoveryReport& report = log->recovery().at(0);
  CHECK_EQ(report.dropped, 1u);
  CHECK_EQ(report.dropped_blocks[0].path, path);
  CHECK_EQ(report.dropped_blocks[0].offset, 4096u * 14);
  CHECK_EQ(report.records, 98u);
  CHECK_EQ(report.blocks, 14u);
  log->close();
  // A file that is cut short says so too.
  std::filesystem::resize_file(path, 4096 * 7 + 100);
  auto cut = RowLog::open_to_read(folder / "log");
  CHECK_EQ(cut->tier(0).rows(0), 49);
  CHECK_EQ(cut->recovery().at(0).dropped, 1u);
}

TEST(a_folder_is_used_by_one_log_at_a_time) {
  Folder folder;
  auto log = RowLog::create(folder / "log", one_store(64, 10), small());
  model::write(log->tier(0), range(0, 10), 1);
  std::string user = "process " + std::to_string(getpid());
  std::string message =
      CHECK_THROWS(RowLog::create(folder / "log", one_store(64, 10), small()), TierError);
  CHECK(message.find("in use by " + user) != std::string::npos);
  message = CHECK_THROWS(RowLog::open_to_read(folder / "log"), TierError);
  CHECK(message.find("in use by " + user) != std::string::npos);
  log->close();
  {
    auto first = RowLog::open_to_read(folder / "log");
    auto second = RowLog::open_to_read(folder / "log");
    CHECK_EQ(first->tier(0).rows(0), 10);
    CHECK_THROWS(RowLog::create(folder / "log", one_store(64, 10), small()), TierError);
  }
  message = CHECK_THROWS(RowLog::create(folder / "log", one_store(64, 10), small()), TierError);
  CHECK(message.find("reset=True") != std::string::npos);
  LogOptions options = small();
  options.reset = true;
  auto fresh = RowLog::create(folder / "log", one_store(64, 10), options);
  CHECK_EQ(fresh->tier(0).rows(0), 0);
  model::check_rows(fresh->tier(0), range(0, 10), {});
}

TEST(what_makes_no_sense_is_refused) {
  Folder folder;
  auto refused = [&](std::vector<LogStore> stores, LogOptions options, const std::string& why) {
    std::string message =
        CHECK_THROWS(RowLog::create(folder / "log", stores, options), std::invalid_argument);
    CHECK(message.find(why) != std::string::npos);
  };
  refused({}, small(), "0 stores");
  refused({{0, {}}}, small(), "0 bytes");
  refused({{64, {{0, "item", -2}}}}, small(), "'item'");
  refused({{64, {{70000, "item", 5}}}}, small(), "70000");
  refused({{64, {{1, "a", 5}}}, {64, {{1, "b", 5}}}}, small(), "'b'");
  LogOptions options = small();
  options.space_ratio = 1.1;
  refused(one_store(64, 5), options, "1.1");
  options = small();
  options.segment_bytes = 4096;
  refused(one_store(64, 5), options, "4096");
  options.segment_bytes = uint64_t{1} << 40;
  refused(one_store(4, 5), options, "smaller segments");
  CHECK_THROWS(RowLog::open_to_read(folder / "nothing"), TierError);

  auto log = RowLog::create(folder / "log", {{64, {{2, "item", 5}}}}, small());
  LogTier& tier = log->tier(0);
  std::vector<uint8_t> records(640);
  bool found[10];
  for (RowKey bad : {RowKey{5, 2}, RowKey{-1, 2}, RowKey{0, 0}, RowKey{0, 3}, RowKey{0, -1}}) {
    std::vector<RowKey> keys{{0, 2}, bad};
    CHECK_THROWS(tier.read(keys, records.data(), found), std::invalid_argument);
    CHECK_THROWS(tier.write(keys, records.data()), std::invalid_argument);
    CHECK_THROWS(tier.erase(keys), std::invalid_argument);
  }
  CHECK_EQ(tier.rows(2), 0);
  CHECK_THROWS(tier.rows(0), std::invalid_argument);
  CHECK_THROWS(log->tier(1), std::invalid_argument);
}

TEST(a_damaged_manifest_is_an_error) {
  Folder folder;
  RowLog::create(folder / "log", one_store(64, 10), small())->close();
  std::string path = folder / "log/manifest";
  auto size = std::filesystem::file_size(std::filesystem::path(path));
  for (uint64_t at = 0; at <= size; ++at) {
    std::vector<char> kept(size);
    {
      std::ifstream file(path, std::ios::binary);
      file.read(kept.data(), static_cast<std::streamsize>(size));
    }
    std::vector<char> wrong = kept;
    if (at < size) {
      wrong[at] = static_cast<char>(wrong[at] ^ 4);
    } else {
      wrong.resize(size / 2);
    }
    std::ofstream(path, std::ios::binary)
        .write(wrong.data(), static_cast<std::streamsize>(wrong.size()));
    std::string message = CHECK_THROWS(RowLog::open_to_read(folder / "log"), TierError);
    CHECK(message.find(path) != std::string::npos);
    std::ofstream(path, std::ios::binary)
        .write(kept.data(), static_cast<std::streamsize>(kept.size()));
  }
  RowLog::open_to_read(folder / "log");
}

TEST(a_forked_child_is_refused_and_harms_nothing) {
  Folder folder;
  auto log = RowLog::create(folder / "log", one_store(64, 100), small());
  model::write(log->tier(0), range(0, 100), 1);
  pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      bool found[1];
      uint8_t record[64];
      RowKey key{0, 0};
      log->tier(0).read({&key, 1}, record, found);
    } catch (const TierError& error) {
      code = std::string(error.what()).find("forked") != std::string::npos ? 0 : 2;
    }
    log->close();
    log.reset();
    _exit(code);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_THROWS(RowLog::create(folder / "log", one_store(64, 10), small()), TierError);
  Versions versions;
  for (const RowKey& key : range(0, 100)) versions[key] = 1;
  model::check_all(log->tier(0), versions);
}

TEST(offsets_go_beyond_two_to_the_forty) {
  Folder folder;
  LogOptions options;
  options.segment_bytes = uint64_t{1} << 41;
  options.preallocate = false;
  options.background = false;
  Versions versions;
  {
    std::unique_ptr<RowLog> log;
    try {
      log = RowLog::create(folder / "log", one_store(3000, 100), options);
      model::write(log->tier(0), range(0, 10), 1);
    } catch (const TierError& error) {
      std::cout << "  (this file system has no files so large: " << error.what() << ")"
                << std::endl;
      return;
    }
    // A block has 12288 bytes, so this is beyond 2^40 bytes and before 2^41.
    log->tier(0).skip_blocks_for_test(100000000);
    model::write(log->tier(0), range(5, 50), 2);
    for (const RowKey& key : range(0, 10)) versions[key] = 1;
    for (const RowKey& key : range(5, 50)) versions[key] = 2;
    log->sync();
    model::check_all(log->tier(0), versions);
    CHECK(log->tier(0).statistics().blocks_read > 0);
  }
  std::string path = segments_in(folder / "log")[0];
  struct stat status;
  CHECK_EQ(stat(path.c_str(), &status), 0);
  CHECK(status.st_size > int64_t{1} << 40);
  CHECK(status.st_blocks * 512 < 64 << 20);
  auto again = RowLog::open_to_read(folder / "log");
  CHECK_EQ(again->recovery().at(0).dropped, 0u);
  model::check_all(again->tier(0), versions);
  // And a wrong byte is told at its offset.
  uint64_t offset = uint64_t{12288} * 100000001;
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset) + 5000);
    file.put('x');
  }
  again.reset();
  auto damaged = RowLog::open_to_read(folder / "log");
  CHECK(damaged->recovery().at(0).dropped >= 1);
  bool told = false;
  for (const DroppedBlock& block : damaged->recovery().at(0).dropped_blocks) {
    told |= block.offset > uint64_t{1} << 40;
  }
  CHECK(told);
}
