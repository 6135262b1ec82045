// How it works.
//
// The map gives every row that is resident or announced a number: its slot, or, from capacity on, a
// place among the awaited rows. Both kinds of places hold the row's announced uses: the batch of
// the next one, and the number of the latest occurrence. When a row is announced again, the new
// batch is written to next_[latest occurrence], so that admitting a batch tells for each of its
// rows when it comes again, without searching. A row that is evicted or loaded takes its uses
// along.
//
// Victims are found by a sweep over the metadata of the slots, as a clock's hand. How many unpinned
// rows stand at each place of the order of eviction is counted as they come and go, and the counts
// tell before the sweep up to which place it must take what it meets. Nothing is linked or sorted.
#include "tiers/residency.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/integers.hpp"

namespace hotbed {

namespace {

constexpr int64_t kAhead = 16;  // rows between prefetching a place and using it
// What a row of an index takes, and how many times that an array may be larger: it is faster, and
// does not grow.
constexpr uint64_t kIndexBytes = 24;
constexpr uint64_t kArrayShare = 2;
// Batch numbers stay below, so that their complements stay above all scores.
constexpr int64_t kLastBatch = (int64_t{1} << 32) - 2 - FrequencyClock::kScores;
constexpr uint16_t kMostPins = UINT16_MAX - 1;
constexpr uint32_t kIdle = 1;  // Uses::last of a place in awaited_ that no row has

int64_t total(std::span<const TableIds> parts) {
  int64_t n = 0;
  for (const TableIds& part : parts) n += part.count;
  return n;
}

}  // namespace

struct Residency::Layout {
  uint64_t ids, ghosts, arrays, end;  // byte offsets; rows come first
};

Residency::Layout Residency::layout(const std::vector<int64_t>& table_rows, int64_t capacity,
                                    const ResidencyPolicy& policy) {
  auto slots = static_cast<uint64_t>(capacity);
  Layout at;
  at.ids = round_up(slots * sizeof(Row), 64);
  at.ghosts = round_up(at.ids + slots * sizeof(int64_t), 64);
  at.arrays = at.ghosts + Ghosts(ghost_entries(capacity, policy)).bytes();
  at.end = at.arrays + RowMap(table_rows, most_array_bytes(capacity)).array_bytes();
  return at;
}

int64_t Residency::ghost_entries(int64_t capacity, const ResidencyPolicy& policy) {
  return static_cast<int64_t>(static_cast<double>(capacity) * policy.ghosts);
}

uint64_t Residency::most_array_bytes(int64_t capacity) {
  return kArrayShare * kIndexBytes * static_cast<uint64_t>(capacity);
}

Residency::Residency(const std::vector<int64_t>& table_rows, int64_t capacity,
                     const ResidencyPolicy& policy)
    : capacity_(capacity),
      policy_(policy),
      map_(table_rows, most_array_bytes(capacity)),
      clock_(policy.half_life * static_cast<double>(capacity)),
      ghosts_(ghost_entries(capacity, policy)),
      unknown_(FrequencyClock::kScores),
      table_begin_(table_rows.size() + 1) {
  // Numbers of awaited rows follow the slots, and all must fit into the map.
  if (capacity < 1 || capacity > RowMap::kLimit / 2) {
    throw std::invalid_argument("A pool of " + std::to_string(capacity) + " slots: between 1 and " +
                                std::to_string(RowMap::kLimit / 2) + " are possible.");
  }
  if (table_rows.size() > kMostTables) {
    throw std::invalid_argument(std::to_string(table_rows.size()) +
                                " tables share a pool: at most 65535 can.");
  }
  if (!(policy.half_life >= 1.0 / 64) || !(policy.ghosts >= 0 && policy.ghosts <= 1024) ||
      policy.slots_a_victim < 1 || policy.slots_a_batch < 0) {
    throw std::invalid_argument(
        "half_life is at least 1/64, ghosts between 0 and 1024, slots_a_victim at least 1 and "
        "slots_a_batch at least 0.");
  }
  Layout at = layout(table_rows, capacity, policy);
  memory_.reserve(at.end, "The pool's residency", kLowerBudget);
  rows_ = reinterpret_cast<Row*>(memory_.data());
  ids_ = reinterpret_cast<int64_t*>(memory_.data() + at.ids);
  ghosts_.place(reinterpret_cast<uint32_t*>(memory_.data() + at.ghosts));
  map_.place(reinterpret_cast<uint32_t*>(memory_.data() + at.arrays));
}

uint64_t Residency::fixed_bytes(const std::vector<int64_t>& table_rows, int64_t capacity,
                                const ResidencyPolicy& policy) {
  return round_up(layout(table_rows, capacity, policy).end, Mapping::kPage) +
         FrequencyClock::kScores * sizeof(uint32_t);
}

void Residency::check_parts(std::span<const TableIds> parts) const {
  for (const TableIds& part : parts) {
    if (part.table < 0 || part.table >= map_.tables()) {
      throw std::invalid_argument("Table " + std::to_string(part.table) + " is outside [0, " +
                                  std::to_string(map_.tables()) + ").");
    }
    int64_t outside = map_.first_outside(part.table, part.ids, part.count);
    if (outside < part.count) {
      throw std::invalid_argument("Table " + std::to_string(part.table) + ": id " +
                                  std::to_string(part.ids[outside]) + " is outside [0, " +
                                  std::to_string(map_.rows(part.table)) + ").");
    }
  }
}

const Residency::Admitted& Residency::admitted(int64_t batch, const char* what) const {
  auto found = admitted_.find(batch);
  if (found == admitted_.end()) {
    throw std::invalid_argument("Batch " + std::to_string(batch) + " cannot be " + what +
                                ": it is not admitted.");
  }
  return found->second;
}

Residency::Admitted& Residency::admitted(int64_t batch, const char* what) {
  return const_cast<Admitted&>(static_cast<const Residency*>(this)->admitted(batch, what));
}

void Residency::check_slots(const int64_t* slots, int64_t n, const char* what) const {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || slots[i] >= used_ || rows_[slots[i]].pins == kFree) {
      throw std::invalid_argument("Slot " + std::to_string(slots[i]) + " cannot be " + what +
                                  ": no row is there.");
    }
  }
}

