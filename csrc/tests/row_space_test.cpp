// RowSpace against maps of what it should hold, over a tier that fails when told to.
#include "tiers/row_space.hpp"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <random>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "space_fixture.hpp"

using namespace hotbed;

TEST(no_row_is_lost) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::mt19937_64 random(seed);
    bool failing = seed % 2, narrowing = seed % 4 >= 2;
    Pair pair(static_cast<int64_t>(40 + random() % 40), false, seed / 4 % 2);
    int64_t allowed = pair.space->capacity();
    if (narrowing) pair.space->allow([&](uint64_t) { return allowed; });
    Truth truth;
    std::deque<std::pair<int64_t, Ids>> announced;
    struct Admitted {
      int64_t batch;
      Ids ids;
      std::vector<int64_t> slots;
    };
    std::deque<Admitted> admitted, trained;
    auto end_all = [&](std::deque<Admitted>& all) {
      for (const Admitted& one : all) pair.space->end(one.batch);
      all.clear();
    };
    int failures = 0;
    for (int round = 0; round < 1200; ++round) {
      if (failing && random() % 6 == 0) pair.tier->fail_writes(1 + static_cast<int>(random() % 2));
      if (failing && random() % 6 == 0) pair.tier->fail_reads(1 + static_cast<int>(random() % 2));
      if (narrowing && random() % 40 == 0 && allowed > 24) allowed -= 1 + random() % 3;
      try {
        switch (random() % 16) {
          case 0:
          case 1:
          case 2: {
            Ids ids(some_keys(random, 20));
            int64_t batch = pair.space->announce(ids.parts());
            announced.emplace_back(batch, std::move(ids));
            break;
          }
          case 3:
          case 4:
          case 5:
          case 6: {
            if (announced.empty()) break;
            auto [batch, ids] = announced.front();
            std::vector<int64_t> slots(ids.keys.size());
            bool fits;
            try {
              fits = pair.space->admit(batch, slots.data());
            } catch (const TierError&) {
              pair.space->retract(batch);
              announced.pop_front();
              throw;
            }
            if (!fits) break;
            admitted.push_back({batch, ids, slots});
            announced.pop_front();
            break;
          }
          case 7:
          case 8:
          case 9: {
            if (admitted.empty()) break;
            Admitted one = admitted.front();
            admitted.pop_front();
            if (random() % 4) {
              pair.space->consume(one.batch, true);
              truth.train(pair, one.ids, one.slots);
              pair.space->mark_dirty(one.slots.data(), static_cast<int64_t>(one.slots.size()));
              trained.push_back(one);
            } else {
              pair.space->end(one.batch);  // passed over
            }
            break;
          }
          case 10: {  // a batch that was not announced
            Ids ids(some_keys(random, 20));
            std::vector<int64_t> slots(ids.keys.size());
            int64_t batch = pair.space->admit_now(ids.parts(), slots.data());
            if (!batch) {
              CHECK(pair.space->slots_needed(ids.parts()) > pair.space->limit());
              break;
            }
            CHECK(pair.space->slots_needed(ids.parts()) <= pair.space->limit());
            CHECK(!narrowing ||
                  *std::max_element(slots.begin(), slots.end()) < pair.space->limit());
            pair.space->consume(batch, false);
            truth.train(pair, ids, slots);
            pair.space->mark_dirty(batch);
            pair.space->end(batch);
            break;
          }
          case 11: {  // assigned from outside, as if trained to the fifth step
            Ids ids(some_keys(random, 10));
            for (int32_t t : {0, 1}) {
              for (int64_t id : ids.of[t]) {
                float n = 5, row[3] = {kFirst + n, kFirst + n, kFirst + n}, sum = kState + 2 * n;
                const void* states[] = {&sum};
                pair.space->write(t, &id, 1, row, states, nullptr);
                truth.steps[{t, id}] = 5;
                if (t) truth.users.insert(id);
              }
            }
            break;
          }
          case 12: pair.space->flush(); break;
          case 13: {
            if (random() % 4) {  // some rows, there or not, pinned or not
              auto table = static_cast<int32_t>(random() % 2);
              std::vector<int64_t> ids;
              std::set<Key> gone;
              for (const RowKey& key : some_keys(random, 10)) {
                if (key.table != table) continue;
                ids.push_back(key.id);
                if (random() % 4 == 0) ids.push_back(key.id);
                if (!table || truth.users.count(key.id)) gone.insert({table, key.id});
              }
              auto count = static_cast<int64_t>(ids.size());
              int64_t went = pair.space->erase(table, ids.data(), count);
              if (table) CHECK_EQ(went, static_cast<int64_t>(gone.size()));
              for (const Key& key : gone) {
                truth.steps.erase(key);
                if (table) truth.users.erase(key.second);
              }
              break;
            }
            auto table = static_cast<int32_t>(random() % 2);
            pair.space->erase_all(table);  // pinned rows too
            std::erase_if(truth.steps, [&](auto& row) { return row.first.first == table; });
            if (table) truth.users.clear();
            break;
          }
          case 14:
            if (random() % 4) break;
            end_all(admitted);
            for (auto& [batch, ids] : announced) {
              if (random() % 2) pair.space->retract(batch);
            }
            pair.space->retract_all();
            announced.clear();
            break;
          default:
            while (trained.size() > random() % 3) {
              pair.space->end(trained.front().batch);
              trained.pop_front();
            }
        }
      } catch (const TierError&) {
        ++failures;
      }
      pair.tier->fail_reads(0);
      if (random() % 16 == 0) truth.check(pair);
      pair.tier->fail_writes(0);
    }
    CHECK(failing == (failures > 20));
    end_all(admitted);
    end_all(trained);
    truth.check(pair);
    pair.space->retract_all();
    CHECK_EQ(pair.space->pinned(), 0);
    pair.space->flush();
    CHECK_EQ(pair.tier->rows(1), static_cast<int64_t>(truth.users.size()));
    truth.check(pair);
    CHECK(pair.space->counters().evicted > 100);
    CHECK(narrowing == (pair.space->limit() < pair.space->capacity()));
  }
}

