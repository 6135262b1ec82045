// Rows in tiers that are read as they were at one moment, while batches come and go.
#include <atomic>
#include <thread>

#include "folder.hpp"
#include "log_fixture.hpp"
#include "space_fixture.hpp"
#include "table/snapshot.hpp"

using namespace hotbed;

namespace {

// Two tables over a row log, trained by a thread while another brings batches up.
class Trained {
 public:
  explicit Trained(uint64_t seed, std::shared_ptr<IoFaults> faults = nullptr)
      : pair_(kSlots), random_(seed) {
    std::vector<LogStore> stores{
        {layout_of(*pair_.item).bytes(), {{0, "item", 100}, {1, "user", -1}}}};
    log_ = RowLog::create(folder_ / "log", stores, small({}, std::move(faults)));
    pair_.item->leave();
    pair_.user->leave();
    std::vector<const SpaceTable*> tables{pair_.item.get(), pair_.user.get()};
    pair_.space = std::make_shared<RowSpace>(layout_of(*pair_.item), tables, kSlots,
                                             std::shared_ptr<Tier>(log_, &log_->tier(0)));
    pair_.item->live_in(pair_.space, 0);
    pair_.user->live_in(pair_.space, 1);
  }

  std::vector<std::shared_ptr<Table>> tables() const { return {pair_.item, pair_.user}; }
  RowSpace& space() { return *pair_.space; }

  // By (table, id) what is stored now: (weight, state).
  std::map<Key, std::pair<float, float>> stored() {
    std::map<Key, std::pair<float, float>> found;
    for (int32_t t = 0; t < 2; ++t) {
      for (int64_t id : space().stored_ids(t)) found[{t, id}] = pair_.read({t, id});
    }
    return found;
  }

  // The same of rows that have changed since a mark, as they are given while nobody changes any.
  std::map<Key, std::pair<float, float>> changed(uint64_t mark) {
    constexpr int64_t kMost = 7;
    RowKey keys[kMost];
    float records[kMost][4];
    std::map<Key, std::pair<float, float>> found;
    int32_t tables[] = {0, 1};
    auto scan = space().scan(tables, mark);
    while (int64_t n = scan->next(kMost, keys, reinterpret_cast<uint8_t*>(records))) {
      for (int64_t i = 0; i < n; ++i) {
        found[{keys[i].table, keys[i].id}] = {records[i][0], records[i][3]};
      }
    }
    return found;
  }

  void step() {
    switch (random_() % 12) {
      case 0: return erase();
      case 1: return assign();
      case 2: return space().flush();
      default: return train();
    }
  }

  // As step(), with another batch on its way on a thread of its own.
  void step_ahead() {
    Ids next(some_keys(random_, 5));
    std::vector<int64_t> slots(next.keys.size());
    int64_t batch = 0;
    std::thread ahead([&] {
      batch = space().announce(next.parts());
      if (!space().admit(batch, slots.data())) space().retract(std::exchange(batch, 0));
    });
    train();
    ahead.join();
    if (!batch) return;
    use(next, batch, slots);
  }

 private:
  static constexpr int64_t kSlots = 24;

  void train() {
    Ids ids(some_keys(random_, 6));
    std::vector<int64_t> slots(ids.keys.size());
    int64_t batch = space().admit_now(ids.parts(), slots.data());
    if (!batch) return;
    use(ids, batch, slots);
  }

  void use(const Ids& ids, int64_t batch, const std::vector<int64_t>& slots) {
    space().consume(batch, false);
    size_t items = ids.of[0].size();
    pair_.item->keep(slots.data(), static_cast<int64_t>(items));
    pair_.user->keep(slots.data() + items, static_cast<int64_t>(slots.size() - items));
    truth_.train(pair_, ids, slots);
    space().mark_dirty(batch);
    space().end(batch);
  }

  void erase() {
    Ids ids(some_keys(random_, 4));
    for (int32_t t = 0; t < 2; ++t) {
      space().erase(t, ids.of[t].data(), static_cast<int64_t>(ids.of[t].size()));
      for (int64_t id : ids.of[t]) {
        truth_.steps.erase({t, id});
        if (t) truth_.users.erase(id);
      }
    }
  }

  void assign() {
    Ids ids(some_keys(random_, 4));
    for (const RowKey& key : ids.keys) {
      ++truth_.steps[{key.table, key.id}];
      if (key.table) truth_.users.insert(key.id);
      auto [weight, state] = truth_.of({key.table, key.id});
      float weights[3] = {weight, weight, weight};
      const void* states[] = {&state};
      space().write(key.table, &key.id, 1, weights, states, nullptr);
    }
  }