// --- Announcing. ---

// Room in the rings for one more batch of so many ids.
void Residency::make_room_for_uses(int64_t occurrences) {
  uint64_t needed = static_cast<uint64_t>(live_occurrences_ + occurrences);
  if (needed > next_.size()) {
    if (needed > uint64_t{1} << 31) {
      throw std::length_error(
          std::to_string(needed) +
          " ids are announced; at most 2147483648 can be. Look less far ahead.");
    }
    uint64_t size = 1024;
    while (size < needed) size *= 2;
    std::vector<uint32_t> larger(size);
    for (int64_t i = 0; i < live_occurrences_; ++i) {
      uint32_t occurrence = next_occurrence_ - static_cast<uint32_t>(i) - 1;
      larger[occurrence & (size - 1)] = next_of(occurrence);
    }
    next_.swap(larger);
  }
  if (announced_.size() + 1 > known_.size()) {
    std::vector<uint32_t> larger(std::max<size_t>(64, 2 * known_.size()));
    for (int64_t b = next_batch_ - announced(); b < next_batch_; ++b) {
      larger[b & (larger.size() - 1)] = known_[b & (known_.size() - 1)];
    }
    known_.swap(larger);
  }
}

// Room for `more` rows among the awaited, and for all of them among the idle places.
void Residency::make_room_awaited(int64_t more) {
  size_t needed = awaited_.size() + static_cast<size_t>(more) -
                  std::min(idle_.size(), static_cast<size_t>(more));
  if (capacity_ + static_cast<int64_t>(needed) >= RowMap::kLimit) {
    throw std::length_error(std::to_string(needed) + " rows are awaited beside a pool of " +
                            std::to_string(capacity_) + ". Look less far ahead.");
  }
  if (needed > awaited_.capacity()) awaited_.reserve(std::max(needed, 2 * awaited_.capacity()));
  if (awaited_.capacity() > idle_.capacity()) idle_.reserve(awaited_.capacity());
}

