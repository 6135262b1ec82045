#include "tiers/host_tier.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "base/integers.hpp"

namespace hotbed {

HostTier::HostTier(int64_t record_bytes, const std::vector<int64_t>& table_rows, int64_t capacity,
                   std::shared_ptr<Tier> below)
    : record_bytes_(record_bytes), below_(std::move(below)), residency_(table_rows, capacity) {
  records_.reserve(static_cast<uint64_t>(capacity * record_bytes), "The host tier", kLowerBudget);
}

void HostTier::read(std::span<const RowKey> keys, uint8_t* records, bool* found) {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> slots = residency_.find(keys);
  std::vector<RowKey> missing;
  std::vector<size_t> places;
  for (size_t i = 0; i < keys.size(); ++i) {
    found[i] = slots[i] >= 0;
    if (found[i]) {
      std::memcpy(records + i * record_bytes_, record(slots[i]), record_bytes_);
    } else {
      missing.push_back(keys[i]);
      places.push_back(i);
    }
  }
  if (below_ && !missing.empty()) {
    Buffer<uint8_t> from(missing.size() * record_bytes_);
    std::unique_ptr<bool[]> there(new bool[missing.size()]());
    below_->read(missing, from.data(), there.get());
    for (size_t i = 0; i < missing.size(); ++i) {
      if (!there[i]) continue;
      found[places[i]] = true;
      std::memcpy(records + places[i] * record_bytes_, from.data() + i * record_bytes_,
                  record_bytes_);
    }
  }
  rows_read_ += keys.size() - missing.size();
}

void HostTier::holds(std::span<const RowKey> keys, bool* found) const {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> slots = residency_.find(keys);
  std::fill_n(found, keys.size(), false);
  if (below_) below_->holds(keys, found);
  for (size_t i = 0; i < keys.size(); ++i) found[i] = found[i] || slots[i] >= 0;
}

// What is here by slot, then what is below and not here.
class HostTier::Scan : public RecordScan {
 public:
  Scan(HostTier& tier, std::span<const int32_t> tables)
      : tier_(tier),
        tables_(tables.begin(), tables.end()),
        below_(tier.below_ ? tier.below_->scan(tables) : nullptr) {}

  int64_t next(int64_t most, RowKey* keys, uint8_t* records) override {
    std::lock_guard lock(tier_.mutex_);
    int64_t bytes = tier_.record_bytes_;
    int64_t n = tier_.residency_.list(slot_, most, [&](int64_t slot, RowKey key, bool, int64_t i) {
      if (!tables_.count(key.table)) return false;
      keys[i] = key;
      std::memcpy(records + i * bytes, tier_.record(slot), static_cast<size_t>(bytes));
      return true;
    });
    while (!n && below_) {
      int64_t found = below_->next(most, keys, records);
      if (!found) break;
      std::vector<int64_t> slots = tier_.residency_.find({keys, static_cast<size_t>(found)});
      n = keep_rows(keys, records, found, bytes,
                    [&](int64_t i) { return slots[static_cast<size_t>(i)] < 0; });
    }
    return n;
  }

