#include "table/record_stream.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace hotbed {

namespace {

// Copies of less than this are made by the calling thread: waking a team costs some microseconds.
constexpr int64_t kSerialBytes = 1 << 17;

}  // namespace

RecordParts::RecordParts(const RecordLayout& of, int64_t at_most)
    : layout(of),
      most(at_most),
      ids(at_most, true),
      weights(at_most * of.weight_bytes(), true),
      last(at_most, true) {
  for (size_t k = 0; k < of.state_widths.size(); ++k) {
    states.emplace_back(at_most * of.state_bytes(k), true);
  }
}

void RecordParts::add(int64_t id, const uint8_t* record) {
  auto take = [&](uint8_t* to, int64_t bytes) {
    std::memcpy(to + count * bytes, record, static_cast<size_t>(bytes));
    record += bytes;
  };
  ids.data()[count] = id;
  take(weights.data(), layout.weight_bytes());
  for (size_t k = 0; k < states.size(); ++k) take(states[k].data(), layout.state_bytes(k));
  if (layout.steps) std::memcpy(last.data() + count, record, sizeof(int64_t));
  ++count;
}

void RecordParts::add_from(const Table& table, const int64_t* slots, int64_t n) {
  bool serial = n * layout.bytes() < kSerialBytes;
#pragma omp parallel for schedule(static) if (!serial)
  for (int64_t i = 0; i < n; ++i) {
    int64_t slot = slots[i], at = count + i;
    auto take = [&](uint8_t* to, const Plane& plane) {
      std::memcpy(to + at * plane.row_bytes(), plane.row(slot), plane.row_bytes());
    };
    ids.data()[at] = table.ids() ? table.ids()[slot] : slot;
    take(weights.data(), table.weight_plane());
    for (size_t k = 0; k < states.size(); ++k) take(states[k].data(), table.states()[k].plane);
    if (layout.steps) last.data()[at] = table.last_step()[slot];
  }
  count += n;
}

std::vector<void*> RecordParts::states_at() const {
  std::vector<void*> at;
  for (const auto& state : states) at.push_back(const_cast<uint8_t*>(state.data()));
  return at;
}

RecordsByTable::RecordsByTable(const RecordLayout& layout, std::shared_ptr<const void> owner,
                               std::unique_ptr<RecordScan> scan, int64_t most)
    : layout_(layout),
      owner_(std::move(owner)),
      most_(std::max<int64_t>(2, most)),
      keys_(static_cast<size_t>(most_ / 2)),
      records_(most_ / 2 * layout.bytes()),
      scan_(std::move(scan)) {}

RecordParts* RecordsByTable::next(int32_t& table) {
  auto give = [&](std::pair<const int32_t, RecordParts>& part) {
    table = part.first;
    return given_ = &part.second;
  };
  if (given_) std::exchange(given_, nullptr)->count = 0;
  int64_t at_once = most_ / 2, bytes = layout_.bytes();
  while (scan_) {
    for (auto& part : parts_) {  // whether the next ones might find no room
      if (part.second.count > most_ - at_once) return give(part);
    }
    int64_t n = scan_->next(at_once, keys_.data(), records_.data());
    if (!n) scan_.reset();
    for (int64_t i = 0; i < n; ++i) {
      const RowKey& key = keys_[static_cast<size_t>(i)];
      auto part = parts_.try_emplace(key.table, layout_, most_).first;
      part->second.add(key.id, records_.data() + i * bytes);
    }
  }
  for (auto& part : parts_) {
    if (part.second.count) return give(part);
  }
  return nullptr;
}

namespace {

void refuse_forgotten(const Table& table, uint64_t mark) {
  if (table.knows_changes(mark)) return;
  throw TierError("It is not known any more what has changed in the table " + table.name() +
                  ", as others have saved or written meanwhile. Save again.");
}

}  // namespace

RecordStream::RecordStream(std::vector<std::shared_ptr<Table>> tables, int64_t most, bool current,
                           std::vector<uint64_t> since)
    : tables_(std::move(tables)),
      most_(std::max<int64_t>(2, most)),
      current_(current),
      since_(std::move(since)) {
  for (size_t t = 0; t < since_.size(); ++t) {
    if (!since_[t]) continue;
    if (const RowChanges* changes = tables_[t]->changes()) {
      changes->begin_reading();
      reading_.push_back(tables_[t].get());
    }
    try {
      refuse_forgotten(*tables_[t], since_[t]);
    } catch (...) {
      end_reading();
      throw;
    }
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    uint64_t mark = t < since_.size() ? since_[t] : 0;
    if (tables_[t]->space()) spaces_[{tables_[t]->space().get(), mark}].push_back(t);
  }
}

void RecordStream::end_reading() {
  for (const Table* table : reading_) {
    if (const RowChanges* changes = table->changes()) changes->end_reading();
  }
  reading_.clear();
}

