#include "table/table.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "base/forks.hpp"
#include "base/integers.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

namespace {

template <class T>
void fill(void* data, int64_t first, int64_t count, T value) {
  T* begin = static_cast<T*>(data) + first;
#pragma omp parallel for schedule(static) if (count > (1 << 20))
  for (int64_t i = 0; i < count; ++i) begin[i] = value;
}

const char* const kSmallerRows = "Use a smaller dtype, such as torch.bfloat16, or a smaller dim.";
const char* const kFewerRows =
    "Use a smaller dtype, such as torch.bfloat16, a smaller dim or fewer rows; with rows=None only "
    "ids that were met take memory; with Storage(ssd=...) they need not all be in memory.";
const char* const kSmallerStates =
    "Use a rule with smaller states, such as RowwiseAdagrad (one number a row) or SGD (none).";
const char* const kNoLastSteps = "Use untouched=\"lazy\", which keeps no last steps.";
// Rows that went leave their pages if they are more than such a part of all.
constexpr int64_t kSpareShare = 8;

// Fresh pages are zeros, but the first step would wait for all of them: the ids of a batch lie
// everywhere. What is larger may be meant to be used in part.
constexpr uint64_t kTouchedAtOnce = 16u << 20;

}  // namespace

Table::Table(std::string name, int64_t rows, int64_t dim, DType dtype, const InitialSpec& initial,
             bool tiered, bool released, std::shared_ptr<MemoryBudget> budget)
    : name_(std::move(name)),
      dynamic_(rows < 0),
      dim_(dim),
      dtype_(dtype),
      initial_(initial),
      weights_(what_for("weights"), dim, size_of(dtype), dynamic_ ? kSmallerRows : kFewerRows),
      ids_(what_for("ids"), 1, sizeof(int64_t), kSmallerRows),
      in_budget_(budget != nullptr),
      share_(std::move(budget)),
      tiered_(tiered),
      released_(released) {
  if (tiered_) {
    size_ = std::max<int64_t>(rows, 0);
    return;
  }
  if (dynamic_) {
    index_ = std::make_unique<KeyIndex>(what_for("index"));
    return;
  }
  size_ = rows;
  if (released_) return;
  take(rows, 0);
  weights_.ensure(rows);
  write_first_values();
}

Table::~Table() { BlockPool::instance().trim(); }

std::string Table::what_for(const std::string& part) const {
  return "Table '" + name_ + "', " + part;
}

void Table::rename(const std::string& name) {
  name_ = name;
  weights_.rename(what_for("weights"));
  ids_.rename(what_for("ids"));
  for (State& state : states_) state.plane.rename(what_for(state.name));
  if (steps_) steps_->rename(what_for("last steps"));
  if (changes_) changes_->plane().rename(what_for("changes"));
  if (index_) index_->rename(what_for("index"));
}

int64_t Table::size() const {
  if (!tiered_ || !dynamic_) return size_;
  return space_ ? space_->rows(number_) : 0;
}

int64_t Table::slot_limit() const {
  if (!tiered_) return size_;
  return allocated_ ? space_->capacity() : 0;
}

std::vector<int64_t> Table::stored_ids() const {
  if (tiered_) return space_ ? space_->stored_ids(number_) : std::vector<int64_t>{};
  std::vector<int64_t> ids(size_);
  if (dynamic_) {
    std::copy_n(this->ids(), size_, ids.begin());
    std::sort(ids.begin(), ids.end());
  } else {
    std::iota(ids.begin(), ids.end(), 0);
  }
  return ids;
}