TEST(announced_batches_may_go_in_any_order) {
  Pair pair(8);
  std::vector<int64_t> batches;
  std::vector<Ids> ids;
  for (int64_t k = 0; k < 4; ++k) {
    ids.emplace_back(std::vector<RowKey>{{k, 0}, {k, 1}});
    batches.push_back(pair.space->announce(ids.back().parts()));
  }
  std::vector<int64_t> slots(2);
  CHECK(!pair.space->admit(batches[2], slots.data()));  // not its turn
  pair.space->retract(batches[1]);
  pair.space->retract(batches[1]);
  CHECK(!pair.space->admit(batches[2], slots.data()));
  CHECK(pair.space->admit(batches[0], slots.data()));
  pair.space->retract(batches[0]);  // too late: nothing
  CHECK(pair.space->admit(batches[2], slots.data()));
  pair.space->retract(batches[3]);
  CHECK_EQ(pair.space->pinned(), 4);
  CHECK_EQ(pair.space->announce(ids[0].parts()), batches[3] + 1);
}

TEST(rows_that_are_erased_while_batches_hold_them) {
  Pair pair(16, true);
  Truth truth;
  Ids ids({{1, 0}, {2, 0}, {1, 1}, {2, 1}});
  std::vector<int64_t> slots(4), again(4);
  int64_t first = pair.space->admit_now(ids.parts(), slots.data());
  pair.space->consume(first, false);
  truth.train(pair, ids, slots);
  pair.space->mark_dirty(first);
  pair.space->erase_all(0);
  pair.space->erase_all(1);
  // They stay in their slots, as they start.
  for (int64_t slot : slots) {
    CHECK(pair.weights(slot)[0] == kFirst && *pair.state(slot) == kState);
    CHECK(*reinterpret_cast<int64_t*>(pair.space->steps()->row(slot)) == 7);
  }
  CHECK(pair.space->stored_ids(0).empty() && pair.space->stored_ids(1).empty());
  CHECK_EQ(pair.space->rows(1), 0);
  int64_t second = pair.space->admit_now(Ids({{1, 0}, {1, 1}}).parts(), again.data());
  CHECK(again[0] == slots[0] && again[1] == slots[2]);
  pair.space->consume(second, false);
  pair.space->end(first);
  CHECK(pair.space->stored_ids(1) == std::vector<int64_t>{1});  // the second batch met it
  pair.space->end(second);
  CHECK(pair.space->stored_ids(1) == std::vector<int64_t>{1});
  CHECK_EQ(pair.space->rows(1), 1);
  CHECK_EQ(pair.space->pinned(), 0);
}

