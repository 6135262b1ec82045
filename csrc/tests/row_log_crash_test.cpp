// Crashes of the machine: what was written to the files of a log is recorded, and put back as a
// disk might show it after the power failed at any moment. HOTBED_SOAK=1 tries ten times as many.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

#include "base/crc32c.hpp"
#include "folder.hpp"
#include "log/row_log.hpp"
#include "log_model.hpp"
#include "testing/io_faults.hpp"

using namespace hotbed;

namespace {

using Kind = IoEvent::Kind;

constexpr uint64_t kAbsent = 0;
constexpr size_t kRecordBytes = 200;
constexpr int64_t kRows = 1500;
constexpr uint64_t kSector = 512;

// What a row was, in order: versions, kAbsent after an erasure. It begins absent.
using History = std::map<RowKey, std::vector<uint64_t>, model::Less>;

using States = std::map<RowKey, size_t, model::Less>;  // of each row, how many

struct Story {
  std::string folder;
  std::vector<IoEvent> events;
  History history;
  // By mark: how many states of each row were confirmed.
  std::vector<States> confirmed;
  std::map<size_t, std::string> links;  // by mark, with their names
  uint64_t compactions;
};

// A random life of a log, with compaction in its own thread, and now and then linked.
Story live(const std::string& folder, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto faults = std::make_shared<IoFaults>();
  faults->record();
  LogOptions options;
  options.segment_bytes = 64 * 4096;
  options.append_bytes = 4 * 4096;
  options.space_ratio = random() % 2 ? 1.5 : 1.15;
  options.preallocate = random() % 2;
  options.background = random() % 4 > 0;
  options.io.observer = faults;
  options.io.threads = 4;
  Story story;
  story.folder = folder;
  auto log = RowLog::create(folder + "/log",
                            {{kRecordBytes, {{0, "item", kRows}, {1, "user", -1}}}}, options);
  LogTier& tier = log->tier(0);
  auto confirm = [&] {
    if (random() % 4 == 0) {
      std::string name = "link-" + std::to_string(story.confirmed.size());
      log->link(folder + "/" + name);
      story.links[story.confirmed.size()] = name;
    } else {
      log->sync();
    }
    States states;
    for (const auto& [key, versions] : story.history) states[key] = versions.size();
    story.confirmed.push_back(std::move(states));
    faults->mark(story.confirmed.size() - 1);
  };
  confirm();
  for (uint64_t step = 1; step <= 160; ++step) {
    std::set<RowKey, model::Less> chosen;
    size_t count = random() % 300 + 1;
    while (chosen.size() < count) {
      // Some rows are written far more often than others.
      auto id = static_cast<int64_t>(random() % kRows);
      if (random() % 2) id = id % 100;
      chosen.insert({id, static_cast<int32_t>(random() % 2)});
    }
    std::vector<RowKey> keys(chosen.begin(), chosen.end());
    bool erase = random() % 5 == 0;
    if (erase) {
      tier.erase(keys);
    } else {
      model::write(tier, keys, step);
    }
    for (const RowKey& key : keys) {
      auto& states = story.history[key];
      if (!erase || (!states.empty() && states.back() != kAbsent)) {
        states.push_back(erase ? kAbsent : step);
      }
    }
    if (random() % 6 == 0) confirm();
    if (!options.background && random() % 2) tier.compact_step();
  }
  story.compactions = tier.statistics().compactions;
  story.events = faults->events();  // without the end
  return story;
}

struct Inode {
  std::vector<uint8_t> data;
};

// What it may hold when the power fails right before event `crash`.
std::map<std::string, std::shared_ptr<Inode>> after_crash(const Story& story, size_t crash,
                                                          std::mt19937_64& random) {
  const auto& events = story.events;
  std::vector<size_t> finished(events.size(), SIZE_MAX);  // of writes and syncs, by their start
  for (size_t i = 0; i < crash; ++i) {
    if (events[i].kind == Kind::write_finished || events[i].kind == Kind::sync_finished ||
        events[i].kind == Kind::directory_finished) {
      finished[events[i].pair] = i;
    }
  }
  // Whether a sync (of this file, or of its folder) began after event i and ended before the crash.
  auto synced_after = [&](size_t i, Kind kind, const std::string& path) {
    for (size_t j = i + 1; j < crash; ++j) {
      if (events[j].kind == kind && finished[j] != SIZE_MAX && events[j].path == path) return true;
    }
    return false;
  };
  // Changes of names that no sync confirmed: each happened or not; or, as a journal has it, those
  // up to some moment did.
  bool journaled = random() % 2;
  size_t moment = random() % (crash + 1);
  auto name_changed = [&](size_t i, const std::string& path) {
    std::string parent = std::filesystem::path(path).parent_path();
    if (synced_after(i, Kind::directory_started, parent)) return true;
    return journaled ? i < moment : random() % 2 == 0;
  };
  std::map<std::string, std::shared_ptr<Inode>> names;
  std::map<std::string, std::shared_ptr<Inode>> files;  // what a path means to writes
  for (size_t i = 0; i < crash; ++i) {
    const IoEvent& event = events[i];
    switch (event.kind) {
      case Kind::create: {
        auto inode = std::make_shared<Inode>();
        inode->data.resize(event.offset);
        // Its size was not confirmed either.
        if (!synced_after(i, Kind::sync_started, event.path) && random() % 4 == 0) {
          inode->data.resize(random() % (event.offset + 1));
        }
        files[event.path] = inode;
        if (name_changed(i, event.path)) names[event.path] = inode;
        break;
      }
      case Kind::write_started: {
        auto& data = files[event.path]->data;
        bool safe =
            finished[i] != SIZE_MAX && synced_after(finished[i], Kind::sync_started, event.path);
        uint64_t fate = safe ? 0 : random() % 4;
        uint64_t sectors = (event.data.size() + kSector - 1) / kSector;
        uint64_t torn_at = random() % (sectors + 1);
        for (uint64_t s = 0; s < sectors; ++s) {
          // All of it, none, the beginning, or some sectors.
          bool there = fate == 0 || (fate == 2 && s < torn_at) || (fate == 3 && random() % 2);
          if (!there) continue;
          for (uint64_t b = s * kSector; b < std::min((s + 1) * kSector, event.data.size()); ++b) {
            if (event.offset + b < data.size()) data[event.offset + b] = event.data[b];
          }
        }
        break;
      }
      case Kind::rename:
        files[event.target] = files[event.path];
        if (name_changed(i, event.path)) {
          names[event.target] = files[event.path];
          names.erase(event.path);
        }
        break;
      case Kind::link:
        files[event.target] = files[event.path];
        if (name_changed(i, event.target)) names[event.target] = files[event.path];
        break;
      case Kind::remove:
        if (name_changed(i, event.path)) names.erase(event.path);
        break;
      default: break;
    }
  }
  return names;
}

// Blocks that are neither zero nor right, by the checksum alone.
uint64_t broken_blocks(const Inode& file) {
  uint64_t broken = 0;
  for (size_t at = 0; at + 4096 <= file.data.size(); at += 4096) {
    const uint8_t* block = &file.data[at];
    bool zeros = std::all_of(block, block + 4096, [](uint8_t b) { return b == 0; });
    broken += !zeros && crc32c(block + 4, 4092) != read_as<uint32_t>(block);
  }
  return broken + (file.data.size() != 64 * 4096);
}

// Rows of the story that are in a log: each with a state that is among those it may have, which
// are those between two counts.
void check_rows(const Story& story, LogTier& tier, const States& from, const States* to) {
  std::vector<RowKey> keys;
  for (const auto& [key, states] : story.history) keys.push_back(key);
  std::vector<uint8_t> records(keys.size() * kRecordBytes);
  auto found = std::make_unique<bool[]>(keys.size());
  tier.read(keys, records.data(), found.get());
  auto count = [](const States& of, const RowKey& key) {
    auto at = of.find(key);
    return at == of.end() ? 0 : at->second;
  };
  int64_t rows = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    uint64_t version = kAbsent;
    if (found[i]) {
      std::memcpy(&version, &records[i * kRecordBytes], sizeof version);
      CHECK(version != kAbsent);
      CHECK(model::is(&records[i * kRecordBytes], kRecordBytes, keys[i], version));
      ++rows;
    }
    const auto& states = story.history.at(keys[i]);
    size_t first = count(from, keys[i]), last = to ? count(*to, keys[i]) : states.size();
    bool right = first == 0 ? version == kAbsent : states[first - 1] == version;
    for (size_t s = first; s < last; ++s) right |= states[s] == version;
    CHECK(right);
  }
  CHECK_EQ(tier.rows(0) + tier.rows(1), rows);
}