void Table::copy_rows(const int64_t* ids, int64_t n, void* weights, void* const* states,
                      int64_t* last) const {
  auto copy_initial = [&](int64_t i) {
    auto* row = static_cast<uint8_t*>(weights) + i * weights_.row_bytes();
    if (weights) first_values(ids + i, 1, row);
    for (size_t k = 0; states && k < states_.size(); ++k) {
      int64_t width = states_[k].plane.width();
      if (dtype_ == DType::f64) {
        std::fill_n(static_cast<double*>(states[k]) + i * width, width, states_[k].initial);
      } else {
        std::fill_n(static_cast<float*>(states[k]) + i * width, width,
                    static_cast<float>(states_[k].initial));
      }
    }
    if (last) last[i] = first_step_;
  };
  if (tiered_) {
    std::unique_ptr<bool[]> found(new bool[std::max<int64_t>(n, 1)]());
    if (space_) space_->read(number_, ids, n, weights, states, last, found.get());
    for (int64_t i = 0; i < n; ++i) {
      if (!found[i]) copy_initial(i);
    }
    return;
  }
  std::vector<int64_t> slots(n);
  find(ids, n, slots.data());
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || released_) {
      copy_initial(i);
      continue;
    }
    if (weights) {
      std::memcpy(static_cast<uint8_t*>(weights) + i * weights_.row_bytes(), weights_.row(slots[i]),
                  weights_.row_bytes());
    }
    for (size_t k = 0; states && k < states_.size(); ++k) {
      const Plane& plane = states_[k].plane;
      std::memcpy(static_cast<uint8_t*>(states[k]) + i * plane.row_bytes(), plane.row(slots[i]),
                  plane.row_bytes());
    }
    if (last && steps_) last[i] = last_step()[slots[i]];
  }
}

void Table::write_first_values() {
  if (released_) return;
  forget_changes();
  lose_snapshot();
  uses.clear();
  if (tiered_) {
    padding_row_.clear();
    if (!space_) return;
    bool later = catch_up && catch_up->steps() > 0;
    if (states_.empty() && !later) return space_->erase_all(number_);
    // A row that is nowhere is its first values, unless it has to count as of a later step.
    std::vector<int64_t> ids;
    if (!later) ids = space_->stored_ids(number_, true);
    int64_t count = later ? size_ : static_cast<int64_t>(ids.size());
    int64_t chunk = rows_at_once(65536, weights_.row_bytes());
    std::vector<int64_t> some;
    Buffer<uint8_t> rows(chunk * weights_.row_bytes());
    for (int64_t begin = 0; begin < count; begin += chunk) {
      some.resize(std::min(chunk, count - begin));
      if (later) {
        std::iota(some.begin(), some.end(), begin);
      } else {
        std::copy_n(ids.begin() + begin, some.size(), some.begin());
      }
      auto n = static_cast<int64_t>(some.size());
      first_values(some.data(), n, rows.data());
      write(some.data(), n, rows.data(), nullptr, nullptr);
    }
    return;
  }
  if (catch_up) {
    // So that what is written counts as of the last step.
    std::vector<int64_t> slots(size_);
    std::iota(slots.begin(), slots.end(), 0);
    catch_up->write(*this, slots.data(), size_);
  }
  initial_rows(initial_, nullptr, 0, size_, dim_, dtype_, weights_.data());
}

template <class Self, class F>
void Table::for_planes(Self& self, F f) {
  f(self.weights_);
  for (auto& state : self.states_) f(state.plane);
  if (self.dynamic_) f(self.ids_);
  if (self.steps_) f(*self.steps_);
  if (self.changes_) f(self.changes_->plane());
}

void Table::ensure(int64_t rows) {
  if (!has_rows()) return;
  std::unique_lock<std::mutex> lock;
  if (keeper_) lock = keeper_->pause();
  for_planes(*this, [rows](Plane& plane) { plane.ensure(rows); });
}

uint64_t Table::state_bytes(int64_t rows) const {
  rows = std::max(rows, written_);
  uint64_t bytes = steps_ ? steps_->page_bytes(rows) : 0;
  if (changes_) bytes = sum(bytes, changes_->plane().page_bytes(rows));
  for (const State& state : states_) bytes = sum(bytes, state.plane.page_bytes(rows));
  return bytes;
}

uint64_t Table::bytes_with(int64_t rows, uint64_t state_bytes) const {
  if (!has_rows()) return 0;
  int64_t in_pages = std::max(rows, written_);
  uint64_t bytes = sum(state_bytes, weights_.page_bytes(in_pages));
  if (!dynamic_) return bytes;
  uint64_t index = std::max(index_->memory_bytes(), KeyIndex::bytes_for(rows));
  return sum(sum(bytes, ids_.page_bytes(in_pages)), index);
}