 private:
  HostTier& tier_;
  const std::set<int32_t> tables_;
  int64_t slot_ = 0;
  std::unique_ptr<RecordScan> below_;
};

std::unique_ptr<RecordScan> HostTier::scan(std::span<const int32_t> tables, uint64_t /*since*/) {
  return std::make_unique<Scan>(*this, tables);
}

void HostTier::write(std::span<const RowKey> keys, const uint8_t* records) {
  std::lock_guard lock(mutex_);
  if (!below_) check_room(keys);
  narrow();
  // A part must fit beside nothing: nothing is pinned between calls.
  auto part = static_cast<size_t>(std::max<int64_t>(1, residency_.limit() / 2));
  for (size_t begin = 0; begin < keys.size(); begin += part) {
    write_part(keys.subspan(begin, std::min(part, keys.size() - begin)),
               records + begin * record_bytes_);
  }
}

// Gives memory back that the budget holds no more; the rows in it go below.
void HostTier::narrow() {
  int64_t limit = allowed_ ? allowed_(residency_.used_bytes()) : residency_.limit();
  if (limit >= residency_.limit()) return;
  // Written first, so that they are still here if that fails.
  write_below([&](int64_t slot) { return slot >= limit; });
  Moves moves;
  residency_.narrow(limit, moves);
  records_.release(static_cast<uint64_t>(residency_.limit() * record_bytes_), records_.bytes());
}

// Without a tier below, all keys must find room.
void HostTier::check_room(std::span<const RowKey> keys) const {
  std::vector<int64_t> slots = residency_.find(keys);
  int64_t rows = residency_.resident() + std::count(slots.begin(), slots.end(), -1);
  if (rows <= residency_.capacity()) return;
  throw TierError("The host tier is full: " + std::to_string(rows) + " rows of " +
                      std::to_string(record_bytes_) + " bytes do not fit into " +
                      std::to_string(residency_.capacity()) +
                      ". Raise Storage(host=...), or give it an ssd path.",
                  {}, static_cast<uint64_t>(rows * record_bytes_));
}

void HostTier::write_part(std::span<const RowKey> keys, const uint8_t* records) {
  std::map<int32_t, std::vector<int64_t>> ids;
  std::map<int32_t, std::vector<size_t>> places;
  for (size_t i = 0; i < keys.size(); ++i) {
    ids[keys[i].table].push_back(keys[i].id);
    places[keys[i].table].push_back(i);
  }
  std::vector<TableIds> parts;
  for (auto& [table, list] : ids) {
    parts.push_back({table, list.data(), static_cast<int64_t>(list.size())});
  }
  Moves moves;
  int64_t batch = residency_.admit_now(parts, moves);
  if (!batch) throw std::logic_error("the host tier has no room for a part");
  std::vector<RowKey> dirty;
  Buffer<uint8_t> leaving(moves.evicted.size() * record_bytes_);
  for (size_t i = 0; i < moves.evicted.size(); ++i) {
    if (!moves.evicted_dirty[i]) continue;
    std::memcpy(leaving.data() + dirty.size() * record_bytes_, record(moves.evicted_slots[i]),
                record_bytes_);
    dirty.push_back(moves.evicted[i]);
  }
  std::vector<int64_t> slots(keys.size()), unwanted;
  residency_.slots(batch, slots.data());
  if (!dirty.empty()) {
    try {
      below_->write(dirty, leaving.data());
    } catch (...) {
      // What was to go comes back, in place of what was to come; the slots are the same.
      residency_.take_back(batch, unwanted);
      residency_.drop(moves.loaded_slots.data(), static_cast<int64_t>(moves.loaded_slots.size()));
      restore(dirty, leaving.data());
      throw;
    }
  }
  size_t at = 0;
  for (auto& [table, list] : places) {
    for (size_t i : list) {
      std::memcpy(record(slots[at++]), records + i * record_bytes_, record_bytes_);
    }
  }
  residency_.consume(batch);
  residency_.mark_dirty(batch);
  residency_.release(batch);
  rows_written_ += keys.size();
}

// Rows that were dropped a moment ago: there is room for them without evicting anything.
void HostTier::restore(std::span<const RowKey> keys, const uint8_t* records) {
  for (size_t i = 0; i < keys.size(); ++i) {
    TableIds part{keys[i].table, &keys[i].id, 1};
    Moves moves;
    int64_t batch = residency_.admit_now({&part, 1}, moves);
    int64_t slot;
    residency_.slots(batch, &slot);
    std::memcpy(record(slot), records + i * record_bytes_, record_bytes_);
    residency_.consume(batch);
    residency_.mark_dirty(batch);
    residency_.release(batch);
  }
}

void HostTier::erase(std::span<const RowKey> keys) {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> slots = residency_.find(keys);
  std::erase(slots, -1);
  residency_.drop(slots.data(), static_cast<int64_t>(slots.size()));
  if (below_) below_->erase(keys);
}

std::vector<int64_t> HostTier::ids_of(int32_t table) const {
  std::vector<int64_t> all;
  if (below_) {
    all.resize(static_cast<size_t>(below_->rows(table)));
    below_->ids(table, all.data());
  }
  residency_.for_each([&](int64_t, RowKey key, bool) {
    if (key.table == table) all.push_back(key.id);
  });
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

int64_t HostTier::rows(int32_t table) const {
  std::lock_guard lock(mutex_);
  constexpr int64_t kAtOnce = 4096;
  int64_t total = below_ ? below_->rows(table) : 0, slot = 0;
  std::vector<RowKey> keys(kAtOnce);
  bool below[kAtOnce] = {};
  while (int64_t n = residency_.list(slot, kAtOnce, [&](int64_t, RowKey key, bool, int64_t i) {
    if (key.table == table) keys[i] = key;
    return key.table == table;
  })) {
    if (below_) below_->holds(std::span(keys).first(n), below);
    total += std::count(below, below + n, false);
  }
  return total;
}

void HostTier::ids(int32_t table, int64_t* out) const {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> all = ids_of(table);
  std::copy(all.begin(), all.end(), out);
}

uint64_t HostTier::memory_bytes() const {
  std::lock_guard lock(mutex_);
  auto records = static_cast<uint64_t>(residency_.used() * record_bytes_);
  return records_.written_bytes(0, records) + residency_.resident_bytes() +
         (below_ ? below_->memory_bytes() : 0);
}

void HostTier::flush() {
  std::lock_guard lock(mutex_);
  if (below_) write_below([](int64_t) { return true; });
}

// Writes the rows of chosen slots that the tier below does not have.
template <class Chosen>
void HostTier::write_below(Chosen chosen) {
  std::vector<RowKey> keys;
  std::vector<int64_t> slots;
  residency_.for_each([&](int64_t slot, RowKey key, bool dirty) {
    if (!dirty || !chosen(slot)) return;
    keys.push_back(key);
    slots.push_back(slot);
  });
  auto at_once = static_cast<size_t>(rows_at_once(4096, record_bytes_));
  Buffer<uint8_t> records(at_once * record_bytes_);
  for (size_t begin = 0; begin < keys.size(); begin += at_once) {
    size_t n = std::min(at_once, keys.size() - begin);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(records.data() + i * record_bytes_, record(slots[begin + i]), record_bytes_);
    }
    below_->write(std::span(keys).subspan(begin, n), records.data());
    residency_.mark_clean(slots.data() + begin, static_cast<int64_t>(n));
  }
}

}  // namespace hotbed
