#include "tiers/top_uses.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/forks.hpp"
#include "base/random.hpp"

namespace hotbed {

namespace {

uint64_t hash_of(int64_t id) { return static_cast<uint64_t>(id) * kGolden; }

uint64_t& cell_of(std::vector<uint64_t>& cells, int64_t id) {
  return cells[hash_of(id) >> 32 & (TopUses::kCells - 1)];
}

}  // namespace

// Of the id, or a free one where it would be.
uint32_t TopUses::place_of(int64_t id) const {
  auto place = static_cast<uint32_t>(hash_of(id) >> 48) & (kPlaces - 1);
  while (numbers_[place] != kNone && used_[numbers_[place]].id != id) {
    place = (place + 1) & (kPlaces - 1);
  }
  return place;
}

// Frees a place; what lies behind it comes closer to where it belongs.
void TopUses::forget(uint32_t place) {
  numbers_[place] = kNone;
  for (uint32_t at = (place + 1) & (kPlaces - 1); numbers_[at] != kNone;
       at = (at + 1) & (kPlaces - 1)) {
    uint16_t number = std::exchange(numbers_[at], kNone);
    numbers_[place_of(used_[number].id)] = number;
  }
}

// The number at this place of the heap has a higher count than before.
void TopUses::sink(uint32_t at) {
  uint16_t number = heap_[at];
  uint64_t uses = used_[number].uses;
  for (uint32_t child; (child = 2 * at + 1) < kIds; at = child) {
    child += child + 1 < kIds && used_[heap_[child + 1]].uses < used_[heap_[child]].uses;
    if (used_[heap_[child]].uses >= uses) break;
    heap_[at] = heap_[child];
    position_[heap_[at]] = static_cast<uint16_t>(at);
  }
  heap_[at] = number;
  position_[number] = static_cast<uint16_t>(at);
}

void TopUses::make_heap() {
  heap_.resize(kIds);
  position_.resize(kIds);
  std::iota(heap_.begin(), heap_.end(), uint16_t{0});
  for (uint32_t at = kIds; at > 0; --at) sink(at - 1);
}

void TopUses::add(const int64_t* ids, const int32_t* counts, int64_t n) {
  if (!n) return;
  WholeInForks whole;
  std::lock_guard lock(mutex_);
  if (cells_.empty()) {
    used_.reserve(kIds);
    numbers_.assign(kPlaces, kNone);
    cells_.assign(kCells, 0);
  }
  for (int64_t i = 0; i < n; ++i) {
    auto count = static_cast<uint64_t>(counts[i]);
    uint32_t place = place_of(ids[i]);
    if (numbers_[place] != kNone) {
      uint16_t number = numbers_[place];
      used_[number].uses += count;
      if (!heap_.empty()) sink(position_[number]);
      continue;
    }
    if (used_.size() < kIds) {
      numbers_[place] = static_cast<uint16_t>(used_.size());
      uint64_t before = cell_of(cells_, ids[i]);
      used_.push_back({ids[i], before + count, before});
      if (used_.size() == kIds) make_heap();
      continue;
    }
    uint64_t& cell = cell_of(cells_, ids[i]);
    uint16_t number = heap_[0];
    Used& leaves = used_[number];
    if (cell + count <= leaves.uses) {
      cell += count;
      continue;
    }
    uint64_t before = cell;
    uint64_t& of_leaving = cell_of(cells_, leaves.id);
    of_leaving = std::max(of_leaving, leaves.uses);
    forget(place_of(leaves.id));
    leaves = {ids[i], before + count, before};
    numbers_[place_of(ids[i])] = number;
    sink(0);
  }
}

void TopUses::forget(const int64_t* ids, int64_t n) {
  WholeInForks whole;
  std::lock_guard lock(mutex_);
  if (cells_.empty()) return;
  std::vector<bool> goes(used_.size());
  for (int64_t i = 0; i < n; ++i) {
    uint16_t number = numbers_[place_of(ids[i])];
    if (number != kNone) goes[number] = true;
  }
  size_t kept = 0;
  for (size_t k = 0; k < used_.size(); ++k) {
    if (!goes[k]) used_[kept++] = used_[k];
  }
  if (kept == used_.size()) return;
  used_.resize(kept);
  numbers_.assign(kPlaces, kNone);
  for (size_t k = 0; k < used_.size(); ++k) {
    numbers_[place_of(used_[k].id)] = static_cast<uint16_t>(k);
  }
  heap_.clear();
}

void TopUses::clear() {
  WholeInForks whole;
  std::lock_guard lock(mutex_);
  used_.clear();
  numbers_.clear();
  cells_.clear();
  heap_.clear();
}

std::vector<TopUses::Used> TopUses::top(int64_t count) const {
  std::vector<Used> all;
  {
    WholeInForks whole;
    std::lock_guard lock(mutex_);
    all = used_;
  }
  std::sort(all.begin(), all.end(), [](const Used& a, const Used& b) {
    return a.uses != b.uses ? a.uses > b.uses : a.id < b.id;
  });
  all.resize(std::min(all.size(), static_cast<size_t>(std::max<int64_t>(0, count))));
  return all;
}

uint64_t TopUses::memory_bytes() const {
  WholeInForks whole;
  std::lock_guard lock(mutex_);
  return used_.capacity() * sizeof(Used) + cells_.capacity() * sizeof(uint64_t) +
         (numbers_.capacity() + heap_.capacity() + position_.capacity()) * sizeof(uint16_t);
}

}  // namespace hotbed
