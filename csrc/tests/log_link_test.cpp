// Logs that share files: linked ones are what they were, and adopted ones go on.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "folder.hpp"
#include "log/row_log.hpp"
#include "log_model.hpp"
#include "testing/io_faults.hpp"

using namespace hotbed;

namespace {

constexpr int64_t kRows = 900;
const std::vector<size_t> kRecordBytes{200, 72};

LogOptions small(uint64_t seed, std::shared_ptr<IoFaults> faults = nullptr) {
  LogOptions options;
  options.segment_bytes = 64 * 4096;
  options.append_bytes = 4 * 4096;
  options.space_ratio = seed % 2 ? 1.5 : 1.15;
  options.preallocate = seed % 3 > 0;
  options.background = seed % 4 > 0;
  options.io.threads = 4;
  // Of a log of few bytes, which has less than it reads at once otherwise.
  options.io.arena_bytes = seed % 2 ? 64 << 10 : 1 << 20;
  options.io.observer = std::move(faults);
  return options;
}

std::vector<LogStore> stores() {
  return {{static_cast<int64_t>(kRecordBytes[0]), {{0, "item", kRows}, {1, "user", -1}}},
          {static_cast<int64_t>(kRecordBytes[1]), {{0, "word", -1}}}};
}

using Both = std::vector<model::Versions>;  // by store

void change(RowLog& log, Both& versions, std::mt19937_64& random, uint64_t& version, int steps) {
  for (int step = 0; step < steps; ++step) {
    size_t store = random() % 3 ? 0 : 1;
    std::set<RowKey, model::Less> chosen;
    size_t count = random() % 300 + 1;
    while (chosen.size() < count) {
      auto id = static_cast<int64_t>(random() % kRows);
      chosen.insert({id, store ? 0 : static_cast<int32_t>(random() % 2)});
    }
    std::vector<RowKey> keys(chosen.begin(), chosen.end());
    LogTier& tier = log.tier(store);
    if (random() % 4 == 0) {
      tier.erase(keys);
      for (const RowKey& key : keys) versions[store].erase(key);
    } else {
      model::write(tier, keys, ++version);
      for (const RowKey& key : keys) versions[store][key] = version;
    }
    if (random() % 4 == 0) tier.compact_step();
  }
}

void check_log(RowLog& log, const Both& versions, bool read) {
  for (size_t store = 0; store < versions.size(); ++store) {
    if (read) CHECK_EQ(log.recovery().at(store).dropped, 0u);
    model::check_all(log.tier(store), versions[store]);
  }
}

void check_linked(const std::string& folder, const Both& versions) {
  check_log(*RowLog::open_to_read(folder, {}, false), versions, true);
  CHECK(!std::filesystem::exists(folder + "/lock"));
}

std::vector<std::string> segments_left(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".rows") names.push_back(entry.path().filename());
  }
  return names;
}

void erase_all(RowLog& log, Both& versions) {
  for (size_t store = 0; store < versions.size(); ++store) {
    std::vector<RowKey> keys;
    for (const auto& [key, version] : versions[store]) keys.push_back(key);
    log.tier(store).erase(keys);
    versions[store].clear();
  }
}

}  // namespace

TEST(links_are_what_the_log_was_and_adopted_logs_go_on) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Folder folder(Folder::On::memory);
    std::mt19937_64 random(seed);
    uint64_t version = 0;
    std::vector<std::pair<std::string, Both>> links;
    std::vector<std::unique_ptr<RowLog>> logs;
    std::vector<Both> versions;
    for (const char* name : {"a", "b"}) {
      logs.push_back(RowLog::create(folder / name, stores(), small(seed)));
      versions.emplace_back(2);
    }
    for (int turn = 0; turn < 14; ++turn) {
      size_t l = random() % 2;
      change(*logs[l], versions[l], random, version, static_cast<int>(random() % 12));
      if (turn == 0 || random() % 2) {
        links.emplace_back(folder / ("link-" + std::to_string(links.size())), versions[l]);
        logs[l]->link(links.back().first);
      } else {
        const auto& [from, was] = links[random() % links.size()];
        if (random() % 2 && std::any_of(versions[l].begin(), versions[l].end(),
                                        [](const auto& v) { return !v.empty(); })) {
          CHECK(!logs[l]->adopt(from));  // it has rows
          check_log(*logs[l], versions[l], false);
        }
        erase_all(*logs[l], versions[l]);
        CHECK(logs[l]->adopt(from));
        versions[l] = was;
      }
      check_log(*logs[l], versions[l], false);
    }
    for (const auto& [at, was] : links) check_linked(at, was);
    for (size_t l = 0; l < 2; ++l) {
      change(*logs[l], versions[l], random, version, 20);
      std::string path = logs[l]->path();
      logs[l]->close();
      check_log(*RowLog::open_to_read(path), versions[l], true);
      logs[l].reset();
      CHECK(discard_log(path).empty());
    }
    for (const auto& [at, was] : links) check_linked(at, was);
  }
}

