// The second half of Residency: rows that come, stay and go. See residency.cpp for how it works.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "tiers/residency.hpp"

namespace hotbed {

namespace {

constexpr int64_t kAhead = 16;  // rows between prefetching a place and using it
constexpr int64_t kSoon = 8;

// Where a row stands in the order of eviction: lower goes first.
uint32_t rank_of(uint32_t next_use, uint32_t score) { return next_use ? ~next_use : score; }

}  // namespace

// Fills leaving_ with so many unpinned rows, which exist.
void Residency::choose_victims(int64_t count) {
  leaving_.clear();
  if (!count) return;
  // Few victims in a large pool would need a long sweep if only the very last rows would do.
  int64_t looks = std::max(policy_.slots_a_batch, policy_.slots_a_victim * count);
  int64_t eligible = count;
  if (looks < used_) {
    double share = static_cast<double>(used_) / static_cast<double>(looks);
    eligible = std::min(unpinned_, static_cast<int64_t>(static_cast<double>(count) * share));
  }
  // The first place of the order up to which there are enough, and how many stand before it.
  int64_t before = 0;
  uint32_t limit = 0, at_limit = 0;
  auto enough = [&](uint32_t rank, uint32_t rows) {
    if (before + rows < eligible) {
      before += rows;
      return false;
    }
    limit = rank;
    at_limit = rows;
    return true;
  };
  bool found = false;
  for (uint32_t score = 0; score < FrequencyClock::kScores && !found; ++score) {
    found = enough(rank_of(0, score), unknown_[score]);
  }
  for (int64_t b = next_batch_ - 1; !found; --b) {
    found = enough(rank_of(static_cast<uint32_t>(b), 0), known_[b & (known_.size() - 1)]);
  }
  // Of the rows at the limit as many as are missing once all before it are taken, wherever the
  // sweep will see all.
  int64_t from_limit = looks < used_ ? at_limit : count - before;
  int64_t slot = hand_ < used_ ? hand_ : 0;
  for (int64_t left = count; left; slot = slot + 1 < used_ ? slot + 1 : 0) {
    const Row& row = rows_[slot];
    if (row.pins) continue;
    uint32_t rank = rank_of(row.uses.next, row.score);
    if (rank > limit || (rank == limit && from_limit-- <= 0)) continue;
    leaving_.push_back(static_cast<uint32_t>(slot));
    --left;
  }
  hand_ = slot;
}

// --- Coming and going of rows. ---

void Residency::make_room_to_vacate(int64_t rows) {
  auto n = static_cast<uint64_t>(rows);
  leaving_.reserve(n);
  grouped_.resize(n);
  gone_ids_.resize(n);
  moved_ids_.resize(n);
  moved_numbers_.resize(n);
}

// Empties the slots of leaving_, none of them pinned. `moves`, where it is given, receives the
// rows, and their frequency is remembered.
void Residency::vacate(Moves* moves) {
  auto n = static_cast<int64_t>(leaving_.size());
  if (!n) return;
  // By table, for the map.
  std::fill(table_begin_.begin(), table_begin_.end(), 0);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      prefetch(leaving_[i + kAhead]);
      __builtin_prefetch(ids_ + leaving_[i + kAhead], 1);
    }
    ++table_begin_[rows_[leaving_[i]].table + 1];
  }
  for (size_t t = 1; t < table_begin_.size(); ++t) table_begin_[t] += table_begin_[t - 1];
  for (int64_t i = 0; i < n; ++i) {
    grouped_[table_begin_[rows_[leaving_[i]].table]++] = leaving_[i];
  }

  for (int64_t begin = 0; begin < n;) {
    int32_t table = rows_[grouped_[begin]].table;
    int64_t end = table_begin_[table];  // where the next table begins, by now
    int64_t gone = 0, moved = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (moves && i + kSoon < n) {
        uint32_t soon = grouped_[i + kSoon];
        ghosts_.prefetch(RowKey{ids_[soon], rows_[soon].table});
      }
      uint32_t slot = grouped_[i];
      Row& row = rows_[slot];
      int64_t id = ids_[slot];
      --peers(row);
      --unpinned_;
      if (row.uses.next) {
        int64_t number = capacity_ + static_cast<int64_t>(awaited_.size());
        if (idle_.empty()) {
          awaited_.push_back(row.uses);
        } else {
          number = idle_.back();
          idle_.pop_back();
          uses(number) = row.uses;
        }
        moved_ids_[moved] = id;
        moved_numbers_[moved++] = number;
      } else {
        gone_ids_[gone++] = id;
      }
      if (moves) {
        moves->evicted[i] = RowKey{id, table};
        moves->evicted_slots[i] = slot;
        moves->evicted_dirty[i] = (row.flags & kDirty) != 0;
        ghosts_.put(moves->evicted[i], row.score);
      }
      new_ -= (row.flags & kNew) != 0;
      row = Row{{}, kFree, 0, 0, 0};
      ids_[slot] = free_head_;
      free_head_ = slot;
    }
    free_count_ += end - begin;
    map_.update(table, moved_ids_.data(), moved, moved_numbers_.data());
    map_.erase(table, gone_ids_.data(), gone, moved_numbers_.data());
    begin = end;
  }
}

