// Rows of a row space for callers that bring no batch: read, written, listed, written back.
#include <algorithm>
#include <cstring>

#include "base/forks.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

void RowSpace::read(int32_t table, const int64_t* ids, int64_t n, void* weights,
                    void* const* states, int64_t* last, bool* found) {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  auto give = [&](int64_t i, const uint8_t* record) {
    int64_t at = layout_.weight_bytes();
    if (weights) std::memcpy(static_cast<uint8_t*>(weights) + i * at, record, at);
    for (size_t k = 0; k < states_.size(); ++k) {
      int64_t bytes = layout_.state_bytes(k);
      if (states) std::memcpy(static_cast<uint8_t*>(states[k]) + i * bytes, record + at, bytes);
      at += bytes;
    }
    if (last && layout_.steps) std::memcpy(last + i, record + at, sizeof(int64_t));
  };
  int64_t chunk = std::min(records_at_once(), n);
  Buffer<uint8_t> records(std::max<int64_t>(1, chunk) * record_bytes_);
  Buffer<int64_t> slots(std::max<int64_t>(1, chunk));
  std::unique_ptr<bool[]> there(new bool[std::max<int64_t>(1, chunk)]);
  std::vector<RowKey> keys;
  std::vector<int64_t> places, here, here_slots;
  auto give_here = [&] {
    gather(here_slots.data(), static_cast<int64_t>(here.size()), records.data());
    for (size_t i = 0; i < here.size(); ++i) {
      found[here[i]] = true;
      give(here[i], records.data() + static_cast<int64_t>(i) * record_bytes_);
    }
    here.clear();
    here_slots.clear();
  };
  for (int64_t begin = 0; begin < n; begin += chunk) {
    int64_t m = std::min(chunk, n - begin);
    residency_.find(table, ids + begin, m, slots.data());
    keys.clear();
    places.clear();
    for (int64_t i = 0; i < m; ++i) {
      if (slots[i] < 0) {
        keys.push_back({ids[begin + i], table});
        places.push_back(begin + i);
        continue;
      }
      here.push_back(begin + i);
      here_slots.push_back(slots[i]);
      if (static_cast<int64_t>(here.size()) == rows_at_once()) give_here();
    }
    give_here();
    std::fill_n(there.get(), keys.size(), false);
    read_below(keys, records.data(), there.get());
    counters_.scratch_reads += static_cast<int64_t>(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      found[places[i]] = there[i];
      if (there[i]) give(places[i], records.data() + static_cast<int64_t>(i) * record_bytes_);
    }
  }
}

void RowSpace::write(int32_t table, const int64_t* ids, int64_t n, const void* weights,
                     const void* const* states, const int64_t* last) {
  auto moving = may_move();
  std::lock_guard lock(mutex_);
  drain();
  write_held_back();
  const SpaceTable& owner = *tables_[table];
  bool whole = weights && (states || states_.empty()) && (last || !layout_.steps);
  mark_ = 0;
  auto take = [&](int64_t i, uint8_t* record) {
    int64_t at = layout_.weight_bytes();
    if (weights) std::memcpy(record, static_cast<const uint8_t*>(weights) + i * at, at);
    for (size_t k = 0; k < states_.size(); ++k) {
      int64_t bytes = layout_.state_bytes(k);
      if (states) {
        std::memcpy(record + at, static_cast<const uint8_t*>(states[k]) + i * bytes, bytes);
      }
      at += bytes;
    }
    if (last && layout_.steps) std::memcpy(record + at, last + i, sizeof(int64_t));
  };
  int64_t chunk = std::max<int64_t>(1, std::min(records_at_once(), n));
  Buffer<uint8_t> records(chunk * record_bytes_);
  Buffer<int64_t> slots(chunk);
  std::unique_ptr<bool[]> there(new bool[chunk]);
  std::vector<RowKey> keys;
  std::vector<int64_t> places;
  for (int64_t begin = 0; begin < n; begin += chunk) {
    int64_t m = std::min(chunk, n - begin);
    residency_.find(table, ids + begin, m, slots.data());
    keys.clear();
    places.clear();
    for (int64_t i = 0; i < m; ++i) {
      if (slots[i] >= 0) continue;
      keys.push_back({ids[begin + i], table});
      places.push_back(begin + i);
    }
    std::fill_n(there.get(), keys.size(), false);
    if (!whole) {
      below_->read(keys, records.data(), there.get());
    } else if (owner.dynamic()) {
      below_->holds(keys, there.get());
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      uint8_t* record = records.data() + static_cast<int64_t>(i) * record_bytes_;
      if (!whole && !there[i]) new_record(owner, &keys[i].id, record);
      take(places[i], record);
    }
    try {
      below_->write(keys, records.data());
    } catch (...) {
      if (owner.dynamic()) born_[table] = static_cast<int64_t>(stored(table).size());
      throw;
    }
    if (owner.dynamic()) {
      for (size_t i = 0; i < keys.size(); ++i) born_[table] += !there[i];
    }
    std::vector<int64_t> here, here_slots;
    auto write_here = [&] {
      auto count = static_cast<int64_t>(here.size());
      keep(here_slots);
      if (!whole) gather(here_slots.data(), count, records.data());
      for (int64_t i = 0; i < count; ++i) take(here[i], records.data() + i * record_bytes_);
      scatter(records.data(), here_slots.data(), count);
      residency_.mark_dirty(here_slots.data(), count);
      for (int64_t slot : here_slots) born_[table] += residency_.make_exist(slot);
      here.clear();
      here_slots.clear();
    };
    for (int64_t i = 0; i < m; ++i) {
      if (slots[i] < 0) continue;
      here.push_back(begin + i);
      here_slots.push_back(slots[i]);
      if (static_cast<int64_t>(here.size()) == rows_at_once()) write_here();
    }
    write_here();
  }
}

