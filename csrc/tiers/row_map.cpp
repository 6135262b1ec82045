#include "tiers/row_map.hpp"

#include <algorithm>
#include <numeric>

namespace hotbed {

namespace {

constexpr int64_t kAhead = 24;  // ids between prefetching a place and reading it

}  // namespace

RowMap::RowMap(std::vector<int64_t> table_rows, uint64_t most_array_bytes)
    : spaces_(table_rows.size()) {
  std::vector<size_t> order(table_rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return table_rows[a] < table_rows[b]; });
  uint64_t most = most_array_bytes / sizeof(uint32_t);
  for (size_t t : order) {
    Space& space = spaces_[t];
    space.rows = table_rows[t];
    auto rows = static_cast<uint64_t>(space.rows);
    if (space.rows >= 0 && rows <= most - std::min(most, array_ids_)) {
      space.array = static_cast<int64_t>(array_ids_);
      array_ids_ += rows;
    } else {
      space.index = std::make_unique<KeyIndex>("The index of resident rows");
    }
  }
}

int64_t RowMap::first_outside(int32_t table, const int64_t* ids, int64_t n) const {
  if (spaces_[table].rows < 0) return n;
  auto rows = static_cast<uint64_t>(spaces_[table].rows);
  bool outside = false;
  for (int64_t i = 0; i < n; ++i) outside |= static_cast<uint64_t>(ids[i]) >= rows;
  if (!outside) return n;
  return std::find_if(ids, ids + n, [&](int64_t id) { return static_cast<uint64_t>(id) >= rows; }) -
         ids;
}

void RowMap::find(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers) const {
  const Space& space = spaces_[table];
  if (space.index) {
    space.index->find(ids, n, numbers);
    return;
  }
  const uint32_t* array = arrays_ + space.array;
  auto rows = static_cast<uint64_t>(space.rows);
  for (int64_t i = 0; i < n; ++i) {
    auto id = static_cast<uint64_t>(ids[i]);
    numbers[i] = id < rows ? static_cast<int64_t>(array[id]) - 1 : -1;
  }
}

int64_t RowMap::find_or_insert(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers,
                               const FreshSlots& fresh) {
  Space& space = spaces_[table];
  if (space.index) return space.index->find_or_insert(ids, n, numbers, fresh);
  uint32_t* array = arrays_ + space.array;
  int64_t inserted = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(array + ids[i + kAhead], 1);
    uint32_t& place = array[ids[i]];
    if (!place) place = static_cast<uint32_t>(fresh(inserted++) + 1);
    numbers[i] = static_cast<int64_t>(place) - 1;
  }
  return inserted;
}

void RowMap::update(int32_t table, const int64_t* ids, int64_t n, const int64_t* numbers) {
  Space& space = spaces_[table];
  if (space.index) {
    space.index->update(ids, n, numbers);
    return;
  }
  uint32_t* array = arrays_ + space.array;
  for (int64_t i = 0; i < n; ++i) array[ids[i]] = static_cast<uint32_t>(numbers[i] + 1);
}

void RowMap::erase(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers) {
  Space& space = spaces_[table];
  if (space.index) {
    space.index->erase(ids, n, numbers);
    return;
  }
  uint32_t* array = arrays_ + space.array;
  for (int64_t i = 0; i < n; ++i) array[ids[i]] = 0;
}

void RowMap::clear() {
  for (Space& space : spaces_) {
    if (space.index) space.index->clear();
  }
}

uint64_t RowMap::index_bytes() const {
  uint64_t bytes = spaces_.capacity() * sizeof(Space);
  for (const Space& space : spaces_) {
    if (space.index) bytes += space.index->memory_bytes();
  }
  return bytes;
}

}  // namespace hotbed