// While one batch's rows are on their way, others are announced and go, and training says what it
// has done.
TEST(rows_on_their_way_keep_nobody_waiting) {
  Pair pair(16);
  Ids first({{1, 0}, {1, 1}}), second({{2, 0}}), third({{3, 0}});
  std::vector<int64_t> slots(2), more(1);
  int64_t trained = pair.space->admit_now(second.parts(), more.data());
  pair.space->consume(trained, false);
  int64_t batch = pair.space->announce(first.parts());
  pair.tier->hold_reads(true);
  bool admitted = false;
  std::thread ahead([&] { admitted = pair.space->admit(batch, slots.data()); });
  pair.tier->wait_for_a_held_read();
  int64_t next = pair.space->announce(third.parts());
  CHECK_EQ(pair.space->announce(second.parts()), next + 1);
  pair.space->retract(next);
  pair.space->mark_dirty(trained);
  pair.space->end(trained);
  CHECK_EQ(pair.space->counters().used, 1);
  CHECK_EQ(pair.space->pinned(), 2);
  CHECK_EQ(pair.space->counters().missed, 1);  // not yet those on their way
  pair.tier->hold_reads(false);
  ahead.join();
  CHECK(admitted);
  pair.space->consume(batch, true);
  CHECK_EQ(pair.space->counters().missed, 3);
  CHECK(pair.space->admit(next + 1, more.data()));
}