void Residency::narrow(int64_t limit, Moves& moves) {
  int64_t begin = std::max<int64_t>(1, limit), leaving = 0;
  for (int64_t s = begin; s < used_; ++s) {
    if (rows_[s].pins == kFree) continue;
    if (rows_[s].pins) {
      begin = s + 1;
      leaving = 0;
    } else {
      ++leaving;
    }
  }
  if (begin >= limit_) return;
  moves.evicted.resize(static_cast<size_t>(leaving));
  moves.evicted_slots.resize(static_cast<size_t>(leaving));
  moves.evicted_dirty.resize(static_cast<size_t>(leaving));
  make_room_to_vacate(leaving);
  make_room_awaited(leaving);
  leaving_.clear();
  for (int64_t s = begin; s < used_; ++s) {
    if (rows_[s].pins != kFree) leaving_.push_back(static_cast<uint32_t>(s));
  }
  vacate(&moves);
  // Free slots from here on are never used again, as if they had never been used.
  int64_t all = free_head_, last = -1;
  free_head_ = -1;
  free_count_ = 0;
  for (int64_t next; all >= 0; all = next) {
    next = ids_[all];
    if (all >= begin) continue;
    (last < 0 ? free_head_ : ids_[last]) = all;
    ids_[all] = -1;
    last = all;
    ++free_count_;
  }
  used_ = std::min(used_, begin);
  limit_ = begin;
  auto release = [&](uint64_t first, uint64_t element) {
    memory_.release(first + static_cast<uint64_t>(begin) * element,
                    first + static_cast<uint64_t>(capacity_) * element);
  };
  release(0, sizeof(Row));
  release(static_cast<uint64_t>(reinterpret_cast<uint8_t*>(ids_) - memory_.data()),
          sizeof(int64_t));
  released_ = static_cast<uint64_t>(capacity_ - begin) * (sizeof(Row) + sizeof(int64_t));
}

int64_t Residency::take_free_slot() {
  if (free_head_ < 0) return used_++;
  int64_t slot = free_head_;
  free_head_ = ids_[slot];
  --free_count_;
  return slot;
}

// Gives the rows of numbers_ that are not resident a slot, their uses being in coming_.
void Residency::load(std::span<const TableIds> parts, const Announced* batch, Moves& moves) {
  int64_t* numbers = numbers_.data();
  int64_t base = 0;
  int64_t loaded = 0;
  for (const TableIds& part : parts) {
    int64_t begin = loaded;
    for (int64_t i = 0; i < part.count; ++i) {
      if (numbers[base + i] < capacity_) continue;
      moves.loaded[loaded] = RowKey{part.ids[i], part.table};
      numbers[base + i] = take_free_slot();
      moves.loaded_slots[loaded] = numbers[base + i];
      Uses uses = coming_[loaded++];
      if (batch) uses.next = next_of(batch->first + static_cast<uint32_t>(base + i));
      rows_[numbers[base + i]] = Row{uses, 1, 0, static_cast<uint16_t>(part.table), 0};
    }
    base += part.count;
    coming_ids_.resize(static_cast<uint64_t>(loaded - begin));
    for (int64_t k = begin; k < loaded; ++k) {
      if (k + kAhead < loaded) ghosts_.prefetch(moves.loaded[k + kAhead]);
      int64_t id = moves.loaded[k].id;
      int64_t slot = moves.loaded_slots[k];
      ids_[slot] = id;
      rows_[slot].score = ghosts_.take(moves.loaded[k]);
      coming_ids_[k - begin] = id;
    }
    map_.update(part.table, coming_ids_.data(), loaded - begin, moves.loaded_slots.data() + begin);
  }
}

// --- Admitted batches. ---

int64_t Residency::count(int64_t batch) const {
  return static_cast<int64_t>(admitted(batch, "counted").slots.size());
}

void Residency::slots(int64_t batch, int64_t* out) const {
  const Buffer<uint32_t>& slots = admitted(batch, "read").slots;
  for (uint64_t i = 0; i < slots.size(); ++i) out[i] = slots[i];
}

void Residency::mark_new(const int64_t* slots, int64_t n) {
  check_slots(slots, n, "marked as new");
  for (int64_t i = 0; i < n; ++i) {
    if (rows_[slots[i]].pins) continue;
    throw std::invalid_argument("Slot " + std::to_string(slots[i]) +
                                " cannot be marked as new: no batch has pinned it.");
  }
  for (int64_t i = 0; i < n; ++i) {
    new_ += !(rows_[slots[i]].flags & kNew);
    rows_[slots[i]].flags = kNew;
  }
}

template <class F>
void Residency::for_rows(const Buffer<uint32_t>& slots, F f) {
  auto n = static_cast<int64_t>(slots.size());
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(rows_ + slots[i + kAhead], 1);
    f(rows_[slots[i]], slots[i]);
  }
}

