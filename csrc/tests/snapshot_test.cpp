// Rows that are read as they were at one moment, while others change them.
#include "table/snapshot.hpp"

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.hpp"
#include "rules/initial.hpp"

using namespace hotbed;

namespace {

constexpr int64_t kDim = 3;

std::shared_ptr<Table> table_of(int64_t rows) {
  auto table = std::make_shared<Table>("t", rows, kDim, DType::f32,
                                       initial_spec(Initial::constant, 0, 0, 0, 0, 0));
  table->add_state("sum", 1, 0.0);
  return table;
}

void write(Table& table, int64_t id, float value) {
  float weights[kDim] = {value, value, value}, state = value;
  const void* states[] = {&state};
  table.write(&id, 1, weights, states, nullptr);
}

// By id what a snapshot has of it: the same number everywhere.
std::map<int64_t, float> taken(Snapshot& snapshot, std::atomic<int64_t>* chunks = nullptr) {
  std::map<int64_t, float> found;
  size_t at;
  while (auto rows = snapshot.next(at)) {
    for (int64_t i = 0; i < rows->count; ++i) {
      const auto* weights = reinterpret_cast<const float*>(rows->weights.data()) + i * kDim;
      const auto* state = reinterpret_cast<const float*>(rows->states[0].data()) + i;
      CHECK(weights[0] == weights[kDim - 1] && weights[0] == *state);
      CHECK(found.emplace(rows->ids.data()[i], *state).second);
    }
    if (chunks) ++*chunks;
  }
  return found;
}

// A thread that changes rows while another one takes them.
void test_threads(bool dynamic) {
  std::mt19937 random(dynamic);
  for (int round = 0; round < 30; ++round) {
    auto table = table_of(dynamic ? -1 : 500);
    std::map<int64_t, float> want;
    for (int64_t id = 0; id < 500; ++id) {
      write(*table, id, static_cast<float>(id));
      want[id] = static_cast<float>(id);
    }
    Snapshot snapshot({table}, 16, 1024);
    std::atomic<bool> over{false};
    std::thread changes([&] {
      for (int step = 0; !over; ++step) {
        int64_t id = static_cast<int64_t>(random() % 600) % (dynamic ? 600 : 500);
        table->wait_for_snapshot(false, std::chrono::seconds(60));
        if (dynamic && random() % 3 == 0) {
          table->erase(&id, 1);
        } else {
          write(*table, id, static_cast<float>(1000 + step));
        }
      }
    });
    auto found = taken(snapshot);
    over = true;
    changes.join();
    CHECK(found == want);
    snapshot.end();
    CHECK(!table->in_snapshot());
  }
}

void test_room() {
  auto table = table_of(100);
  for (int64_t id = 0; id < 100; ++id) write(*table, id, 1);
  Snapshot snapshot({table}, 4, 0);
  write(*table, 99, 2);  // as nothing is kept yet
  std::atomic<bool> written{false};
  std::thread later([&] {
    table->wait_for_snapshot(false, std::chrono::seconds(60));
    write(*table, 98, 2);
    written = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!written);
  std::atomic<int64_t> chunks{0};
  auto found = taken(snapshot, &chunks);
  later.join();
  CHECK(found.size() == 100 && found[99] == 1 && found[98] == 1);
  CHECK(snapshot.waited() >= std::chrono::milliseconds(20));
  snapshot.end();
}

void test_changes_of_all_rows() {
  auto table = table_of(-1);
  for (int64_t id = 0; id < 100; ++id) write(*table, id, 1);
  {
    Snapshot snapshot({table}, 4, 1 << 20);
    std::thread later([&] {
      table->wait_for_snapshot(true, std::chrono::seconds(60));
      table->clear();
    });
    CHECK(taken(snapshot).size() == 100);
    later.join();
    snapshot.end();
  }
  for (int64_t id = 0; id < 100; ++id) write(*table, id, 1);
  Snapshot snapshot({table}, 4, 1 << 20);
  table->clear();  // and nobody has waited
  CHECK_THROWS(taken(snapshot), TierError);
  snapshot.end();
  // Whoever stops has nobody wait.
  write(*table, 1, 1);
  Snapshot other({table}, 4, 0);
  write(*table, 1, 2);
  other.stop();
  table->wait_for_snapshot(true, std::chrono::seconds(60));
  other.end();
}

void test_changes_since() {
  auto table = table_of(-1);
  for (int64_t id = 0; id < 50; ++id) write(*table, id, 1);
  uint64_t mark = table->mark_changes();
  for (int64_t id = 10; id < 20; ++id) write(*table, id, 2);
  Snapshot snapshot({table}, 4, 1 << 20, {mark});
  write(*table, 15, 3);
  write(*table, 30, 3);  // has not changed by then
  auto found = taken(snapshot);
  CHECK(found.size() == 10 && found[15] == 2 && !found.count(30));
  snapshot.end();
  Snapshot lost({table}, 4, 1 << 20, {mark});
  table->forget_changes();
  CHECK_THROWS(taken(lost), TierError);
  lost.end();
}

}  // namespace

TEST(rows_are_those_of_the_moment) {
  test_threads(false);
  test_threads(true);
}

TEST(a_change_waits_for_room) { test_room(); }
TEST(changes_of_all_rows) { test_changes_of_all_rows(); }
TEST(changes_since_a_mark) { test_changes_since(); }