TEST(nothing_is_written_to_linked_files) {
  Folder folder(Folder::On::memory);
  auto log = RowLog::create(folder / "log", stores(), small(1));
  std::mt19937_64 random(3);
  uint64_t version = 0;
  Both versions(2);
  change(*log, versions, random, version, 6);
  log->link(folder / "link");
  auto contents = [&] {
    std::map<std::string, std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "link")) {
      std::ifstream file(entry.path(), std::ios::binary);
      all[entry.path()] = {std::istreambuf_iterator<char>(file), {}};
    }
    return all;
  };
  auto before = contents();
  CHECK(before.size() > 2);
  change(*log, versions, random, version, 40);
  log->sync();
  CHECK(before == contents());
  for (const auto& entry : std::filesystem::directory_iterator(folder / "link")) {
    struct stat about;
    if (entry.path().extension() != ".rows" || stat(entry.path().c_str(), &about) != 0) continue;
    CHECK_EQ(static_cast<uint64_t>(about.st_size), small(1).segment_bytes);
    std::string bytes = before[entry.path()];
    uint64_t used = (bytes.find_last_not_of('\0') / 4096 + 1) * 4096;  // and nothing behind it
    CHECK(static_cast<uint64_t>(about.st_blocks) * 512 <= used);
  }
  // A second link of what did not change has the same files.
  log->link(folder / "second");
  log->link(folder / "third");
  for (const auto& entry : std::filesystem::directory_iterator(folder / "third")) {
    std::string other = folder / "second/" + entry.path().filename().string();
    CHECK(std::filesystem::exists(other));
    if (entry.path().extension() == ".rows") {
      CHECK(std::filesystem::equivalent(entry.path(), other));
    }
  }
}

TEST(other_logs_are_not_adopted) {
  Folder folder(Folder::On::memory);
  std::mt19937_64 random(3);
  uint64_t version = 0;
  Both versions(2);
  auto log = RowLog::create(folder / "log", stores(), small(1));
  change(*log, versions, random, version, 6);
  log->link(folder / "link");
  auto others = stores();
  others[0].tables[0].rows = kRows + 1;
  auto larger = RowLog::create(folder / "larger", others, small(1));
  CHECK(!larger->adopt(folder / "link"));
  auto segments = small(1);
  segments.segment_bytes *= 2;
  auto wider = RowLog::create(folder / "wider", stores(), segments);
  CHECK(!wider->adopt(folder / "link"));
  others = stores();
  others.pop_back();
  auto fewer = RowLog::create(folder / "fewer", others, small(1));
  CHECK(!fewer->adopt(folder / "link"));
  CHECK_THROWS(fewer->adopt(folder / "nothing"), TierError);
  auto reading = RowLog::open_to_read(folder / "link", {}, false);
  CHECK_THROWS(reading->adopt(folder / "link"), TierError);
  CHECK_THROWS(reading->link(folder / "again"), TierError);
}

TEST(a_damaged_one_leaves_an_empty_log) {
  Folder folder(Folder::On::memory);
  std::mt19937_64 random(3);
  uint64_t version = 0;
  Both versions(2);
  auto log = RowLog::create(folder / "log", stores(), small(1));
  change(*log, versions, random, version, 12);
  log->link(folder / "link");
  std::filesystem::copy(folder / "link", folder / "copy");
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "copy")) {
    if (entry.path().extension() == ".rows") file = std::max(file, entry.path().string());
  }
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(100).put('x');
  auto other = RowLog::create(folder / "other", stores(), small(1));
  std::string message = CHECK_THROWS(other->adopt(folder / "copy"), TierError);
  CHECK(message.find("checksum") != std::string::npos);
  check_log(*other, Both(2), false);
  for (const auto& entry : std::filesystem::directory_iterator(folder / "other")) {
    CHECK(entry.path().extension() != ".rows");
  }
  Both own(2);
  change(*other, own, random, version, 6);
  check_log(*other, own, false);
  erase_all(*other, own);
  CHECK(other->adopt(folder / "link"));
  check_log(*other, versions, false);
}

