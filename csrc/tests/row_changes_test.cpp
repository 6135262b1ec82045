// What a table knows of its changes, against a model that keeps every one of them.
#include "tiers/row_changes.hpp"

#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "rules/initial.hpp"
#include "table/record_stream.hpp"
#include "table/table.hpp"

using namespace hotbed;

namespace {

InitialSpec zeros() { return initial_spec(Initial::constant, 0, 0, 0, 0, 0); }

std::set<int64_t> changed_since(const std::shared_ptr<Table>& table, uint64_t mark) {
  std::set<int64_t> ids;
  RecordStream stream({table}, 7, false, {mark});
  size_t at;
  while (const RecordParts* rows = stream.next(at)) {
    for (int64_t i = 0; i < rows->count; ++i) CHECK(ids.insert(rows->ids.data()[i]).second);
  }
  return ids;
}

// A random life of a table: what each mark says is what a set of ids says.
void check_life(bool dynamic, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto table = std::make_shared<Table>("t", dynamic ? -1 : 40, 2, DType::f32, zeros());
  struct Since {
    std::set<int64_t> changed, went;
  };
  std::map<uint64_t, Since> known;
  for (int round = 0; round < 60; ++round) {
    std::set<int64_t> drawn;
    for (uint64_t n = random() % 8; n; --n) drawn.insert(static_cast<int64_t>(random() % 40));
    std::vector<int64_t> ids(drawn.begin(), drawn.end());
    auto n = static_cast<int64_t>(ids.size());
    std::vector<float> rows(ids.size() * 2, 1.0f);
    switch (random() % 4) {
      case 0: {
        uint64_t mark = table->mark_changes();
        CHECK(mark && !known.count(mark));
        known[mark];
        break;
      }
      case 1: {
        std::vector<uint8_t> found(ids.size() + 1);
        table->contains(ids.data(), n, reinterpret_cast<bool*>(found.data()));
        table->erase(ids.data(), n);
        for (auto& [mark, since] : known) {
          for (size_t i = 0; i < ids.size(); ++i) {
            if (!dynamic) since.changed.insert(ids[i]);
            if (!dynamic || !found[i]) continue;
            since.changed.erase(ids[i]);
            since.went.insert(ids[i]);
          }
        }
        break;
      }
      default:
        table->write(ids.data(), n, rows.data(), nullptr, nullptr);
        for (auto& [mark, since] : known) since.changed.insert(ids.begin(), ids.end());
    }
    for (const auto& [mark, since] : known) {
      CHECK(table->knows_changes(mark));
      CHECK(changed_since(table, mark) == since.changed);
      std::vector<int64_t> went = table->changes()->erased_since(mark);
      CHECK(std::set<int64_t>(went.begin(), went.end()) == since.went);
    }
  }
}

}  // namespace

TEST(random_lives) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    check_life(true, seed);
    check_life(false, seed);
  }
}

TEST(numbers_come_to_an_end) {
  auto table = std::make_shared<Table>("t", 4, 2, DType::f32, zeros());
  uint64_t first = table->mark_changes(), last = first;
  for (int n = 0; n < 253; ++n) last = table->mark_changes();
  CHECK(table->knows_changes(first) && table->knows_changes(last));
  int64_t id = 2;
  float row[2] = {1, 1};
  table->write(&id, 1, row, nullptr, nullptr);
  CHECK(changed_since(table, last) == std::set<int64_t>{2});
  uint64_t next = table->mark_changes();
  CHECK(!table->knows_changes(first) && !table->knows_changes(last) && table->knows_changes(next));
  CHECK(changed_since(table, next).empty());
}

TEST(what_is_forgotten) {
  auto table = std::make_shared<Table>("t", -1, 2, DType::f32, zeros());
  std::vector<int64_t> ids(10'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  std::vector<float> rows(ids.size() * 2);
  auto fill = [&] { table->write(ids.data(), 10'000, rows.data(), nullptr, nullptr); };
  fill();
  uint64_t mark = table->mark_changes();
  table->add_state("s", 1, 0);
  CHECK(!table->knows_changes(mark));
  mark = table->mark_changes();
  table->erase(ids.data(), 3'000);
  CHECK(table->knows_changes(mark));
  table->forget_changes_before(table->mark_changes());
  CHECK(table->changes()->erased() == 0);
  mark = table->mark_changes();
  fill();
  table->erase(ids.data(), 6'000);  // more than are left
  CHECK(!table->knows_changes(mark));
  mark = table->mark_changes();
  table->clear();
  CHECK(!table->knows_changes(mark));
  CHECK(!table->knows_changes(0));
}
