// A row space over a tier that fails when told to, and what it should hold.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "rules/initial.hpp"
#include "table/table.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

using Key = std::pair<int32_t, int64_t>;  // (table, id)

// Keeps records in a map. fail_writes(n): the nth write from now on throws, once; so for reads.
// While reads are held they wait inside.
class MapTier : public Tier {
 public:
  explicit MapTier(int64_t record_bytes) : record_bytes_(record_bytes) {}

  void fail_writes(int after) { writes_left_ = after; }
  void fail_reads(int after) { reads_left_ = after; }
  void hold_reads(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void wait_for_a_held_read() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

  int64_t record_bytes() const override { return record_bytes_; }
  void read(std::span<const RowKey> keys, uint8_t* records, bool* found) override {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !held_; });
    --waiting_;
    if (reads_left_ > 0 && --reads_left_ == 0) throw TierError("a read failed");
    for (size_t i = 0; i < keys.size(); ++i) {
      auto at = records_.find({keys[i].table, keys[i].id});
      found[i] = at != records_.end();
      if (found[i]) std::memcpy(records + i * record_bytes_, at->second.data(), record_bytes_);
    }
  }
  void holds(std::span<const RowKey> keys, bool* found) const override {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) found[i] = records_.count({keys[i].table, keys[i].id});
  }
  std::unique_ptr<RecordScan> scan(std::span<const int32_t> tables, uint64_t) override {
    std::lock_guard lock(mutex_);
    auto made = std::make_unique<Copies>();
    made->record_bytes = record_bytes_;
    for (const auto& [key, record] : records_) {
      if (std::find(tables.begin(), tables.end(), key.first) == tables.end()) continue;
      made->rows.emplace_back(RowKey{key.second, key.first}, record);
    }
    return made;
  }
  void write(std::span<const RowKey> keys, const uint8_t* records) override {
    std::lock_guard lock(mutex_);
    // Some of the rows are taken over before it fails.
    bool fails = writes_left_ > 0 && --writes_left_ == 0;
    size_t taken = fails ? keys.size() / 2 : keys.size();
    for (size_t i = 0; i < taken; ++i) {
      const uint8_t* record = records + i * record_bytes_;
      records_[{keys[i].table, keys[i].id}].assign(record, record + record_bytes_);
    }
    if (fails) throw TierError("a write failed");
  }
  void erase(std::span<const RowKey> keys) override {
    std::lock_guard lock(mutex_);
    for (const RowKey& key : keys) records_.erase({key.table, key.id});
  }
  int64_t rows(int32_t table) const override {
    std::lock_guard lock(mutex_);
    int64_t count = 0;
    for (const auto& [key, record] : records_) count += key.first == table;
    return count;
  }
  void ids(int32_t table, int64_t* out) const override {
    std::lock_guard lock(mutex_);
    for (const auto& [key, record] : records_) {
      if (key.first == table) *out++ = key.second;
    }
  }
  uint64_t memory_bytes() const override { return 0; }
  void sync() override { ++syncs; }

  int syncs = 0;

 private:
  struct Copies : RecordScan {
    std::vector<std::pair<RowKey, std::vector<uint8_t>>> rows;
    size_t at = 0;
    int64_t record_bytes;
    int64_t next(int64_t most, RowKey* keys, uint8_t* records) override {
      int64_t n = 0;
      for (; n < most && at < rows.size(); ++n, ++at) {
        keys[n] = rows[at].first;
        std::memcpy(records + n * record_bytes, rows[at].second.data(), record_bytes);
      }
      return n;
    }
  };

  int64_t record_bytes_;
  mutable std::mutex mutex_;
  std::map<Key, std::vector<uint8_t>> records_;
  int writes_left_ = 0, reads_left_ = 0;
  std::condition_variable changed_;
  bool held_ = false;
  int waiting_ = 0;
};

inline std::vector<RowKey> some_keys(std::mt19937_64& random, int count) {
  std::set<Key> chosen;
  for (int i = 0; i < count; ++i) {
    auto table = static_cast<int32_t>(random() % 2);
    int64_t id = static_cast<int64_t>(random() % 40) * (random() % 3 ? 1 : 2);
    chosen.insert({table, table ? id * 1'000'003 : id});
  }
  std::vector<RowKey> keys;
  for (const auto& [table, id] : chosen) keys.push_back({id, table});
  return keys;
}

inline constexpr float kFirst = 0.5f, kState = 0.25f;

inline std::shared_ptr<Table> make_table(const std::string& name, int64_t rows,
                                         bool steps = false) {
  InitialSpec initial = initial_spec(Initial::constant, kFirst, 0, 0, 0, 42);
  auto table = std::make_shared<Table>(name, rows, 3, DType::f32, initial, true);
  table->add_state("sum", 1, kState);
  if (steps) table->track_steps(7);
  return table;
}

// Planes that the space does not see, of the tables below: (weights, state) a slot.
class OwnPlanes : public RowPlanes {
 public:
  explicit OwnPlanes(int64_t capacity) : rows(capacity) {}
  void gather(const int64_t* slots, int64_t n, uint8_t* records) override {
    for (int64_t i = 0; i < n; ++i) std::memcpy(records + i * 16, rows[slots[i]].data(), 16);
  }
  void scatter(const uint8_t* records, const int64_t* slots, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) std::memcpy(rows[slots[i]].data(), records + i * 16, 16);
  }
  std::vector<std::array<float, 4>> rows;
};