TEST(files_and_blocks_that_are_gone_are_told) {
  Folder folder(Folder::On::memory);
  std::mt19937_64 random(5);
  uint64_t version = 0;
  Both versions(2);
  auto log = RowLog::create(folder / "log", stores(), small(1));
  change(*log, versions, random, version, 12);
  log->link(folder / "link");
  auto dropped = [](const RowLog& opened) {
    return opened.recovery().at(0).dropped + opened.recovery().at(1).dropped;
  };
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "link")) {
    if (entry.path().extension() != ".rows") continue;
    ++files;
    std::filesystem::remove_all(folder / "copy");
    std::filesystem::copy(folder / "link", folder / "copy");
    std::string path = folder / "copy/" + entry.path().filename().string();
    // A block of zeros is one that was never written, by itself.
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .write(std::string(4096, 0).data(), 4096);
    CHECK_EQ(dropped(*RowLog::open_to_read(folder / "copy", {}, false)), 1u);
    std::filesystem::remove(path);
    CHECK_EQ(dropped(*RowLog::open_to_read(folder / "copy", {}, false)), 1u);
    auto other = RowLog::create(folder / "other", stores(), small(1));
    std::string message = CHECK_THROWS(other->adopt(folder / "copy"), TierError);
    CHECK(message.find("missing") != std::string::npos);
    other.reset();
    discard_log(folder / "other");
  }
  CHECK(files > 1);
  // Files that it was not linked with are not its own.
  std::filesystem::remove_all(folder / "copy");
  std::filesystem::copy(folder / "link", folder / "copy");
  Both later = versions;
  change(*log, later, random, version, 30);
  log->link(folder / "later");
  for (const auto& entry : std::filesystem::directory_iterator(folder / "later")) {
    std::string path = folder / "copy/" + entry.path().filename().string();
    if (!std::filesystem::exists(path)) std::filesystem::copy(entry.path(), path);
  }
  check_linked(folder / "copy", versions);
  auto other = RowLog::create(folder / "other", stores(), small(1));
  CHECK(other->adopt(folder / "copy"));
  check_log(*other, versions, false);
}

TEST(links_that_cannot_be_made) {
  Folder folder(Folder::On::memory), disk(Folder::On::disk);
  std::mt19937_64 random(3);
  uint64_t version = 0;
  Both versions(2);
  auto log = RowLog::create(folder / "log", stores(), small(1));
  change(*log, versions, random, version, 6);
  CHECK_THROWS(log->link(folder / "log"), TierError);  // it is there
  CHECK_THROWS(log->link(folder / "no/where"), TierError);
  struct stat here, there;
  if (stat(folder.path.c_str(), &here) == 0 && stat(disk.path.c_str(), &there) == 0 &&
      here.st_dev != there.st_dev) {
    std::string message = CHECK_THROWS(log->link(disk / "link"), TierError);
    CHECK(message.find("one file system") != std::string::npos);
    log->link(folder / "link");
    auto other = RowLog::create(disk / "log", stores(), small(1));
    CHECK(!other->adopt(folder / "link"));
  }
  // Where one file of several cannot have its name, none has.
  log->link(folder / "several");
  std::string last;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "several")) {
    if (entry.path().extension() == ".rows")
      last = std::max(last, entry.path().filename().string());
  }
  auto other = RowLog::create(folder / "other", stores(), small(1));
  std::filesystem::create_directory(folder / ("other/" + last));
  CHECK(!other->adopt(folder / "several"));
  CHECK(segments_left(folder / "other") == std::vector<std::string>{last});
  std::filesystem::remove(folder / ("other/" + last));
  CHECK(other->adopt(folder / "several"));
  check_log(*other, versions, false);
  change(*log, versions, random, version, 6);
  check_log(*log, versions, false);
}
