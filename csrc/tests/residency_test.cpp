#include "tiers/residency.hpp"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include "check.hpp"
#include "testing/pretended_memory.hpp"

using hotbed::FrequencyClock;
using hotbed::Ghosts;
using hotbed::Moves;
using hotbed::Residency;
using hotbed::ResidencyPolicy;
using hotbed::RowKey;
using hotbed::RowMap;
using hotbed::TableIds;

namespace {

using Numbers = std::vector<int64_t>;

// Batches of one table.
struct Pool {
  Residency residency;
  Moves moves;

  explicit Pool(int64_t capacity, const ResidencyPolicy& policy = {}, int64_t table_rows = -1)
      : residency({table_rows}, capacity, policy) {}

  int64_t announce(const Numbers& ids) {
    TableIds part{0, ids.data(), static_cast<int64_t>(ids.size())};
    return residency.announce({&part, 1});
  }
  int64_t admit_now(const Numbers& ids) {
    TableIds part{0, ids.data(), static_cast<int64_t>(ids.size())};
    return residency.admit_now({&part, 1}, moves);
  }
  void finish(int64_t batch) {
    residency.consume(batch);
    residency.release(batch);
  }
  Numbers use(const Numbers& ids) {
    finish(admit_now(ids));
    return evicted();
  }
  Numbers evicted() const {
    Numbers ids;
    for (const RowKey& row : moves.evicted) ids.push_back(row.id);
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  int64_t slot(int64_t id) const {
    int64_t slot;
    residency.find(0, &id, 1, &slot);
    return slot;
  }
  Numbers resident() const {
    Numbers ids;
    residency.for_each([&](int64_t, RowKey row, bool) { ids.push_back(row.id); });
    std::sort(ids.begin(), ids.end());
    return ids;
  }
};

Numbers range(int64_t begin, int64_t end) {
  Numbers ids;
  for (int64_t i = begin; i < end; ++i) ids.push_back(i);
  return ids;
}

}  // namespace

TEST(a_score_is_the_logarithm_of_the_uses) {
  FrequencyClock clock(1e12);  // nothing fades
  uint16_t score = 0;
  double mean_error = 0;
  for (int uses = 1; uses <= 4096; ++uses) {
    score = clock.after_use(score);
    double error = (score - FrequencyClock::kStep) / 8.0 - std::log2(uses);
    CHECK(std::abs(error) < 1.5);
    mean_error += error / 4096;
  }
  CHECK(std::abs(mean_error) < 0.5);
}

TEST(uses_fade_by_half_lives) {
  FrequencyClock clock(100);
  uint16_t often = 0;
  for (int i = 0; i < 64; ++i) often = clock.after_use(often);
  CHECK(!clock.advance(400));  // four half-lives: worth 4 uses now
  uint16_t once = clock.after_use(0), thrice = clock.after_use(clock.after_use(once));
  CHECK(once < often);
  CHECK(std::abs(thrice - often) <= 10);
  CHECK(!clock.advance(400));
  CHECK(clock.after_use(0) > often);
  // Long after, all scores are lowered, and keep their order.
  CHECK(clock.advance(30000));
  CHECK_EQ(FrequencyClock::lower(often), often - FrequencyClock::kStep);
  CHECK_EQ(FrequencyClock::lower(FrequencyClock::kStep - 5), 0);
  uint16_t now = clock.after_use(0);
  CHECK(now > 2 * FrequencyClock::kStep);
  CHECK(clock.after_use(now) > now);
}

TEST(scores_tell_uses) {
  FrequencyClock clock(1000);
  CHECK_EQ(clock.uses(0), 0);
  uint16_t score = 0;
  for (int i = 0; i < 40; ++i) score = clock.after_use(score);
  CHECK(clock.uses(score) > 30 && clock.uses(score) < 55);  // rounded to an eighth of a doubling
  double before = clock.uses(score);
  clock.advance(1000);
  CHECK(std::abs(clock.uses(score) - before / 2) < 0.01 * before);
}

TEST(ghosts_keep_the_highest_of_a_line) {
  Ghosts none(0);
  none.put({1, 0}, 9);
  CHECK_EQ(none.take({1, 0}), 0);

  Ghosts ghosts(16);
  CHECK_EQ(ghosts.bytes(), 64u);
  std::vector<uint32_t> entries(16);
  ghosts.place(entries.data());
  for (int64_t id = 0; id < 40; ++id) ghosts.put({id, 3}, static_cast<uint16_t>(100 + id));
  for (int64_t id = 0; id < 40; ++id) {
    CHECK_EQ(ghosts.take({id, 2}), 0);
    CHECK_EQ(ghosts.take({id, 3}), id < 24 ? 0 : 100 + id);
    CHECK_EQ(ghosts.take({id, 3}), 0);
  }
  ghosts.put({5, 0}, 7);
  ghosts.put({5, 0}, 1500);
  ghosts.put({6, 0}, 1000);
  ghosts.lower();
  CHECK_EQ(ghosts.take({5, 0}), 1500 - FrequencyClock::kStep);
  CHECK_EQ(ghosts.take({6, 0}), 0);
}

TEST(small_tables_have_arrays) {
  RowMap map({1000, -1, 10, 5000}, 4 * 1500);
  CHECK_EQ(map.array_bytes(), 4 * 1010u);
  std::vector<uint32_t> arrays(1010);
  map.place(arrays.data());
  for (int32_t table = 0; table < 4; ++table) {
    Numbers ids = {3, 7, 3}, numbers(3);
    CHECK_EQ(map.find_or_insert(table, ids.data(), 3, numbers.data(), {50}), 2);
    CHECK(numbers == (Numbers{50, 51, 50}));
    int64_t other = 9;
    map.update(table, ids.data(), 1, &other);
    Numbers asked = {7, 3, 4, 999, 1000, -1, 1 << 20}, found(7);
    map.find(table, asked.data(), 7, found.data());
    CHECK(found == (Numbers{51, 9, -1, -1, -1, -1, -1}));
    CHECK_EQ(map.first_outside(table, asked.data(), 3), 3);
    CHECK_EQ(map.first_outside(table, asked.data(), 7), table == 0   ? 4
                                                        : table == 1 ? 7
                                                        : table == 2 ? 3
                                                                     : 5);
    map.erase(table, asked.data(), 3, found.data());
    map.find(table, asked.data(), 2, found.data());
    CHECK(found[0] == -1 && found[1] == -1);
  }
}

TEST(rows_leave_by_frequency_then_by_next_use) {
  Pool pool(8);
  pool.use(range(0, 8));
  for (int64_t id = 0; id < 4; ++id) {
    for (int64_t i = 0; i < (4 << id); ++i) pool.use({id});
  }
  pool.announce({4, 6});
  pool.announce({5});
  pool.announce({6, 7});  // 4 and 6 in batch 1, 5 in 2, 7 in 3
  Numbers order = {0, 1, 2, 3, 7, 5};
  for (int64_t k = 0; k < 6; ++k) {
    // A batch holds what it loads, so that the next must evict one of the others.
    CHECK(pool.admit_now({100 + k}) != 0);
    CHECK_EQ(pool.moves.evicted.size(), 1u);
    CHECK_EQ(pool.moves.evicted[0].id, order[k]);
  }
}

TEST(a_pool_that_is_narrowed) {
  Pool pool(8);
  pool.use(range(0, 8));
  int64_t dirty = pool.slot(6), held = pool.admit_now({2, 5});
  pool.residency.mark_dirty(&dirty, 1);
  CHECK_EQ(pool.announce({7, 1}), 1);
  pool.residency.narrow(3, pool.moves);  // as far down as row 5, which is held
  CHECK_EQ(pool.residency.limit(), 6);
  CHECK(pool.evicted() == (Numbers{6, 7}));
  CHECK_EQ(pool.moves.evicted_dirty[pool.moves.evicted[1].id == 6], 1);
  CHECK_EQ(pool.moves.evicted_dirty[pool.moves.evicted[1].id != 6], 0);
  CHECK_EQ(pool.residency.resident(), 6);
  pool.residency.narrow(7, pool.moves);  // it is never wider again
  CHECK_EQ(pool.residency.limit(), 6);
  pool.finish(held);
  pool.residency.narrow(3, pool.moves);
  CHECK_EQ(pool.residency.limit(), 3);
  CHECK(pool.resident() == (Numbers{0, 1, 2}));
  CHECK_EQ(pool.admit_now({0, 20, 21, 22}), 0);
  CHECK_EQ(pool.moves.slots_needed, 4);
  CHECK(pool.residency.admit(1, pool.moves));  // announced before
  CHECK_EQ(pool.moves.evicted.size(), 1u);
  CHECK(pool.slot(7) >= 0 && pool.slot(7) < 3);
  pool.finish(1);
  for (int64_t id = 30; id < 60; ++id) {
    pool.use({id, id + 100});
    CHECK(pool.slot(id) < 3 && pool.residency.resident() == 3);
  }
  // Free slots beyond the limit are forgotten, others are kept.
  Pool other(8);
  other.use(range(0, 8));
  int64_t slots[] = {other.slot(1), other.slot(7), other.slot(3), other.slot(6)};
  other.residency.drop(slots, 4);
  other.residency.narrow(4, other.moves);
  CHECK(other.evicted() == (Numbers{4, 5}));
  CHECK(other.resident() == (Numbers{0, 2}));
  CHECK(other.use({50, 51}).empty());
  CHECK_EQ(other.use({52}).size(), 1u);
  other.residency.narrow(0, other.moves);
  CHECK_EQ(other.residency.limit(), 1);
  CHECK_EQ(other.use({53}).size(), 1u);
}

TEST(an_evicted_row_keeps_its_announced_uses) {
  Pool pool(3);
  pool.use({1, 2, 3});
  CHECK_EQ(pool.announce({9}), 1);
  CHECK_EQ(pool.announce({1, 2}), 2);
  CHECK_EQ(pool.announce({1}), 3);
  CHECK_EQ(pool.announce({2, 3}), 4);
  CHECK(pool.use({50, 51, 52}) == (Numbers{1, 2, 3}));
  for (int64_t batch : {1, 2}) {
    CHECK(pool.residency.admit(batch, pool.moves));
    pool.finish(batch);
  }
  CHECK(pool.resident() == (Numbers{1, 2, 9}));
  // 9 has no use left; then 2, which comes after 1.
  CHECK(pool.admit_now({60}) != 0);
  CHECK(pool.evicted() == Numbers{9});
  CHECK(pool.admit_now({61}) != 0);
  CHECK(pool.evicted() == Numbers{2});
  CHECK(pool.residency.admit(3, pool.moves));
  CHECK(pool.moves.loaded.empty());
}

TEST(pins_of_many_batches_hold) {
  Pool pool(7);
  Numbers held;
  for (int64_t k = 1; k < 5; ++k) held.push_back(pool.admit_now({0, k}));
  CHECK_EQ(pool.residency.pinned(), 5);
  CHECK_EQ(pool.admit_now({10, 11, 12}), 0);
  CHECK_EQ(pool.moves.slots_needed, 8);
  pool.finish(held[3]);
  CHECK(pool.admit_now({10, 11, 12}) != 0);
  CHECK(pool.evicted() == Numbers{4});
  for (int64_t k = 0; k < 3; ++k) pool.finish(held[k]);
  CHECK_EQ(pool.residency.pinned(), 3);
}

TEST(what_is_taken_back_leaves_nothing) {
  Pool pool(8);
  pool.use({1, 2});
  pool.announce({2, 3, 4});
  pool.announce({3, 5});
  pool.announce({4});
  CHECK(pool.residency.admit(1, pool.moves));
  Numbers reserved = {pool.slot(3), pool.slot(4)};
  pool.residency.mark_new(reserved.data(), 2);
  CHECK(pool.residency.admit(2, pool.moves));
  Numbers dropped;
  pool.residency.take_back(1, dropped);
  CHECK(dropped == Numbers{reserved[1]});  // 3 is still wanted
  CHECK(pool.resident() == (Numbers{1, 2, 3, 5}));
  std::vector<RowKey> born;
  pool.residency.consume(2, &born);
  CHECK_EQ(born.size(), 1u);
  CHECK_EQ(born[0].id, 3);
  pool.residency.release(2);
  int64_t dirty = 0;
  pool.residency.for_each([&](int64_t, RowKey row, bool is_dirty) {
    CHECK_EQ(is_dirty, row.id == 3);
    dirty += is_dirty;
  });
  CHECK_EQ(dirty, 1);
  // 4 is announced still, though its row is gone.
  CHECK(pool.residency.admit(3, pool.moves));
  CHECK_EQ(pool.moves.loaded.size(), 1u);
  pool.residency.take_back(3, dropped);
  pool.residency.retract();
  CHECK_EQ(pool.residency.pinned(), 0);
}

TEST(a_row_that_is_made_to_exist_stays) {
  Pool pool(4);
  int64_t batch = pool.admit_now({1, 2});
  Numbers reserved = {pool.slot(1), pool.slot(2)};
  pool.residency.mark_new(reserved.data(), 2);
  CHECK(pool.residency.make_exist(reserved[0]));
  CHECK(!pool.residency.make_exist(reserved[0]));
  Numbers dropped;
  pool.residency.take_back(batch, dropped);
  CHECK(dropped == Numbers{reserved[1]});
  CHECK(pool.resident() == Numbers{1});
  pool.use({1, 4, 5, 6});
  CHECK(CHECK_THROWS(pool.residency.mark_new(reserved.data(), 1), std::invalid_argument)
            .find("no batch has pinned it") != std::string::npos);
}

TEST(the_first_announced_batch_can_be_passed_over) {
  Pool pool(3);
  pool.use({1, 2, 3});
  pool.announce({1, 2, 7});
  pool.announce({2, 8});
  pool.announce({7, 2});
  pool.residency.retract_first();
  CHECK_THROWS(pool.residency.admit(1, pool.moves), std::invalid_argument);
  CHECK_EQ(pool.use({4}).size(), 1u);  // 1 or 3: they have no use left
  CHECK_EQ(pool.use({5}).size(), 1u);
  CHECK(pool.slot(2) >= 0);
  CHECK(pool.residency.admit(2, pool.moves));
  CHECK_EQ(pool.moves.loaded.size(), 1u);
  pool.finish(2);
  CHECK(pool.residency.admit(3, pool.moves));
  CHECK(pool.moves.loaded[0] == (RowKey{7, 0}));
  CHECK_THROWS(pool.residency.retract_first(), std::invalid_argument);
}

TEST(a_batch_that_names_an_id_twice_is_not_announced) {
  for (const Numbers& ids : {Numbers{5, 6, 5}, Numbers{1, 2, 1}}) {  // new ones, and resident ones
    Pool pool(4);
    pool.use({1, 2});
    pool.announce({2, 3});
    CHECK(CHECK_THROWS(pool.announce(ids), std::invalid_argument).find("names an id twice") !=
          std::string::npos);
    CHECK_EQ(pool.residency.announced(), 0);  // all are forgotten
    CHECK(pool.resident() == (Numbers{1, 2}));
    int64_t next = pool.announce({2, 3});
    CHECK(pool.residency.admit(next, pool.moves));
    pool.finish(next);
    CHECK(pool.resident() == (Numbers{1, 2, 3}));
  }
}

TEST(only_slots_with_rows_can_be_dropped) {
  Pool pool(4);
  pool.use({1, 2, 3, 4});
  for (int64_t slot : {int64_t{-1}, int64_t{4}, int64_t{5}}) {
    CHECK(CHECK_THROWS(pool.residency.drop(&slot, 1), std::invalid_argument)
              .find("no row is there") != std::string::npos);
  }
  CHECK(pool.resident() == (Numbers{1, 2, 3, 4}));
}

TEST(dropped_rows_are_forgotten_wholly) {
  Pool pool(4, {}, 100);
  for (int i = 0; i < 5; ++i) pool.use({1, 2});
  pool.announce({1});
  Numbers slots = {pool.slot(1), pool.slot(2)};
  Numbers twice = {slots[0], slots[0]};
  CHECK(CHECK_THROWS(pool.residency.drop(twice.data(), 2), std::invalid_argument).find("twice") !=
        std::string::npos);
  CHECK(pool.resident() == (Numbers{1, 2}));
  pool.residency.drop(slots.data(), 2);
  CHECK(pool.resident().empty());
  CHECK(pool.residency.admit(1, pool.moves));
  CHECK_EQ(pool.moves.loaded.size(), 1u);
  pool.finish(1);
  pool.use({3});
  pool.use({3, 4, 5});
  pool.use({2});  // its many uses count no more: 1, 2, 4 and 5 have one each
  CHECK(pool.slot(3) >= 0);
}

TEST(running_out_of_memory_changes_nothing) {
  Pool pool(1000);
  pool.use(range(0, 1000));
  pool.announce(range(500, 200'000));
  Numbers more = range(-1000, 2'500'000);
  hotbed::pretend_memory(1 << 20);
  CHECK_THROWS(pool.announce(more), hotbed::OutOfMemory);
  CHECK_THROWS(pool.admit_now(more), hotbed::OutOfMemory);
  CHECK_THROWS(Residency({10'000'000}, 1'000'000), hotbed::OutOfMemory);
  hotbed::pretend_memory(0);
  CHECK_EQ(pool.residency.announced(), 1);
  CHECK_EQ(pool.residency.next_batch(), 2);
  CHECK(pool.resident() == range(0, 1000));
  CHECK_EQ(pool.admit_now(more), 0);
  CHECK_EQ(pool.moves.slots_needed, 2'501'000);
  CHECK_EQ(pool.announce(more), 2);
  pool.residency.retract();
  CHECK(pool.use(range(5000, 5500)).size() == 500);
}

// Long runs with everything at once. That every row is where the moves say is checked by moving
// values as they say.
TEST(rows_survive_the_moves_they_are_given) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    std::mt19937_64 random(seed);
    int64_t capacity = 300 + static_cast<int64_t>(random() % 300);
    ResidencyPolicy policy;
    policy.half_life = seed % 2 ? 0.25 : 16;  // the former lowers scores often
    policy.slots_a_batch = seed % 3 ? 32768 : 0;
    Residency residency({50, 4000, -1}, capacity, policy);
    Moves moves;
    Numbers dropped;
    std::vector<int64_t> pool(capacity, -1);  // values in slots
    std::vector<std::unordered_map<int64_t, int64_t>> below(3), truth(3);
    std::deque<std::pair<int64_t, std::vector<RowKey>>> announced, admitted;
    auto draw = [&] {
      std::vector<std::set<int64_t>> ids(3);
      for (int i = 0; i < 100; ++i) {
        auto table = static_cast<int32_t>(random() % 3);
        double u = static_cast<double>(random() >> 11) * 0x1p-53;
        auto rank = static_cast<int64_t>(std::pow(4000.0, u)) - 1;
        ids[table].insert(table == 0 ? rank % 50 : table == 1 ? rank : rank * 0x9e3779b97f4a7c15);
      }
      std::vector<RowKey> keys;
      for (int32_t t = 0; t < 3; ++t) {
        for (int64_t id : ids[t]) keys.push_back({id, t});
      }
      return keys;
    };
    auto with_parts = [&](const std::vector<RowKey>& keys, auto call) {
      std::vector<Numbers> ids(3);
      for (const RowKey& key : keys) ids[key.table].push_back(key.id);
      std::vector<TableIds> parts;
      for (int32_t t = 0; t < 3; ++t) {
        parts.push_back({t, ids[t].data(), static_cast<int64_t>(ids[t].size())});
      }
      return call(parts);
    };
    auto move = [&] {
      for (size_t i = 0; i < moves.evicted.size(); ++i) {
        const RowKey& row = moves.evicted[i];
        if (moves.evicted_dirty[i]) below[row.table][row.id] = pool[moves.evicted_slots[i]];
        pool[moves.evicted_slots[i]] = -1;
      }
      for (size_t i = 0; i < moves.loaded.size(); ++i) {
        const RowKey& row = moves.loaded[i];
        int64_t& value = pool[moves.loaded_slots[i]];
        CHECK_EQ(value, -1);
        auto found = below[row.table].find(row.id);
        value = found == below[row.table].end() ? 0 : found->second;
      }
    };
    auto train = [&](int64_t number, const std::vector<RowKey>& keys) {
      residency.consume(number);
      Numbers slots(keys.size());
      residency.slots(number, slots.data());
      for (size_t i = 0; i < keys.size(); ++i) {
        int64_t& expected = truth[keys[i].table][keys[i].id];
        CHECK_EQ(pool[slots[i]], expected);
        pool[slots[i]] = ++expected;
      }
      residency.mark_dirty(number);
      residency.release(number);
    };
    for (int step = 0; step < 400; ++step) {
      while (announced.size() < 1 + random() % 20) {
        auto keys = draw();
        int64_t number = with_parts(keys, [&](auto& parts) { return residency.announce(parts); });
        announced.emplace_back(number, keys);
      }
      if (residency.admit(announced.front().first, moves)) {
        move();
        admitted.push_back(announced.front());
        announced.pop_front();
      } else {
        CHECK(moves.slots_needed > capacity);
        CHECK(!admitted.empty());
      }
      if (random() % 4 == 0) {
        auto keys = draw();
        int64_t number =
            with_parts(keys, [&](auto& parts) { return residency.admit_now(parts, moves); });
        if (number) {
          move();
          train(number, keys);
        }
      }
      while (admitted.size() > random() % 3) {
        train(admitted.front().first, admitted.front().second);
        admitted.pop_front();
      }
      if (random() % 40 == 0) {
        for (auto& [number, keys] : admitted) residency.take_back(number, dropped);
        residency.retract();
        admitted.clear();
        announced.clear();
      }
    }
    // What is left in slots and what is below make up all that was trained.
    residency.for_each([&](int64_t slot, RowKey row, bool dirty) {
      if (dirty) below[row.table][row.id] = pool[slot];
    });
    CHECK(below == truth);
  }
}

TEST(an_owner_with_a_lock_serves_two_threads) {
  Pool pool(64);
  std::mutex owner;
  std::condition_variable changed;
  constexpr int64_t kBatches = 300;
  std::deque<int64_t> ready;
  std::thread ahead([&] {
    for (int64_t b = 1; b <= kBatches; ++b) {
      std::unique_lock lock(owner);
      changed.wait(lock, [&] { return ready.size() < 3; });
      while (pool.residency.next_batch() <= std::min(b + 8, kBatches)) {
        int64_t k = pool.residency.next_batch();
        pool.announce({k % 7, 100 + k % 31, 200 + k % 61});
      }
      CHECK(pool.residency.admit(b, pool.moves));
      ready.push_back(b);
      changed.notify_all();
    }
  });
  for (int64_t done = 1; done <= kBatches; ++done) {
    std::unique_lock lock(owner);
    changed.wait(lock, [&] { return !ready.empty(); });
    CHECK_EQ(ready.front(), done);
    CHECK(pool.slot(100 + done % 31) >= 0);
    pool.residency.consume(done);
    pool.residency.release(done);
    ready.pop_front();
    changed.notify_all();
  }
  ahead.join();
  CHECK_EQ(pool.residency.pinned(), 0);
}