// Under moving_ and mutex_: rows, by rising id, and what slots hold are nowhere any more.
void RowSpace::forget(int32_t table, std::span<const RowKey> rows,
                      const std::vector<int64_t>& slots) {
  keep(slots);
  size_t kept = 0;
  for (size_t i = 0; i < held_back_.size(); ++i) {
    RowKey key = held_back_[i];
    if (key.table == table && std::binary_search(rows.begin(), rows.end(), key, before)) continue;
    std::memmove(held_back_records_.data() + kept * record_bytes_,
                 held_back_records_.data() + i * record_bytes_, record_bytes_);
    held_back_[kept++] = key;
  }
  held_back_.resize(kept);
  held_back_records_.resize(kept * record_bytes_);
  held_back_bytes_ = held_back_records_.size();
  below_->erase(rows);
  mark_ = 0;

  std::vector<int64_t> free, pinned;
  std::vector<RowKey> pinned_rows;
  const auto* id_plane = reinterpret_cast<const int64_t*>(ids_.data());
  for (int64_t slot : slots) {
    if (!residency_.is_pinned(slot)) {
      free.push_back(slot);
      continue;
    }
    pinned.push_back(slot);
    pinned_rows.push_back({id_plane[slot], table});
  }
  residency_.drop(free.data(), static_cast<int64_t>(free.size()));
  fill_new(pinned_rows, pinned);
  auto count = static_cast<int64_t>(pinned.size());
  if (tables_[table]->dynamic()) {
    residency_.mark_new(pinned.data(), count);
  } else {
    residency_.mark_clean(pinned.data(), count);
  }
}

int64_t RowSpace::erase(int32_t table, const int64_t* ids, int64_t n) {
  auto moving = may_move();
  std::lock_guard lock(mutex_);
  drain();
  std::vector<int64_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  std::vector<RowKey> keys;
  for (int64_t id : sorted) keys.push_back({id, table});
  auto count = static_cast<int64_t>(keys.size());
  std::vector<int64_t> slots = residency_.find(keys);
  std::unique_ptr<bool[]> found(new bool[keys.size() + 1]);
  find_stored(table, sorted.data(), count, found.get());
  int64_t gone = std::count(found.get(), found.get() + count, true);
  std::erase(slots, -1);
  forget(table, keys, slots);
  if (tables_[table]->dynamic()) born_[table] -= gone;
  return gone;
}

void RowSpace::erase_all(int32_t table) {
  auto moving = may_move();
  std::lock_guard lock(mutex_);
  drain();
  std::vector<RowKey> keys;
  for (int64_t id : stored(table)) keys.push_back({id, table});
  std::vector<int64_t> slots;
  residency_.for_each([&](int64_t slot, RowKey key, bool) {
    if (key.table == table) slots.push_back(slot);
  });
  forget(table, keys, slots);
  born_[table] = 0;
}