// A number for each id; those that had none get idle or further places among the awaited, whose
// `next` is 0. On an exception they are given back.
void Residency::number_rows(std::span<const TableIds> parts, int64_t* numbers) {
  int64_t* begin = numbers;
  size_t done = 0;
  try {
    for (const TableIds& part : parts) {
      make_room_awaited(part.count);
      FreshSlots fresh{capacity_ + static_cast<int64_t>(awaited_.size()), idle_.data(),
                       static_cast<int64_t>(idle_.size())};
      int64_t added = map_.find_or_insert(part.table, part.ids, part.count, numbers, fresh);
      int64_t reused = std::min(added, fresh.reused_count);
      for (int64_t i = 0; i < reused; ++i) awaited_[idle_[i] - capacity_] = Uses{};
      awaited_.resize(awaited_.size() + static_cast<size_t>(added - reused));
      int64_t left = fresh.reused_count - reused;
      std::copy_n(idle_.end() - std::min(left, reused), std::min(left, reused), idle_.begin());
      idle_.resize(static_cast<size_t>(left));
      numbers += part.count;
      ++done;
    }
  } catch (...) {
    forget_fresh(parts.first(done), begin);
    throw;
  }
}

// Undoes number_rows for rows that got no use since.
void Residency::forget_fresh(std::span<const TableIds> parts, const int64_t* numbers) {
  for (const TableIds& part : parts) {
    for (int64_t i = 0; i < part.count; ++i) {
      if (numbers[i] < capacity_ || uses(numbers[i]).next) continue;
      if (uses(numbers[i]).last == kIdle) continue;  // an id that comes twice
      uses(numbers[i]).last = kIdle;
      idle_.push_back(numbers[i]);
      int64_t gone;
      map_.erase(part.table, part.ids + i, 1, &gone);
    }
    numbers += part.count;
  }
}

int64_t Residency::announce(std::span<const TableIds> parts) {
  check_parts(parts);
  int64_t n = total(parts);
  int64_t number = next_batch_;
  if (number >= kLastBatch) throw std::length_error("Batch numbers are used up.");
  make_room_for_uses(n);
  Announced& batch = announced_.emplace_back();
  try {
    batch.parts.reserve(parts.size());
    batch.ids.resize(static_cast<uint64_t>(n));
    numbers_.resize(static_cast<uint64_t>(n));
    number_rows(parts, numbers_.data());
  } catch (...) {
    announced_.pop_back();
    throw;
  }
  int64_t* ids = batch.ids.data();
  for (const TableIds& part : parts) {
    batch.parts.push_back({part.table, part.count});
    if (part.count) std::memcpy(ids, part.ids, static_cast<size_t>(part.count) * sizeof(int64_t));
    ids += part.count;
  }
  batch.first = next_occurrence_;
  next_occurrence_ += static_cast<uint32_t>(n);
  live_occurrences_ += n;
  ++next_batch_;
  known_[number & (known_.size() - 1)] = 0;

  const int64_t* numbers = numbers_.data();
  auto use = static_cast<uint32_t>(number);
  bool twice = false;
  for (int64_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) prefetch(numbers[i + 2 * kAhead]);
    if (i + kAhead < n) {
      const Uses& soon = uses(numbers[i + kAhead]);
      if (soon.next) __builtin_prefetch(&next_of(soon.last), 1);
    }
    uint32_t occurrence = batch.first + static_cast<uint32_t>(i);
    next_of(occurrence) = 0;
    Uses& row = uses(numbers[i]);
    if (row.next) {
      twice |= row.last - batch.first < static_cast<uint32_t>(n);
      next_of(row.last) = use;
    } else if (numbers[i] < capacity_ && !rows_[numbers[i]].pins) {
      --peers(rows_[numbers[i]]);
      row.next = use;
      ++peers(rows_[numbers[i]]);
    } else {
      row.next = use;
    }
    row.last = occurrence;
  }
  if (twice) {
    retract();
    throw std::invalid_argument("Batch " + std::to_string(number) +
                                " names an id twice. Announce distinct ids of each table.");
  }
  return number;
}