// Out of the budget, before rows or states come.
void Table::take(int64_t rows, uint64_t state_bytes) {
  share_.become(bytes_with(rows, state_bytes), name_, rows);
}

// Gives back what rows or states that went, or did not come, would take. Pages of a few rows stay
// for rows to come.
void Table::settle_share() {
  if (has_rows() && written_ - size_ > written_ / kSpareShare) {
    for_planes(*this, [this](Plane& plane) { plane.release_pages(size_); });
    written_ = size_;
  }
  share_.shrink(bytes_with(size_, state_bytes(size_)));
}

void Table::reserve(int64_t rows) {
  WholeInForks whole;
  BudgetShare::Growth growth{&share_, name_, rows, bytes_with(rows, state_bytes(rows))};
  BudgetShare::check({&growth, 1});
  ensure(rows);
}

BudgetShare::Growth Table::growth_with_states(std::span<const int64_t> row_bytes) {
  uint64_t states = 0;
  for (int64_t bytes : row_bytes) {
    states = sum(states, Plane({}, bytes, 1).page_bytes(size_));
  }
  if (changes_) states = sum(states, changes_->plane().page_bytes(size_));
  return {&share_, name_, size_, bytes_with(size_, states)};
}

BudgetShare::Growth Table::growth_with_rows(int64_t more) {
  int64_t rows = size_ + more;
  return {&share_, name_, rows, bytes_with(rows, state_bytes(rows))};
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
  WholeInForks whole;
  forget_changes();
  lose_snapshot();
  State state{name, initial, Plane(what_for(name), width, compute_size(), kSmallerStates)};
  allocated_ = false;
  if (has_rows()) {
    take(size_, sum(state_bytes(size_), state.plane.page_bytes(size_)));
    state.plane.ensure(size_);
    if (initial != 0.0 || state.plane.bytes(size_) <= kTouchedAtOnce) fill_state(state, 0, size_);
  }
  states_.push_back(std::move(state));
}

void Table::clear_states() {
  WholeInForks whole;
  forget_changes();
  lose_snapshot();
  allocated_ = allocated_ && states_.empty() && !steps_;
  states_.clear();
  steps_.reset();
  catch_up.reset();
  settle_share();
}

void Table::track_steps(int64_t step) {
  WholeInForks whole;
  forget_changes();
  lose_snapshot();
  auto plane = std::make_unique<Plane>(what_for("last steps"), 1, sizeof(int64_t), kNoLastSteps);
  if (tiered_ && steps_) {
    // The plane stays; every row starts again at `step`.
    std::vector<int64_t> ids = stored_ids(), last(ids.size(), step);
    first_step_ = step;
    return write(ids.data(), static_cast<int64_t>(ids.size()), nullptr, nullptr, last.data());
  }
  allocated_ = false;
  if (has_rows()) {
    if (!steps_) take(size_, sum(state_bytes(size_), plane->page_bytes(size_)));
    plane->ensure(size_);
  }
  steps_ = std::move(plane);
  first_step_ = step;
  if (!has_rows()) return;
  if (step || steps_->bytes(size_) <= kTouchedAtOnce) {
    fill<int64_t>(steps_->data(), 0, size_, step);
  }
}

void Table::find(const int64_t* ids, int64_t n, int64_t* slots) const {
  if (tiered_) {
    std::fill_n(slots, n, -1);  // no slot is for long
    return;
  }
  if (dynamic_) {
    index_->find(ids, n, slots);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    slots[i] = static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(size_) ? ids[i] : -1;
  }
}

