#include "table.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace hotbed {

namespace {

template <class T>
void fill(void* data, int64_t first, int64_t count, T value) {
  T* begin = static_cast<T*>(data) + first;
#pragma omp parallel for schedule(static) if (count > (1 << 20))
  for (int64_t i = 0; i < count; ++i) begin[i] = value;
}

}  // namespace

void Plane::ensure(int64_t rows) {
  uint64_t needed = bytes(rows);
  if (needed <= mapping_.bytes()) return;
  uint64_t generous = std::max<uint64_t>(needed, mapping_.bytes() + mapping_.bytes() / 2);
  try {
    mapping_.reserve(generous, what_for_);
  } catch (const OutOfMemory&) {
    if (generous == needed) throw;
    mapping_.reserve(needed, what_for_);
  }
}

Table::Table(std::string name, int64_t rows, int64_t dim, DType dtype, const InitialSpec& initial)
    : name_(std::move(name)),
      dynamic_(rows < 0),
      dim_(dim),
      dtype_(dtype),
      initial_(initial),
      weights_("Table '" + name_ + "', weights", dim, size_of(dtype)),
      ids_("Table '" + name_ + "', ids", 1, sizeof(int64_t)) {
  if (dynamic_) {
    index_ = std::make_unique<KeyIndex>();
    return;
  }
  weights_.ensure(rows);
  size_ = rows;
  write_first_values();
}

void Table::write_first_values() {
  if (catch_up) {
    // So that what is written counts as of the last step.
    std::vector<int64_t> slots(size_);
    std::iota(slots.begin(), slots.end(), 0);
    catch_up->write(*this, slots.data(), size_);
  }
  initial_rows(initial_, nullptr, 0, size_, dim_, dtype_, weights_.data());
}

void Table::ensure(int64_t rows) {
  weights_.ensure(rows);
  for (State& state : states_) state.plane.ensure(rows);
  if (dynamic_) ids_.ensure(rows);
  if (steps_) steps_->ensure(rows);
}

void Table::fill_state(State& state, int64_t first, int64_t count) {
  int64_t width = state.plane.width();
  if (dtype_ == DType::f64) {
    fill<double>(state.plane.data(), first * width, count * width, state.initial);
  } else {
    fill<float>(state.plane.data(), first * width, count * width,
                static_cast<float>(state.initial));
  }
}

void Table::add_state(const std::string& name, int64_t width, double initial) {
  State state{name, initial, Plane("Table '" + name_ + "', " + name, width, compute_size())};
  state.plane.ensure(size_);
  if (initial != 0.0) fill_state(state, 0, size_);  // fresh pages are zeros
  states_.push_back(std::move(state));
}

void Table::clear_states() {
  states_.clear();
  steps_.reset();
  catch_up.reset();
}

void Table::track_steps(int64_t step) {
  auto plane = std::make_unique<Plane>("Table '" + name_ + "', last steps", 1, sizeof(int64_t));
  plane->ensure(size_);
  steps_ = std::move(plane);
  first_step_ = step;
  if (step) fill<int64_t>(steps_->data(), 0, size_, step);
}

void Table::find(const int64_t* ids, int64_t n, int64_t* slots) const {
  if (dynamic_) {
    index_->find(ids, n, slots);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    slots[i] = static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(size_) ? ids[i] : -1;
  }
}

int64_t Table::find_or_insert(const int64_t* ids, int64_t n, int64_t* slots) {
  if (!dynamic_) {
    find(ids, n, slots);
    return 0;
  }
  index_->find(ids, n, slots);
  int64_t absent = 0;
  for (int64_t i = 0; i < n; ++i) absent += slots[i] < 0;
  if (!absent) return 0;
  ensure(size_ + absent);
  Buffer<int64_t> positions(n);
  int64_t added = index_->find_or_insert(ids, n, slots, size_, positions.data());
  auto* id_plane = reinterpret_cast<int64_t*>(ids_.data());
  for (int64_t i = 0; i < added; ++i) id_plane[size_ + i] = ids[positions[i]];
  initial_rows(initial_, id_plane + size_, 0, added, dim_, dtype_, weights_.row(size_));
  for (State& state : states_) fill_state(state, size_, added);
  if (steps_) fill<int64_t>(steps_->data(), size_, added, first_step_);
  size_ += added;
  return added;
}

void Table::assign(const int64_t* ids, int64_t n, const void* rows) {
  std::vector<int64_t> slots(n);
  find_or_insert(ids, n, slots.data());
  if (catch_up) {
    // So that what is written counts as of the last step.
    std::vector<int64_t> unique = slots;
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    catch_up->write(*this, unique.data(), static_cast<int64_t>(unique.size()));
  }
  int64_t bytes = weights_.row_bytes();
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(weights_.row(slots[i]), static_cast<const uint8_t*>(rows) + i * bytes, bytes);
  }
}

int64_t Table::padding_slot() const {
  if (!initial_.has_padding) return INT64_MIN;
  int64_t slot = initial_.padding_id;
  if (dynamic_) index_->find(&initial_.padding_id, 1, &slot);
  return slot < 0 ? INT64_MIN : slot;
}

void Table::forget_last(int64_t count) {
  if (count == 0) return;
  Buffer<int64_t> slots(count);
  size_ -= count;
  index_->erase(ids() + size_, count, slots.data());
}

void Table::clear() {
  if (!dynamic_) return;
  index_->clear();
  size_ = 0;
}

void Table::first_values(const int64_t* ids, int64_t n, void* rows) const {
  initial_rows(initial_, ids, 0, n, dim_, dtype_, rows);
}

void Table::read(int64_t id, int64_t slot, void* row) const {
  if (catch_up) {
    catch_up->read(*this, &id, &slot, 1, row);
  } else if (slot >= 0) {
    std::memcpy(row, weights_.row(slot), weights_.row_bytes());
  } else {
    first_values(&id, 1, row);
  }
}

uint64_t Table::plane_bytes() const {
  uint64_t total = weights_.bytes(size_);
  for (const State& state : states_) total += state.plane.bytes(size_);
  if (dynamic_) total += ids_.bytes(size_);
  if (steps_) total += steps_->bytes(size_);
  return total;
}

}  // namespace hotbed
