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
#include "log/row_log.hpp"
#include "log_fixture.hpp"
#include "log_model.hpp"
#include "log_tier_access.hpp"

using namespace hotbed;
using model::Versions;

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
    auto scan_all = [&] { model::check_scan(tier, {0}, versions); };
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
    scan_all();
    faults->flip_bit(faults->reads() + 1, 8 * 600 + 1);
    scan_all();  // right the second time
    faults->fail_read(faults->reads() + 1, EIO);
    scan_all();
    next = faults->reads() + 1;
    faults->flip_bit(next, 8 * 600 + 1).fail_read(next + 1, EIO);
    message = CHECK_THROWS(scan_all(), TierError);
    CHECK(message.find(segments_in(folder / "log")[0]) != std::string::npos);
    CHECK(message.find("rows in it are lost") != std::string::npos);
    scan_all();
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
    message = CHECK_THROWS(scan_all(), TierError);
    CHECK(message.find("offset 40960") != std::string::npos);
    CHECK(message.find(" 7 rows in it are lost") != std::string::npos);
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
  std::string user = "this process";
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

TEST(discarding_a_log_leaves_what_is_not_its_own) {
  Folder folder;
  std::string path = folder / "log";
  auto log = RowLog::create(path, one_store(64, 1000), small());
  model::write(log->tier(0), range(0, 1000), 1);
  CHECK(CHECK_THROWS(discard_log(path), TierError).find("in use") != std::string::npos);
  log->close();
  log.reset();
  CHECK(segments_in(path).size() > 0);
  std::filesystem::create_symlink(path, folder / "link");
  CHECK(CHECK_THROWS(discard_log(folder / "link"), TierError).find("link") != std::string::npos);
  std::ofstream(path + "/1.rows") << "mine";
  std::ofstream(path + "/manifest.new") << "unfinished";
  CHECK(holds_log(path) && !holds_log(folder.path) && !holds_log(folder / "absent"));
  CHECK(discard_log(path) == std::vector<std::string>{"1.rows"});
  CHECK(!holds_log(path));
  CHECK_THROWS(discard_log(path), TierError);
  // Somebody else's files of such names are neither taken for a log's nor overwritten.
  LogOptions options = small();
  options.reset = true;
  std::ofstream(path + "/manifest") << "of a ship";
  CHECK_THROWS(RowLog::create(path, one_store(64, 10), options), TierError);
  std::string left;
  std::getline(std::ifstream(path + "/manifest"), left);
  CHECK_EQ(left, "of a ship");
  std::filesystem::remove(path + "/manifest");
  std::ofstream(path + "/0-0000000001.rows") << "mine";
  CHECK_THROWS(RowLog::create(path, one_store(64, 10), options), TierError);
  CHECK_EQ(std::filesystem::file_size(path + "/0-0000000001.rows"), 4u);
  std::filesystem::remove(path + "/0-0000000001.rows");
  RowLog::create(path, one_store(64, 10), options);
  CHECK(discard_log(path) == std::vector<std::string>{"1.rows"});
  std::filesystem::remove(path + "/1.rows");
  RowLog::create(path, one_store(64, 10), options);
  CHECK(discard_log(path).empty() && !std::filesystem::exists(path));
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
  refused({{64, {{1, "a", 5}, {1, "b", 5}}}}, small(), "'b'");
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
    skip_blocks(log->tier(0), 100000000);
    model::write(log->tier(0), range(5, 50), 2);
    for (const RowKey& key : range(0, 10)) versions[key] = 1;
    for (const RowKey& key : range(5, 50)) versions[key] = 2;
    log->sync();
    model::check_all(log->tier(0), versions, false);  // it would read all of 2^41 bytes
    CHECK(log->tier(0).statistics().blocks_read > 0);
  }
  std::string path = segments_in(folder / "log")[0];
  struct stat status;
  CHECK_EQ(stat(path.c_str(), &status), 0);
  CHECK(status.st_size > int64_t{1} << 40);
  CHECK(status.st_blocks * 512 < 64 << 20);
  auto again = RowLog::open_to_read(folder / "log");
  CHECK_EQ(again->recovery().at(0).dropped, 0u);
  model::check_all(again->tier(0), versions, false);
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
