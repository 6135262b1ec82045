#include "record_stream.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace hotbed {

RecordParts::RecordParts(const RecordLayout& of, int64_t at_once)
    : layout(of),
      most(at_once),
      ids(at_once),
      weights(at_once * of.weight_bytes()),
      last(at_once),
      records_(at_once * of.bytes()) {
  for (size_t k = 0; k < of.state_widths.size(); ++k) {
    states.emplace_back(at_once * of.state_bytes(k));
    states_at.push_back(states.back().data());
  }
}

int64_t RecordParts::take_next(RecordScan& scan) {
  int64_t n = scan.next(most, ids.data(), records_.data());
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* from = records_.data() + i * layout.bytes();
    auto take = [&](uint8_t* to, int64_t bytes) {
      std::memcpy(to + i * bytes, from, bytes);
      from += bytes;
    };
    take(weights.data(), layout.weight_bytes());
    for (size_t k = 0; k < states.size(); ++k) take(states[k].data(), layout.state_bytes(k));
    if (layout.steps) std::memcpy(last.data() + i, from, sizeof(int64_t));
  }
  return n;
}

RecordStream::RecordStream(std::shared_ptr<Table> table, int64_t most, bool current)
    : table_(std::move(table)), most_(std::max<int64_t>(1, most)), current_(current) {
  if (!table_->tiered()) return;
  space_ = table_->space();
  if (!space_) return;
  parts_ = std::make_unique<RecordParts>(space_->layout(), most_);
  scan_ = space_->scan(table_->number());
}

int64_t RecordStream::next_as_stored(int64_t* ids, void* weights, void* const* states,
                                     int64_t* last) {
  auto copy = [](void* to, const void* from, int64_t bytes) {
    if (to) std::memcpy(to, from, static_cast<size_t>(bytes));
  };
  if (table_->tiered()) {
    int64_t n = scan_ ? parts_->take_next(*scan_) : 0;
    copy(ids, parts_ ? parts_->ids.data() : nullptr, n * 8);
    if (!n) return 0;
    copy(weights, parts_->weights.data(), n * parts_->layout.weight_bytes());
    for (size_t k = 0; states && k < parts_->states.size(); ++k) {
      copy(states[k], parts_->states[k].data(), n * parts_->layout.state_bytes(k));
    }
    if (parts_->layout.steps) copy(last, parts_->last.data(), n * 8);
    return n;
  }
  int64_t n = std::min(most_, (table_->released() ? 0 : table_->size()) - slot_);
  if (n <= 0) return 0;
  if (table_->ids()) {
    copy(ids, table_->ids() + slot_, n * 8);
  } else {
    std::iota(ids, ids + n, slot_);
  }
  auto copy_rows = [&](void* to, const Plane& plane) {
    copy(to, plane.row(slot_), n * plane.row_bytes());
  };
  copy_rows(weights, table_->weight_plane());
  for (size_t k = 0; states && k < table_->states().size(); ++k) {
    copy_rows(states[k], table_->states()[k].plane);
  }
  if (table_->last_step()) copy(last, table_->last_step() + slot_, n * 8);
  slot_ += n;
  return n;
}

int64_t RecordStream::next(int64_t* ids, void* weights, void* const* states, int64_t* last) {
  if (closed_) return 0;
  if (!current_ || !table_->catch_up) return next_as_stored(ids, weights, states, last);
  std::vector<Buffer<uint8_t>> own;
  std::vector<void*> at;
  for (size_t k = 0; k < table_->states().size(); ++k) {
    if (!states) own.emplace_back(most_ * table_->states()[k].plane.row_bytes());
    at.push_back(states ? states[k] : own.back().data());
  }
  Buffer<int64_t> steps(most_);
  int64_t* since = last ? last : steps.data();
  int64_t n = next_as_stored(ids, weights, at.data(), since);
  if (n) table_->catch_up->advance(*table_, ids, n, weights, at.data(), since);
  return n;
}

}  // namespace hotbed