int64_t Table::find_or_insert(const int64_t* ids, int64_t n, int64_t* slots, bool weights,
                              bool states) {
  if (!dynamic_) {
    find(ids, n, slots);
    return 0;
  }
  index_->find(ids, n, slots);
  int64_t absent = 0;
  for (int64_t i = 0; i < n; ++i) absent += slots[i] < 0;
  if (!absent) return 0;
  WholeInForks whole;
  take(size_ + absent, state_bytes(size_ + absent));
  Buffer<int64_t> positions;
  int64_t added;
  try {
    ensure(size_ + absent);
    positions.resize(n);
    added = index_->find_or_insert(ids, n, slots, size_, positions.data());
  } catch (...) {
    settle_share();
    throw;
  }
  for_planes(*this, [&](const Plane& plane) { plane.populate(size_, added); });
  auto* id_plane = reinterpret_cast<int64_t*>(ids_.data());
  for (int64_t i = 0; i < added; ++i) id_plane[size_ + i] = ids[positions[i]];
  if (weights) {
    initial_rows(initial_, id_plane + size_, 0, added, dim_, dtype_, weights_.row(size_));
  }
  for (State& state : states_) {
    if (states) fill_state(state, size_, added);
  }
  if (steps_) fill<int64_t>(steps_->data(), size_, added, first_step_);
  if (changes_) changes_->touch_range(size_, added);
  size_ += added;
  written_ = std::max(written_, size_);
  if (added < absent) settle_share();  // ids that came twice
  return added;
}

void Table::write(const int64_t* ids, int64_t n, const void* weights, const void* const* states,
                  const int64_t* last) {
  if (released_ || !n) return;
  if (tiered_) return write_tiered(ids, n, static_cast<const uint8_t*>(weights), states, last);
  WholeInForks whole;
  Buffer<int64_t> slots(n);
  // What is written anyway is not drawn first, unless it would be read before.
  bool read = catch_up && !last;
  find_or_insert(ids, n, slots.data(), read || !weights, read || !states);
  keep(slots.data(), n);
  touch(slots.data(), n);
  if (catch_up && !last) {
    // So that what is written counts as of the last step.
    std::vector<int64_t> unique(slots.data(), slots.data() + n);
    std::sort(unique.begin(), unique.end());
    unique.erase(std::unique(unique.begin(), unique.end()), unique.end());
    catch_up->write(*this, unique.data(), static_cast<int64_t>(unique.size()));
  }
  // Rows of neighbouring slots go together; of duplicates the last one wins.
  auto copy = [&](const Plane& plane, const void* rows) {
    int64_t bytes = plane.row_bytes();
    for (int64_t i = 0, end; i < n; i = end) {
      end = i + 1;
      if (slots[i] < 0) continue;
      while (end < n && slots[end] == slots[i] + (end - i)) ++end;
      const auto* from = static_cast<const uint8_t*>(rows) + i * bytes;
      std::memcpy(plane.row(slots[i]), from, static_cast<size_t>((end - i) * bytes));
    }
  };
  if (weights) copy(weights_, weights);
  for (size_t k = 0; states && k < states_.size(); ++k) copy(states_[k].plane, states[k]);
  if (last && steps_) copy(*steps_, last);
}

void Table::contains(const int64_t* ids, int64_t n, bool* found) const {
  if (dynamic_ && tiered_) {
    std::fill_n(found, n, false);
    if (space_) space_->stores(number_, ids, n, found);
    return;
  }
  if (dynamic_) {
    Buffer<int64_t> slots(n);
    find(ids, n, slots.data());
    std::transform(slots.data(), slots.data() + n, found, [](auto slot) { return slot >= 0; });
  } else {
    auto rows = static_cast<uint64_t>(size_);
    std::transform(ids, ids + n, found,
                   [rows](auto id) { return static_cast<uint64_t>(id) < rows; });
  }
}