void Residency::retract_first() {
  if (announced_.empty()) throw std::invalid_argument("No batch is announced.");
  constexpr int64_t kAtOnce = 256;
  int64_t numbers[kAtOnce];
  Announced& batch = announced_.front();
  int64_t* ids = batch.ids.data();
  uint32_t occurrence = batch.first;
  for (const Part& part : batch.parts) {
    for (int64_t begin = 0; begin < part.count; begin += kAtOnce) {
      int64_t count = std::min(kAtOnce, part.count - begin);
      map_.find(part.table, ids + begin, count, numbers);
      int64_t gone = 0;
      for (int64_t i = 0; i < count; ++i) {
        uint32_t later = next_of(occurrence++);
        Uses& row = uses(numbers[i]);
        if (numbers[i] < capacity_) {
          bool counted = !rows_[numbers[i]].pins;
          if (counted) --peers(rows_[numbers[i]]);
          row.next = later;
          if (counted) ++peers(rows_[numbers[i]]);
        } else if (later) {
          row.next = later;
        } else {
          row = Uses{0, kIdle};
          idle_.push_back(numbers[i]);
          ids[begin + gone++] = ids[begin + i];
        }
      }
      map_.erase(part.table, ids + begin, gone, numbers);
    }
    ids += part.count;
  }
  live_occurrences_ -= static_cast<int64_t>(batch.ids.size());
  announced_.pop_front();
}

void Residency::retract() {
  while (!announced_.empty()) {
    Announced& batch = announced_.front();
    int64_t* ids = batch.ids.data();
    for (const Part& part : batch.parts) {
      forget_uses(part.table, ids, part.count);
      ids += part.count;
    }
    announced_.pop_front();
  }
  live_occurrences_ = 0;
}

// Rows have no announced use any more. The ids are spent.
void Residency::forget_uses(int32_t table, int64_t* ids, int64_t n) {
  constexpr int64_t kAtOnce = 256;
  int64_t numbers[kAtOnce];
  for (int64_t begin = 0; begin < n; begin += kAtOnce) {
    int64_t count = std::min(kAtOnce, n - begin);
    map_.find(table, ids + begin, count, numbers);
    int64_t gone = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (numbers[i] < 0) continue;  // forgotten with an earlier batch
      Uses& row = uses(numbers[i]);
      if (numbers[i] < capacity_) {
        bool counted = row.next && !rows_[numbers[i]].pins;
        if (counted) --peers(rows_[numbers[i]]);
        row.next = 0;
        if (counted) ++peers(rows_[numbers[i]]);
      } else if (row.next || row.last != kIdle) {
        row = Uses{0, kIdle};
        idle_.push_back(numbers[i]);
        ids[begin + gone++] = ids[begin + i];
      }
    }
    map_.erase(table, ids + begin, gone, numbers);
  }
}

// --- Admitting. ---

// Pins those rows that are resident; `batch`, where it was announced, tells their next use. Returns
// how many are not.
int64_t Residency::pin_present(const int64_t* numbers, int64_t n, const Announced* batch) {
  int64_t absent = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(numbers[i + kAhead]);
    if (numbers[i] >= capacity_) {
      ++absent;
      continue;
    }
    Row& row = rows_[numbers[i]];
    pin(row);
    if (batch) row.uses.next = next_of(batch->first + static_cast<uint32_t>(i));
  }
  return absent;
}

// Undoes pin_present; `next` is the announced batch's number.
void Residency::unpin_present(const int64_t* numbers, int64_t n, uint32_t next) {
  for (int64_t i = 0; i < n; ++i) {
    if (numbers[i] >= capacity_) continue;
    Row& row = rows_[numbers[i]];
    if (next) row.uses.next = next;
    unpin(row);
  }
}