  Folder folder_;
  std::shared_ptr<RowLog> log_;
  Pair pair_;
  Truth truth_;
  std::mt19937_64 random_;
};

std::map<Key, std::pair<float, float>> taken(Snapshot& snapshot, int64_t chunks = INT64_MAX) {
  std::map<Key, std::pair<float, float>> found;
  size_t at;
  while (chunks-- > 0) {
    auto rows = snapshot.next(at);
    if (!rows) break;
    for (int64_t i = 0; i < rows->count; ++i) {
      const auto* weights = reinterpret_cast<const float*>(rows->weights.data()) + i * 3;
      const auto* state = reinterpret_cast<const float*>(rows->states[0].data()) + i;
      CHECK(weights[0] == weights[2]);
      Key key{static_cast<int32_t>(at), rows->ids.data()[i]};
      CHECK(found.emplace(key, std::pair{weights[0], *state}).second);
    }
  }
  return found;
}

// Some that have trained for a while.
template <class F>
void for_trained(uint64_t seeds, F f) {
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Trained trained(seed);
    for (int step = 0; step < 60; ++step) trained.step();
    f(trained);
  }
}

}  // namespace

TEST(rows_in_tiers_are_those_of_the_moment) {
  for_trained(40, [](Trained& trained) {
    for (int round = 0; round < 4; ++round) {
      auto want = trained.stored();
      CHECK(Snapshot::can_read(trained.tables()));
      Snapshot snapshot(trained.tables(), 8, 1 << 20);
      for (int step = 0; step < 5; ++step) trained.step();
      auto found = taken(snapshot, 3);
      for (int step = 0; step < 20; ++step) trained.step();
      for (auto& [key, row] : taken(snapshot)) CHECK(found.emplace(key, row).second);
      CHECK(found == want);
      snapshot.end();
    }
  });
}

TEST(rows_in_tiers_change_on_other_threads) {
  for_trained(10, [](Trained& trained) {
    for (int round = 0; round < 5; ++round) {
      auto want = trained.stored();
      Snapshot snapshot(trained.tables(), 8, 1 << 20);
      std::atomic<bool> over{false};
      std::thread trains([&] {
        while (!over) {
          trained.step();
          trained.step_ahead();
        }
      });
      auto found = taken(snapshot);
      over = true;
      trains.join();
      CHECK(found == want);
      snapshot.end();
    }
  });
}

TEST(changes_in_tiers_since_a_mark) {
  for_trained(20, [](Trained& trained) {
    uint64_t mark = trained.tables()[0]->mark_changes();
    CHECK(mark && trained.tables()[1]->mark_changes() == mark);
    auto before = trained.stored();
    for (int step = 0; step < 6; ++step) trained.step();
    auto want = trained.changed(mark);
    Snapshot snapshot(trained.tables(), 8, 1 << 20, {mark, mark});
    for (int step = 0; step < 20; ++step) trained.step();
    CHECK(taken(snapshot) == want);
    CHECK(want.size() < before.size());
    snapshot.end();
  });
}

// Rows that were evicted and could not be written are in it.
TEST(a_snapshot_with_rows_that_no_disk_has) {
  auto faults = std::make_shared<IoFaults>();
  Trained trained(3, faults);
  for (int step = 0; step < 60; ++step) trained.step();
  faults->full_after_writing(0).full_after_preallocating(0);
  bool failed = false;
  for (int step = 0; step < 4000 && !failed; ++step) {
    try {
      trained.step();
    } catch (const TierError&) {
      failed = true;
    }
  }
  CHECK(failed);
  auto want = trained.stored();
  Snapshot snapshot(trained.tables(), 8, 1 << 20);
  faults->make_room();
  for (int step = 0; step < 20; ++step) trained.step();
  CHECK(taken(snapshot) == want);
  snapshot.end();
}

TEST(tables_that_move_are_lost_to_a_snapshot) {
  Trained trained(4);
  for (int step = 0; step < 60; ++step) trained.step();
  Snapshot snapshot(trained.tables(), 8, 1 << 20);
  trained.tables()[0]->leave();
  CHECK_THROWS(taken(snapshot), TierError);
  snapshot.end();
  Pair elsewhere(8, false, true);
  CHECK(!Snapshot::can_read({elsewhere.item}));  // in planes that nobody here sees
  Pair over_a_map(8);
  CHECK(!Snapshot::can_read({over_a_map.item}));
}

TEST(rows_that_are_written_back_wait_in_their_slots) {
  Trained trained(6);
  for (int step = 0; step < 60; ++step) trained.step();
  auto want = trained.stored();
  Snapshot snapshot(trained.tables(), 8, 0);
  trained.space().flush();
  CHECK(trained.tables()[0]->wait_for_snapshot(false, std::chrono::milliseconds(0)));
  for (int step = 0; step < 20; ++step) trained.step();
  CHECK(!trained.tables()[0]->wait_for_snapshot(false, std::chrono::milliseconds(0)));
  CHECK(taken(snapshot) == want);
  snapshot.end();
}