int64_t Table::erase(const int64_t* ids, int64_t n) {
  if (!n) return 0;
  uses.forget(ids, n);
  if (tiered_) {
    if (initial_.has_padding && std::find(ids, ids + n, initial_.padding_id) != ids + n) {
      padding_row_.clear();
    }
    int64_t gone = space_ ? space_->erase(number_, ids, n) : 0;
    for (int64_t i = 0; changes_ && i < n; ++i) changes_->note_erased(ids[i]);
    forget_erased();
    return dynamic_ ? gone : n;
  }
  if (!dynamic_) {
    if (!released_) {
      keep(ids, n);
      touch(ids, n);
    }
    for (int64_t i = 0; i < n && !released_; ++i) {
      first_values(ids + i, 1, weights_.row(ids[i]));
      for (State& state : states_) fill_state(state, ids[i], 1);
      if (steps_) last_step()[ids[i]] = first_step_;
    }
    return n;
  }
  WholeInForks whole;
  // The newest rows take the places of those that go, so that rows lie without gaps.
  Buffer<int64_t> slots(n);
  int64_t gone = index_->erase(ids, n, slots.data());
  keep(slots.data(), n);
  std::vector<int64_t> free;
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    free.push_back(slots[i]);
    if (changes_) changes_->note_erased(ids[i]);
  }
  std::sort(free.begin(), free.end());
  int64_t end = size_ - gone, from = size_;
  auto last = free.rbegin();
  std::vector<int64_t> moved, places;
  for (int64_t to : free) {
    if (to >= end) break;
    do {
      --from;
    } while (last != free.rend() && *last == from && (++last, true));
    move_row(from, to);
    moved.push_back(this->ids()[to]);
    places.push_back(to);
  }
  index_->update(moved.data(), static_cast<int64_t>(moved.size()), places.data());
  size_ = end;
  forget_erased();
  settle_share();
  return gone;
}

void Table::move_row(int64_t from, int64_t to) {
  keep(&from, 1);
  for_planes(*this, [=](const Plane& plane) {
    std::memcpy(plane.row(to), plane.row(from), plane.row_bytes());
  });
}

void Table::copy_padding(void* row) const {
  if (padding_row_.empty()) {
    std::memset(row, 0, weights_.row_bytes());
  } else {
    std::memcpy(row, padding_row_.data(), padding_row_.size());
  }
}

int64_t Table::padding_slot() const {
  // Padding is never brought up.
  if (!initial_.has_padding || tiered_) return INT64_MIN;
  int64_t slot = initial_.padding_id;
  if (dynamic_) index_->find(&initial_.padding_id, 1, &slot);
  return slot < 0 ? INT64_MIN : slot;
}

void Table::forget_last(int64_t count) {
  WholeInForks whole;
  if (count == 0) return;
  Buffer<int64_t> slots(count);
  size_ -= count;
  index_->erase(ids() + size_, count, slots.data());
  settle_share();
}

void Table::clear() {
  if (!dynamic_) return;
  uses.clear();
  if (tiered_) {
    forget_changes();
    padding_row_.clear();
    if (space_) space_->erase_all(number_);
    return;
  }
  WholeInForks whole;
  forget_changes();
  lose_snapshot();
  index_->clear();
  size_ = 0;
  settle_share();
}

void Table::first_values(const int64_t* ids, int64_t n, void* rows) const {
  initial_rows(initial_, ids, 0, n, dim_, dtype_, rows);
}

void Table::release_rows() {
  WholeInForks whole;
  lose_snapshot();
  released_ = true;
  changes_.reset();
  weights_.release();
  for (State& state : states_) state.plane.release();
  settle_share();
}

void Table::take_rows_back() {
  WholeInForks whole;
  released_ = false;
  try {
    take(size_, state_bytes(size_));
    ensure(size_);
  } catch (...) {
    release_rows();
    throw;
  }
}

uint64_t Table::resident_bytes() const {
  uint64_t total = index_bytes();
  if (changes_) total += changes_->memory_bytes();
  if (!has_rows()) return total;  // the storage knows, or the device
  for_planes(*this, [&](const Plane& plane) { total += plane.resident_bytes(); });
  return total + uses_bytes();
}

uint64_t Table::plane_bytes() const {
  if (!has_rows()) return 0;
  uint64_t total = 0;
  for_planes(*this, [&](const Plane& plane) { total += plane.bytes(size_); });
  return total;
}

RecordLayout layout_of(const Table& table) {
  RecordLayout layout{table.dtype(), table.dim(), {}, table.tracks_steps()};
  for (const State& state : table.states()) layout.state_widths.push_back(state.plane.width());
  return layout;
}

}  // namespace hotbed