bool Residency::admit(int64_t batch, Moves& moves) {
  int64_t first = next_batch_ - announced();
  if (announced_.empty() || batch != first) {
    throw std::invalid_argument("Batch " + std::to_string(batch) + " cannot be admitted: " +
                                (announced_.empty()
                                     ? "none is announced."
                                     : "batch " + std::to_string(first) + " is next."));
  }
  Announced& next = announced_.front();
  std::vector<TableIds> parts;
  const int64_t* ids = next.ids.data();
  for (const Part& part : next.parts) {
    parts.push_back({part.table, ids, part.count});
    ids += part.count;
  }
  auto n = static_cast<int64_t>(next.ids.size());
  numbers_.resize(next.ids.size());
  int64_t* numbers = numbers_.data();
  for (const TableIds& part : parts) {
    map_.find(part.table, part.ids, part.count, numbers);
    numbers += part.count;
  }
  if (!assign_slots(parts, &next, batch, moves)) return false;
  live_occurrences_ -= n;
  announced_.pop_front();
  return true;
}

int64_t Residency::admit_now(std::span<const TableIds> parts, Moves& moves) {
  check_parts(parts);
  int64_t n = total(parts);
  numbers_.resize(static_cast<uint64_t>(n));
  number_rows(parts, numbers_.data());
  try {
    if (assign_slots(parts, nullptr, next_unannounced_, moves)) return next_unannounced_--;
  } catch (...) {
    forget_fresh(parts, numbers_.data());
    throw;
  }
  forget_fresh(parts, numbers_.data());
  return 0;
}

int64_t Residency::slots_needed(std::span<const TableIds> parts) const {
  int64_t needed = pinned();
  std::vector<int64_t> slots;
  for (const TableIds& part : parts) {
    slots.resize(static_cast<size_t>(part.count));
    find(part.table, part.ids, part.count, slots.data());
    for (int64_t slot : slots) needed += slot < 0 || !rows_[slot].pins;
  }
  return needed;
}

// Admits the rows of numbers_.
bool Residency::assign_slots(std::span<const TableIds> parts, const Announced* batch,
                             int64_t number, Moves& moves) {
  auto n = static_cast<int64_t>(numbers_.size());
  const int64_t* numbers = numbers_.data();
  if (admitted_.size() >= kMostPins) {
    throw std::length_error(std::to_string(admitted_.size()) +
                            " batches are pinned. Release some of them.");
  }
  int64_t absent = pin_present(numbers, n, batch);
  moves.slots_needed = pinned() + absent;
  bool fits = moves.slots_needed <= limit_;
  auto undo = [&] { unpin_present(numbers, n, batch ? static_cast<uint32_t>(number) : 0); };
  if (!fits) {
    undo();
    return false;
  }
  int64_t evictions = std::max<int64_t>(0, resident() + absent - limit_);
  Admitted* admitted = nullptr;
  try {
    moves.evicted.resize(static_cast<size_t>(evictions));
    moves.evicted_slots.resize(static_cast<size_t>(evictions));
    moves.evicted_dirty.resize(static_cast<size_t>(evictions));
    moves.loaded.resize(static_cast<size_t>(absent));
    moves.loaded_slots.resize(static_cast<size_t>(absent));
    make_room_to_vacate(evictions);
    coming_.resize(static_cast<uint64_t>(absent));
    Buffer<uint32_t> slots(static_cast<uint64_t>(n));
    admitted = &admitted_[number];
    admitted->slots = std::move(slots);
    leave_awaited(numbers, n, absent);
  } catch (...) {
    if (admitted) admitted_.erase(number);
    undo();
    throw;
  }
  choose_victims(evictions);
  vacate(&moves);
  load(parts, batch, moves);
  for (int64_t i = 0; i < n; ++i) admitted->slots[i] = static_cast<uint32_t>(numbers[i]);
  return true;
}

// Takes the rows that will be loaded out of the awaited, with their uses into coming_, so that rows
// that are evicted find places there.
void Residency::leave_awaited(const int64_t* numbers, int64_t n, int64_t absent) {
  int64_t left = 0;
  for (int64_t i = 0; i < n && left < absent; ++i) {
    if (numbers[i] < capacity_) continue;
    Uses& row = uses(numbers[i]);
    if (!row.next && row.last == kIdle) {
      while (left) {
        uses(idle_.back()) = coming_[--left];
        idle_.pop_back();
      }
      throw std::invalid_argument("A batch names an id twice. Admit distinct ids of each table.");
    }
    coming_[left++] = row;
    row = Uses{0, kIdle};
    idle_.push_back(numbers[i]);
  }
}

