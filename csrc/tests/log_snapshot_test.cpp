// A row log that is read as it was at one moment, while rows are written and erased.
#include <atomic>
#include <cerrno>
#include <set>
#include <thread>

#include "folder.hpp"
#include "log_fixture.hpp"
#include "log_model.hpp"

using namespace hotbed;
using model::Versions;

namespace {

// A snapshot, and what it should give.
struct Taken {
  std::unique_ptr<TierSnapshot> snapshot;
  Versions want, found;
  bool is_read = false;

  void read(int64_t most, size_t bytes) {
    std::vector<RowKey> keys(static_cast<size_t>(most));
    std::vector<uint8_t> records(keys.size() * bytes);
    int64_t n = snapshot->next(most, keys.data(), records.data());
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      auto known = want.find(keys[i]);
      CHECK(known != want.end());
      CHECK(model::is(&records[i * bytes], bytes, keys[i], known->second));
      CHECK(found.emplace(keys[i], known->second).second);
    }
    is_read = n == 0;
  }
  void check() const { CHECK(found == want); }
};

class History {
 public:
  History(LogTier& tier, uint64_t seed) : tier_(tier), random_(seed) {}

  std::vector<RowKey> some(size_t most) {
    std::set<RowKey, model::Less> keys;
    for (size_t n = random_() % most + 1; keys.size() < n;) {
      if (random_() % 2) {
        keys.insert({static_cast<int64_t>(random_() % 300), 3});
      } else {
        keys.insert({static_cast<int64_t>(mix(random_() % 300)), 0});
      }
    }
    return {keys.begin(), keys.end()};
  }
  void change() {
    if (random_() % 4 == 0) {
      auto keys = some(60);
      tier_.erase(keys);
      for (const RowKey& key : keys) versions.erase(key), written_.erase(key);
      return;
    }
    auto keys = some(120);
    model::write(tier_, keys, ++version_);
    for (const RowKey& key : keys) versions[key] = written_[key] = version_;
  }
  // Of one table or of both, since a moment or of all, without some.
  Taken take() {
    std::vector<int32_t> tables{0, 3};
    if (random_() % 3 == 0) tables = {random_() % 2 ? 0 : 3};
    bool all = random_() % 2;
    Taken taken;
    taken.snapshot = tier_.snapshot(tables, all ? 0 : moment_);
    for (const auto& [key, version] : versions) {
      bool is_in = std::find(tables.begin(), tables.end(), key.table) != tables.end();
      if (is_in && (all || version > moment_version_)) taken.want[key] = version;
    }
    auto out = some(100);
    taken.snapshot->leave_out(out);
    for (const RowKey& key : out) taken.want.erase(key);
    if (random_() % 3 == 0) {
      moment_ = tier_.moment().value();
      moment_version_ = version_;
    }
    return taken;
  }
  uint64_t draw() { return random_(); }

  Versions versions;

 private:
  LogTier& tier_;
  std::mt19937_64 random_;
  Versions written_;
  uint64_t version_ = 0, moment_ = 0, moment_version_ = 0;
};

std::vector<LogStore> stores(int64_t record_bytes) {
  return {{record_bytes, {{3, "item", 300}, {0, "user", -1}}}};
}

}  // namespace

TEST(what_a_snapshot_gives_is_of_its_moment) {
  for (bool background : {false, true}) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Folder folder;
      LogOptions options = small();
      options.background = background;
      int64_t record_bytes = seed % 2 ? 500 : 2000;
      auto log = RowLog::create(folder / "log", stores(record_bytes), options);
      LogTier& tier = log->tier(0);
      History history(tier, seed);
      std::vector<Taken> taken;
      for (int step = 0; step < 300; ++step) {
        history.change();
        if (history.draw() % 12 == 0 && taken.size() < 3) taken.push_back(history.take());
        if (history.draw() % 10 == 0) log->flush();
        if (!background && history.draw() % 3 == 0) {
          bool moved = tier.compact_step();
          if (!taken.empty()) CHECK(!moved);  // rests
        }
        for (Taken& one : taken) {
          if (history.draw() % 3 == 0) one.read(1 + history.draw() % 90, record_bytes);
          if (one.is_read) one.check();
        }
        std::erase_if(taken, [](const Taken& one) { return one.is_read; });
      }
      for (Taken& one : taken) {
        while (!one.is_read) one.read(37, record_bytes);
        one.check();
      }
      taken.clear();
      model::check_all(tier, history.versions);
    }
  }
}

TEST(a_snapshot_where_the_disk_was_full) {
  Folder folder;
  auto faults = std::make_shared<IoFaults>();
  auto log = RowLog::create(folder / "log", stores(500), small({}, faults));
  LogTier& tier = log->tier(0);
  History history(tier, 1);
  for (int step = 0; step < 20; ++step) history.change();
  log->flush();
  faults->full_after_writing(0);
  history.change();
  Taken taken = history.take();  // rows of the last change are in memory
  faults->make_room().full_after_preallocating(0);
  std::string told = CHECK_THROWS(([&] {
                                    for (int step = 0; step < 1000; ++step) history.change();
                                  })(),
                                  TierError);
  CHECK(told.find("While a save reads the rows of the log, it does not shrink") !=
        std::string::npos);
  faults->make_room();
  for (int step = 0; step < 20; ++step) history.change();
  while (!taken.is_read) taken.read(37, 500);
  taken.check();
}

TEST(a_snapshot_is_read_while_another_thread_writes) {
  Folder folder;
  auto log = RowLog::create(folder / "log", stores(500), small());
  LogTier& tier = log->tier(0);
  History history(tier, 5);
  for (int round = 0; round < 10; ++round) {
    for (int step = 0; step < 10; ++step) history.change();
    Taken taken = history.take();
    std::thread writer([&] {
      for (int step = 0; step < 30; ++step) history.change();
    });
    while (!taken.is_read) taken.read(50, 500);
    writer.join();
    taken.check();
  }
  model::check_all(tier, history.versions);
}