bool Residency::consumed(int64_t batch) const { return admitted(batch, "asked for").consumed; }

int64_t Residency::held() const {
  return std::count_if(admitted_.begin(), admitted_.end(),
                       [](const auto& entry) { return entry.second.consumed; });
}

bool Residency::make_exist(int64_t slot) {
  check_slots(&slot, 1, "made to exist");
  bool fresh = (rows_[slot].flags & kNew) != 0;
  new_ -= fresh;
  become_dirty(rows_[slot]);
  return fresh;
}

void Residency::consume(int64_t batch, std::vector<RowKey>* born) {
  Admitted& used = admitted(batch, "consumed");
  if (used.consumed) {
    throw std::invalid_argument("Batch " + std::to_string(batch) + " is consumed already.");
  }
  auto n = static_cast<int64_t>(used.slots.size());
  if (born) born->reserve(born->size() + static_cast<size_t>(std::min(n, new_)));
  used.consumed = true;
  for_rows(used.slots, [&](Row& row, uint32_t slot) {
    row.score = clock_.after_use(row.score);
    if (!(row.flags & kNew)) return;
    become_dirty(row);
    --new_;
    if (born) born->push_back({ids_[slot], row.table});
  });
  if (clock_.advance(n)) lower_scores();
}

void Residency::lower_scores() {
  for (int64_t s = 0; s < used_; ++s) rows_[s].score = FrequencyClock::lower(rows_[s].score);
  for (uint16_t s = 0; s < FrequencyClock::kScores; ++s) {
    unknown_[FrequencyClock::lower(s)] += std::exchange(unknown_[s], 0);
  }
  ghosts_.lower();
}

void Residency::mark_dirty(int64_t batch) {
  for_rows(admitted(batch, "marked as dirty").slots,
           [this](Row& row, uint32_t) { mark_dirty(row); });
}

void Residency::mark_dirty(const int64_t* slots, int64_t n) {
  check_slots(slots, n, "marked as dirty");
  for (int64_t i = 0; i < n; ++i) mark_dirty(rows_[slots[i]]);
}

uint8_t Residency::end_epoch() {
  touched_ = false;
  if (epoch_ < UINT8_MAX) return epoch_++;
  for (int64_t s = 0; s < used_; ++s) rows_[s].flags &= (1 << kEpochAt) - 1;
  epoch_ = 1;
  return epoch_++;
}

void Residency::mark_clean(const int64_t* slots, int64_t n) {
  check_slots(slots, n, "marked as clean");
  for (int64_t i = 0; i < n; ++i) rows_[slots[i]].flags &= static_cast<uint16_t>(~kDirty);
}

void Residency::release(int64_t batch) {
  Admitted& ends = admitted(batch, "released");
  if (!ends.consumed) {
    throw std::invalid_argument("Batch " + std::to_string(batch) +
                                " cannot be released: it was not consumed. Take it back.");
  }
  end(batch, ends);
}

// A batch pins its rows no more; those that are new and that none pins are in leaving_ afterwards,
// and gone.
void Residency::end(int64_t batch, const Admitted& ends) {
  int64_t leaving = 0;
  if (new_) {
    for_rows(ends.slots, [&](Row& row, uint32_t) { leaving += row.pins == 1 && row.flags & kNew; });
  }
  make_room_to_vacate(leaving);
  make_room_awaited(leaving);
  leaving_.clear();
  for_rows(ends.slots, [&](Row& row, uint32_t slot) {
    unpin(row);
    if (!row.pins && row.flags & kNew) leaving_.push_back(slot);
  });
  vacate(nullptr);
  admitted_.erase(batch);
}

void Residency::take_back(int64_t batch, std::vector<int64_t>& dropped) {
  Admitted& ends = admitted(batch, "taken back");
  if (ends.consumed) {
    throw std::invalid_argument("Batch " + std::to_string(batch) +
                                " cannot be taken back: it was consumed. Release it.");
  }
  dropped.reserve(ends.slots.size());
  end(batch, ends);
  dropped.assign(leaving_.begin(), leaving_.end());
}

void Residency::drop(const int64_t* slots, int64_t n) {
  check_slots(slots, n, "dropped");
  make_room_to_vacate(n);
  make_room_awaited(n);
  leaving_.clear();
  for (int64_t i = 0; i < n; ++i) {
    Row& row = rows_[slots[i]];
    if (row.pins || row.flags & kLeaving) {
      std::string why = row.pins ? ": a batch has pinned it." : ": it is named twice.";
      for (uint32_t slot : leaving_) rows_[slot].flags &= static_cast<uint16_t>(~kLeaving);
      throw std::invalid_argument("Slot " + std::to_string(slots[i]) + " cannot be dropped" + why);
    }
    row.flags |= kLeaving;
    leaving_.push_back(static_cast<uint32_t>(slots[i]));
  }
  vacate(nullptr);
}

}  // namespace hotbed