// So many rows that some are read while others are put into their slots.
TEST(large_batches_move_in_parts) {
  constexpr int64_t kRows = 20'000;
  Pair pair(kRows);
  Truth truth;
  auto batch_of = [](int64_t first) {
    std::vector<RowKey> keys;
    for (int64_t i = 0; i < kRows; ++i) keys.push_back({(first + i) * 7, 1});
    return Ids(keys);
  };
  std::mt19937_64 random(0);
  int failures = 0;
  for (int round = 0; round < 24; ++round) {
    Ids ids = batch_of(static_cast<int64_t>(random() % 3) * 12'000);
    std::vector<int64_t> slots(kRows);
    if (round % 4 == 1) pair.tier->fail_reads(1 + static_cast<int>(random() % 3));
    if (round % 4 == 3) pair.tier->fail_writes(1 + static_cast<int>(random() % 3));
    int64_t batch = 0;
    try {
      batch = pair.space->admit_now(ids.parts(), slots.data());
    } catch (const TierError&) {
      ++failures;
      pair.tier->fail_reads(0);
      pair.tier->fail_writes(0);
      batch = pair.space->admit_now(ids.parts(), slots.data());
    }
    pair.tier->fail_reads(0);
    pair.tier->fail_writes(0);
    pair.space->consume(batch, false);
    truth.train(pair, ids, slots);
    pair.space->mark_dirty(batch);
    pair.space->end(batch);
  }
  CHECK(failures > 4);
  CHECK_EQ(pair.space->rows(1), static_cast<int64_t>(truth.users.size()));
  for (const auto& [key, steps] : truth.steps) CHECK(pair.read(key) == truth.of(key));
}

// Threads that are asked for a stack no system has are refused.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 50);
    CHECK_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST(without_a_second_thread_rows_move_all_the_same) {
  constexpr int64_t kRows = 6'000;
  Pair pair(kRows);
  Truth truth;
  NoThreads none;
  bool refused = false;
  try {
    std::thread([] {}).join();
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
  for (int64_t round = 0; round < 4; ++round) {
    std::vector<RowKey> keys;
    for (int64_t i = 0; i < kRows; ++i) keys.push_back({round % 2 * kRows + i, 1});
    Ids ids(keys);
    std::vector<int64_t> slots(kRows);
    int64_t batch = pair.space->admit_now(ids.parts(), slots.data());
    pair.space->consume(batch, false);
    truth.train(pair, ids, slots);
    pair.space->mark_dirty(batch);
    pair.space->end(batch);
  }
  CHECK_EQ(pair.space->counters().written_back, 3 * kRows);
  for (const auto& [key, steps] : truth.steps) CHECK(pair.read(key) == truth.of(key));
}

TEST(look_ahead_beside_training) {
  Pair pair(160);
  Truth truth;
  struct Ready {
    int64_t batch;
    Ids ids;
    std::vector<int64_t> slots;
  };
  constexpr int kBatches = 400;
  constexpr size_t kAhead = 3;
  std::mutex mutex;
  std::condition_variable moved;
  std::deque<std::pair<int64_t, Ids>> announced;
  std::deque<Ready> ready;
  std::thread reading([&] {
    std::mt19937_64 random(5);
    for (int read = 0; read < kBatches; ++read) {
      {
        std::unique_lock lock(mutex);
        moved.wait(lock, [&] { return announced.size() < 8; });
      }
      Ids ids(some_keys(random, 16));
      int64_t batch = pair.space->announce(ids.parts());
      std::lock_guard lock(mutex);
      announced.emplace_back(batch, std::move(ids));
      moved.notify_all();
    }
  });
  std::thread bringing_up([&] {
    for (int done = 0; done < kBatches; ++done) {
      std::pair<int64_t, Ids> next{0, Ids({})};
      {
        std::unique_lock lock(mutex);
        moved.wait(lock, [&] { return ready.size() < kAhead && !announced.empty(); });
        next = announced.front();
      }
      std::vector<int64_t> slots(next.second.keys.size());
      CHECK(pair.space->admit(next.first, slots.data()));
      std::lock_guard lock(mutex);
      ready.push_back({next.first, next.second, slots});
      announced.pop_front();
      moved.notify_all();
    }
  });
  std::mt19937_64 random(6);
  std::deque<Ready> waiting;  // for their step
  for (int done = 0; done < kBatches; ++done) {
    Ready one{0, Ids({}), {}};
    {
      std::unique_lock lock(mutex);
      moved.wait(lock, [&] { return !ready.empty(); });
      one = ready.front();
      ready.pop_front();
      moved.notify_all();
    }
    pair.space->consume(one.batch, true);
    truth.train(pair, one.ids, one.slots);
    pair.space->mark_dirty(one.slots.data(), static_cast<int64_t>(one.slots.size()));
    waiting.push_back(one);
    while (waiting.size() > random() % 3) {
      pair.space->end(waiting.front().batch);
      waiting.pop_front();
    }
    if (done % 16 == 0) truth.check(pair);
    if (done % 50 == 0) {
      Ids ids(some_keys(random, 10));
      std::vector<int64_t> slots(ids.keys.size());
      int64_t batch = pair.space->admit_now(ids.parts(), slots.data());
      CHECK(batch);
      pair.space->consume(batch, false);
      truth.train(pair, ids, slots);
      pair.space->mark_dirty(batch);
      pair.space->end(batch);
      pair.space->flush();
    }
  }
  reading.join();
  bringing_up.join();
  for (const Ready& one : waiting) pair.space->end(one.batch);
  truth.check(pair);
  CHECK_EQ(pair.space->pinned(), 0);
  CHECK_EQ(pair.space->counters().batches_ahead, kBatches);
}