// --- The whole. ---

void Residency::find(int32_t table, const int64_t* ids, int64_t n, int64_t* slots) const {
  if (table < 0 || table >= map_.tables()) {
    throw std::invalid_argument("Table " + std::to_string(table) + " is outside [0, " +
                                std::to_string(map_.tables()) + ").");
  }
  map_.find(table, ids, n, slots);
  for (int64_t i = 0; i < n; ++i) slots[i] = slots[i] < capacity_ ? slots[i] : -1;
}

std::vector<int64_t> Residency::find(std::span<const RowKey> keys) const {
  std::vector<int64_t> slots(keys.size()), ids;
  // Keys of one table usually stand together.
  for (size_t begin = 0; begin < keys.size();) {
    size_t end = begin;
    ids.clear();
    while (end < keys.size() && keys[end].table == keys[begin].table) ids.push_back(keys[end++].id);
    find(keys[begin].table, ids.data(), static_cast<int64_t>(ids.size()), slots.data() + begin);
    begin = end;
  }
  return slots;
}

uint64_t Residency::memory_bytes() const { return memory_.bytes() - released_ + beside_slots(); }

uint64_t Residency::used_bytes() const {
  constexpr uint64_t kPage = 4096;
  auto slots = static_cast<uint64_t>(used());
  return slots * (sizeof(Row) + sizeof(int64_t)) + std::min(ghosts_.bytes(), slots * kPage) +
         std::min(map_.array_bytes(), slots * kPage) + beside_slots();
}

uint64_t Residency::resident_bytes() const {
  auto offset = [&](const void* array) {
    return static_cast<uint64_t>(static_cast<const uint8_t*>(array) - memory_.data());
  };
  auto slots = static_cast<uint64_t>(used());
  uint64_t ids = offset(ids_), page = memory_.page();
  uint64_t bytes = memory_.written_bytes(0, slots * sizeof(Row)) +
                   memory_.written_bytes(ids, ids + slots * sizeof(int64_t));
  // Written here and there; elsewhere they were only read.
  bytes += std::min(ghosts_.bytes(), ghosts_.written() * page) +
           std::min(map_.array_bytes(), (slots + awaited_.size()) * page);
  return std::min(bytes, memory_.bytes() - released_) + beside_slots();
}

uint64_t Residency::beside_slots() const {
  uint64_t bytes = map_.index_bytes();
  auto of = [](const auto& array) { return array.capacity() * sizeof(array[0]); };
  bytes += of(next_) + of(awaited_) + of(idle_) + of(known_) + of(unknown_) + of(leaving_);
  bytes += of(table_begin_);
  for (const Announced& batch : announced_) bytes += of(batch.ids) + of(batch.parts);
  for (const auto& [number, batch] : admitted_) bytes += of(batch.slots);
  bytes += of(numbers_) + of(grouped_) + of(gone_ids_) + of(moved_ids_) + of(moved_numbers_);
  return bytes + of(coming_) + of(coming_ids_);
}

void Residency::clear() {
  retract();
  for (int64_t s = 0; s < used_; ++s) {
    if (rows_[s].pins == kFree) continue;
    int64_t gone;
    map_.erase(rows_[s].table, ids_ + s, 1, &gone);
  }
  map_.clear();
  std::memset(static_cast<void*>(rows_), 0, static_cast<size_t>(used_) * sizeof(Row));
  ghosts_.clear();
  clock_ = FrequencyClock(policy_.half_life * static_cast<double>(capacity_));
  admitted_.clear();
  awaited_.clear();
  idle_.clear();
  std::fill(known_.begin(), known_.end(), 0);
  std::fill(unknown_.begin(), unknown_.end(), 0);
  used_ = free_count_ = unpinned_ = new_ = hand_ = 0;
  free_head_ = -1;
}

}  // namespace hotbed