bool RowSpace::is_empty() {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  return residency_.resident() == 0 && held_back_.empty();
}

void RowSpace::note_rows_below() {
  std::scoped_lock lock(moving_, mutex_);
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t]->dynamic()) born_[t] = below_->rows(static_cast<int32_t>(t));
  }
  mark_ = 0;
  generation_ = RowChanges::next_generation();
}

// Under moving_.
std::vector<RowKey> RowSpace::held_back_sorted() const {
  std::vector<RowKey> keys = held_back_;
  std::sort(keys.begin(), keys.end(), before);
  return keys;
}

int64_t RowSpace::rows(int32_t table) {
  if (!tables_[table]->dynamic()) return tables_[table]->size();
  std::lock_guard lock(mutex_);
  drain();
  return born_[table];
}

std::vector<int64_t> RowSpace::stored_ids(int32_t table, bool resident) {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  return stored(table, resident);
}

void RowSpace::stores(int32_t table, const int64_t* ids, int64_t n, bool* found) {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  find_stored(table, ids, n, found);
}

// Under moving_ and mutex_.
void RowSpace::find_stored(int32_t table, const int64_t* ids, int64_t n, bool* found) const {
  std::vector<RowKey> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back({ids[i], table});
  std::vector<int64_t> slots = residency_.find(keys);
  std::vector<RowKey> held = held_back_sorted();
  below_->holds(keys, found);
  for (int64_t i = 0; i < n; ++i) {
    found[i] = found[i] || (slots[i] >= 0 && residency_.is_dirty(slots[i])) || among(held, keys[i]);
  }
}

bool RowSpace::stores_any(int32_t table) {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  if (below_->rows(table) || !held_back_.empty()) return true;
  int64_t slot = 0;
  return residency_.list(slot, 1, [&](int64_t, RowKey key, bool dirty, int64_t) {
    return key.table == table && dirty;
  });
}

std::vector<int64_t> RowSpace::stored(int32_t table, bool resident) const {
  std::vector<int64_t> ids(static_cast<size_t>(below_->rows(table)));
  below_->ids(table, ids.data());
  for (const RowKey& key : held_back_) {
    if (key.table == table) ids.push_back(key.id);
  }
  residency_.for_each([&](int64_t, RowKey key, bool dirty) {
    if (key.table == table && (dirty || resident)) ids.push_back(key.id);
  });
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

void RowSpace::flush() {
  auto moving = may_move();
  std::lock_guard lock(mutex_);
  drain();
  write_held_back();
  std::vector<RowKey> keys;
  std::vector<int64_t> slots;
  Buffer<uint8_t> records(records_at_once() * record_bytes_);
  auto write = [&] {
    auto n = static_cast<int64_t>(keys.size());
    for (const auto& keeper : keepers_) keeper->leave_out(slots.data(), n);
    gather(slots.data(), n, records.data());
    below_->write(keys, records.data());
    residency_.mark_clean(slots.data(), n);
    counters_.written_back += n;
    keys.clear();
    slots.clear();
  };
  residency_.for_each([&](int64_t slot, RowKey key, bool dirty) {
    if (!dirty) return;
    keys.push_back(key);
    slots.push_back(slot);
    if (static_cast<int64_t>(keys.size()) == records_at_once()) write();
  });
  if (!keys.empty()) write();
}

TierCounters RowSpace::counters() {
  std::lock_guard lock(mutex_);
  drain();
  return counters_;
}

// Under mutex_.
uint64_t RowSpace::bookkeeping_bytes() const {
  uint64_t bytes = residency_.used_bytes();
  for (const SpaceTable* table : tables_) bytes += table->uses_bytes();
  return bytes;
}

uint64_t RowSpace::memory_bytes() {
  std::lock_guard lock(mutex_);
  int64_t used = residency_.used();
  // Those of a device are its own.
  auto of = [&](const Plane& plane) {
    return plane.data() ? plane.written_bytes(used) : plane.bytes(used);
  };
  uint64_t bytes = of(weights_) + ids_.written_bytes(used) + (layout_.steps ? of(steps_) : 0);
  for (const Plane& state : states_) bytes += of(state);
  for (const SpaceTable* table : tables_) bytes += table->uses_bytes();
  return bytes + residency_.resident_bytes() + below_->memory_bytes() + staging_.resident_bytes() +
         held_back_bytes_;
}

}  // namespace hotbed