// Returns how many links it found.
size_t check_crash(const Story& story, size_t crash, const std::string& folder,
                   std::mt19937_64& random) {
  std::filesystem::create_directories(folder + "/log");
  uint64_t broken = 0;
  for (const auto& [path, inode] : after_crash(story, crash, random)) {
    std::string name = folder + path.substr(story.folder.size());
    std::filesystem::create_directory(std::filesystem::path(name).parent_path());
    std::ofstream file(name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(inode->data.data()),
               static_cast<std::streamsize>(inode->data.size()));
    if (name.ends_with(".rows") && name.starts_with(folder + "/log/")) {
      broken += broken_blocks(*inode);
    }
  }
  size_t mark = 0;
  for (size_t i = 0; i < crash; ++i) {
    if (story.events[i].kind == Kind::mark) mark = story.events[i].offset;
  }
  auto log = RowLog::open_to_read(folder + "/log");
  CHECK_EQ(log->recovery().at(0).dropped, broken);
  CHECK_EQ(log->recovery().at(0).dropped_blocks.size(), broken);
  // Rows are as the last sync confirmed them, or as they were at some later time.
  check_rows(story, log->tier(0), story.confirmed[mark], nullptr);
  size_t links = 0;
  for (const auto& [linked_at, name] : story.links) {
    if (linked_at > mark) break;
    auto link = RowLog::open_to_read(folder + "/" + name, {}, false);
    CHECK_EQ(link->recovery().at(0).dropped, 0u);
    check_rows(story, link->tier(0), story.confirmed[linked_at], &story.confirmed[linked_at]);
    ++links;
  }
  return links;
}

}  // namespace

TEST(what_a_sync_confirmed_survives_a_crash_at_any_moment) {
  const char* soak = std::getenv("HOTBED_SOAK");
  uint64_t stories = soak && *soak && *soak != '0' ? 40 : 4;
  uint64_t compactions = 0, links = 0;
  for (uint64_t seed = 0; seed < stories; ++seed) {
    Folder folder(Folder::On::memory);
    Story story = live(folder.path, seed);
    compactions += story.compactions;
    std::mt19937_64 random(seed + 1000);
    size_t opened = 0;  // the first confirmed moment; before it there may be no log at all
    while (story.events[opened].kind != Kind::mark) ++opened;
    for (int crash = 0; crash < 5; ++crash) {
      size_t moment = opened + 1 + random() % (story.events.size() - opened);
      if (crash % 2) {  // right behind the next moment that was confirmed
        while (moment < story.events.size() && story.events[moment - 1].kind != Kind::mark) {
          ++moment;
        }
      }
      links += check_crash(story, moment, folder / ("crash-" + std::to_string(crash)), random);
    }
  }
  CHECK(compactions > stories * 5);
  CHECK(links > stories * 5);
}