// A static and a dynamic table in one row space over a MapTier.
struct Pair {
  std::shared_ptr<Table> item, user;
  std::shared_ptr<MapTier> tier;
  std::shared_ptr<OwnPlanes> planes;  // or null
  std::shared_ptr<RowSpace> space;

  explicit Pair(int64_t capacity, bool steps = false, bool elsewhere = false)
      : item(make_table("item", 100, steps)), user(make_table("user", -1, steps)) {
    tier = std::make_shared<MapTier>(layout_of(*item).bytes());
    if (elsewhere) planes = std::make_shared<OwnPlanes>(capacity);
    std::vector<const SpaceTable*> tables{item.get(), user.get()};
    space = std::make_shared<RowSpace>(layout_of(*item), tables, capacity, tier, planes);
    item->live_in(space, 0);
    user->live_in(space, 1);
  }

  float* weights(int64_t slot) const {
    if (planes) return planes->rows[slot].data();
    return reinterpret_cast<float*>(space->weights().row(slot));
  }
  float* state(int64_t slot) const {
    if (planes) return planes->rows[slot].data() + 3;
    return reinterpret_cast<float*>(space->state(0).row(slot));
  }

  // What is read from outside: (weight, state) or nothing.
  std::pair<float, float> read(Key key) const {
    float row[3] = {kFirst, kFirst, kFirst}, sum = kState;
    void* states[] = {&sum};
    bool found = false;
    space->read(key.first, &key.second, 1, row, states, nullptr, &found);
    CHECK(row[0] == row[1] && row[1] == row[2]);
    if (!found) CHECK(row[0] == kFirst && sum == kState);
    return {row[0], sum};
  }
};

struct Ids {
  std::vector<std::vector<int64_t>> of{2};
  std::vector<RowKey> keys;
  explicit Ids(std::vector<RowKey> all) {
    std::stable_sort(all.begin(), all.end(),
                     [](const RowKey& a, const RowKey& b) { return a.table < b.table; });
    keys = std::move(all);
    for (const RowKey& key : keys) of[key.table].push_back(key.id);
  }
  std::vector<TableIds> parts() const {
    std::vector<TableIds> parts;
    for (int32_t t = 0; t < 2; ++t) {
      parts.push_back({t, of[t].data(), static_cast<int64_t>(of[t].size())});
    }
    return parts;
  }
};

// What every row should be; counts steps, which add 1 to the weights and 2 to the state.
struct Truth {
  std::map<Key, int> steps;
  std::set<int64_t> users;  // that exist

  std::pair<float, float> of(Key key) const {
    auto at = steps.find(key);
    auto n = static_cast<float>(at == steps.end() ? 0 : at->second);
    return {kFirst + n, kState + 2 * n};
  }

  // One training step of a batch that is in its slots.
  void train(const Pair& pair, const Ids& ids, const std::vector<int64_t>& slots) {
    for (size_t i = 0; i < ids.keys.size(); ++i) {
      Key key{ids.keys[i].table, ids.keys[i].id};
      float* row = pair.weights(slots[i]);
      float* sum = pair.state(slots[i]);
      CHECK_EQ(row[0], of(key).first);
      CHECK_EQ(row[2], of(key).first);
      CHECK_EQ(*sum, of(key).second);
      for (int j = 0; j < 3; ++j) row[j] += 1;
      *sum += 2;
      ++steps[key];
      if (key.first) users.insert(key.second);
    }
  }

  void check(const Pair& pair) const {
    for (int64_t id = 0; id < 80; ++id) CHECK(pair.read({0, id}) == of({0, id}));
    for (int64_t id = 0; id < 80; ++id) {
      CHECK(pair.read({1, id * 1'000'003}) == of({1, id * 1'000'003}));
    }
    CHECK_EQ(pair.space->rows(1), static_cast<int64_t>(users.size()));
    CHECK(pair.space->stored_ids(1) == std::vector<int64_t>(users.begin(), users.end()));
    for (int64_t id : pair.space->stored_ids(0)) CHECK(id >= 0 && id < 100);
    for (const auto& [key, n] : steps) {
      if (key.first) continue;
      std::vector<int64_t> stored = pair.space->stored_ids(0);
      CHECK(std::binary_search(stored.begin(), stored.end(), key.second));
    }
    check_scan(pair, {0});
    check_scan(pair, {1});
    check_scan(pair, {0, 1});
  }

  // Each stored row comes once, as it is.
  void check_scan(const Pair& pair, const std::vector<int32_t>& tables) const {
    constexpr int64_t kMost = 7;
    RowKey keys[kMost];
    float records[kMost][4];
    std::map<int32_t, std::vector<int64_t>> found;
    auto scan = pair.space->scan(tables);
    while (int64_t n = scan->next(kMost, keys, reinterpret_cast<uint8_t*>(records))) {
      for (int64_t i = 0; i < n; ++i) {
        found[keys[i].table].push_back(keys[i].id);
        CHECK((std::pair{records[i][0], records[i][3]}) == of({keys[i].table, keys[i].id}));
      }
    }
    for (auto& [table, ids] : found) {
      CHECK(std::find(tables.begin(), tables.end(), table) != tables.end());
      std::sort(ids.begin(), ids.end());
    }
    for (int32_t table : tables) CHECK(found[table] == pair.space->stored_ids(table));
  }
};

}  // namespace hotbed