void RecordStream::close() {
  end_reading();
  stream_.reset();
  spaces_.clear();
  parts_.reset();
  at_ = tables_.size();
}

RecordParts* RecordStream::next_of_space(size_t& table) {
  while (stream_ || !spaces_.empty()) {
    if (!stream_) {
      auto next = spaces_.extract(spaces_.begin());
      in_space_ = std::move(next.mapped());
      std::vector<int32_t> numbers;
      for (size_t t : in_space_) numbers.push_back(tables_[t]->number());
      std::shared_ptr<RowSpace> space = tables_[in_space_[0]]->space();
      stream_ = std::make_unique<RecordsByTable>(space->layout(), space,
                                                 space->scan(numbers, next.key().second), most_);
    }
    int32_t number;
    if (RecordParts* rows = stream_->next(number)) {
      table = *std::find_if(in_space_.begin(), in_space_.end(),
                            [&](size_t t) { return tables_[t]->number() == number; });
      return rows;
    }
    stream_.reset();
  }
  return nullptr;
}

RecordParts* RecordStream::next_in_memory(size_t at) {
  const Table& table = *tables_[at];
  if (at < since_.size() && since_[at]) return next_changed(table, since_[at]);
  int64_t n = std::min(parts_->most, (table.released() ? 0 : table.size()) - slot_);
  if (n <= 0) return nullptr;
  if (table.ids()) {
    std::copy_n(table.ids() + slot_, n, parts_->ids.data());
  } else {
    std::iota(parts_->ids.data(), parts_->ids.data() + n, slot_);
  }
  auto copy = [&](uint8_t* to, const Plane& plane) {
    std::memcpy(to, plane.row(slot_), static_cast<size_t>(n * plane.row_bytes()));
  };
  copy(parts_->weights.data(), table.weight_plane());
  for (size_t k = 0; k < table.states().size(); ++k) {
    copy(parts_->states[k].data(), table.states()[k].plane);
  }
  if (table.last_step()) std::copy_n(table.last_step() + slot_, n, parts_->last.data());
  slot_ += n;
  parts_->count = n;
  return parts_.get();
}

// Those of a table in memory that have changed since.
RecordParts* RecordStream::next_changed(const Table& table, uint64_t mark) {
  const RowChanges& changes = *table.changes();
  std::vector<int64_t> slots;
  for (; slot_ < table.size() && static_cast<int64_t>(slots.size()) < parts_->most; ++slot_) {
    if (changes.changed(slot_, mark)) slots.push_back(slot_);
  }
  parts_->count = 0;
  parts_->add_from(table, slots.data(), static_cast<int64_t>(slots.size()));
  refuse_forgotten(table, mark);  // while they were copied
  return parts_->count ? parts_.get() : nullptr;
}

// Of a static table in tiers, behind those that are stored: the others, where steps have moved
// them.
RecordParts* RecordStream::next_untouched(size_t at) {
  const Table& table = *tables_[at];
  if (!current_ || !table.space() || table.dynamic() || !table.catch_up ||
      !table.catch_up->moves_untouched()) {
    return nullptr;
  }
  std::unique_ptr<bool[]> stored(new bool[static_cast<size_t>(parts_->most)]);
  int64_t* ids = parts_->ids.data();
  int64_t n = 0;
  while (!n && slot_ < table.size()) {
    int64_t count = std::min(parts_->most, table.size() - slot_);
    std::iota(ids, ids + count, slot_);
    table.space()->stores(table.number(), ids, count, stored.get());
    for (int64_t i = 0; i < count; ++i) {
      if (!stored[static_cast<size_t>(i)]) ids[n++] = slot_ + i;
    }
    slot_ += count;
  }
  if (!n) return nullptr;
  table.copy_rows(ids, n, parts_->weights.data(), parts_->states_at().data(), parts_->last.data());
  parts_->count = n;
  return parts_.get();
}

void RecordStream::make_current(const Table& table, RecordParts& rows) const {
  if (!current_ || !table.catch_up) return;
  table.catch_up->advance(table, rows.ids.data(), rows.count, rows.weights.data(),
                          rows.states_at().data(), rows.last.data());
}

const RecordParts* RecordStream::next(size_t& at) {
  RecordParts* rows = next_of_space(at);
  while (!rows && at_ < tables_.size()) {
    const Table& table = *tables_[at_];
    if (!parts_) parts_ = std::make_unique<RecordParts>(layout_of(table), most_);
    rows = table.tiered() ? next_untouched(at_) : next_in_memory(at_);
    at = at_;
    if (rows) break;
    ++at_;
    slot_ = 0;
    parts_.reset();
  }
  if (rows) make_current(*tables_[at], *rows);
  return rows;
}

}  // namespace hotbed
