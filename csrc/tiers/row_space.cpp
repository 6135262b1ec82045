#include "tiers/row_space.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "base/forks.hpp"
#include "base/prefetch.hpp"

namespace hotbed {

namespace {

// Rows that are fetched ahead when planes are walked by slot.
constexpr int64_t kAhead = 8;

using Clock = std::chrono::steady_clock;

// Of look-ahead with somebody who reads all rows of a table.
constexpr std::chrono::milliseconds kPatience(50);

int64_t ns_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

OverBudget::OverBudget(std::vector<Need> of_spaces)
    : std::runtime_error("a batch needs room for " + std::to_string(of_spaces[0].slots) +
                         " rows at once and the budget holds " +
                         std::to_string(of_spaces[0].space->limit())),
      needs(std::move(of_spaces)) {}

RowSpace::RowSpace(const RecordLayout& layout, std::vector<const SpaceTable*> tables,
                   int64_t capacity, std::shared_ptr<Tier> below, std::shared_ptr<RowPlanes> planes)
    : layout_(layout),
      record_bytes_(layout.bytes()),
      tables_(std::move(tables)),
      below_(std::move(below)),
      planes_(std::move(planes)),
      weights_("The compute tier, weights", layout.dim, size_of(layout.dtype), kLowerBudget),
      ids_("The compute tier, ids", 1, sizeof(int64_t), kLowerBudget),
      steps_("The compute tier, last steps", 1, sizeof(int64_t), kLowerBudget),
      residency_(
          [&] {
            std::vector<int64_t> rows;
            for (const SpaceTable* table : tables_)
              rows.push_back(table->dynamic() ? -1 : table->size());
            return rows;
          }(),
          capacity),
      born_(tables_.size()) {
  if (planes_ && layout.steps) throw std::invalid_argument("planes elsewhere keep no last steps");
  staging_.reserve(static_cast<uint64_t>(3 * at_once() * record_bytes_),
                   "The compute tier, records on their way", kLowerBudget);
  if (!planes_) weights_.ensure(capacity);
  ids_.ensure(capacity);
  for (int64_t width : layout.state_widths) {
    Plane plane("The compute tier, states", width, compute_size(layout.dtype), kLowerBudget);
    if (!planes_) plane.ensure(capacity);
    states_.push_back(std::move(plane));
  }
  if (layout.steps) steps_.ensure(capacity);
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t]->dynamic()) born_[t] = below_->rows(static_cast<int32_t>(t));
  }
}

uint64_t RowSpace::slot_bytes(const RecordLayout& layout) {
  return static_cast<uint64_t>(layout.bytes()) + sizeof(int64_t);
}

// The right to move rows, and the time that takes.
class RowSpace::Moving {
 public:
  explicit Moving(RowSpace& space, bool forward_waits = false)
      : space_(space),
        forward_waits_(forward_waits),
        asked_(Clock::now()),
        lock_(space.may_move(!forward_waits)) {}
  ~Moving() {
    std::lock_guard lock(space_.mutex_);
    space_.counters_.move_ns += ns_since(began_);
    if (forward_waits_) space_.counters_.waited_ns += ns_since(asked_);
  }

 private:
  RowSpace& space_;
  bool forward_waits_;
  Clock::time_point asked_;
  std::unique_lock<std::mutex> lock_;
  Clock::time_point began_ = Clock::now();
};

// Takes moving_ when nobody scans. `ahead`: for rows that nobody waits for yet.
std::unique_lock<std::mutex> RowSpace::may_move(bool ahead) {
  std::unique_lock lock(moving_);
  // Those of a process that was forked to this one go on there.
  std::erase_if(scanning_, [](const Scanning& one) { return one.process != forks(); });
  Scanning me{std::this_thread::get_id(), forks()};
  auto mine = std::find(scanning_.begin(), scanning_.end(), me);
  if (mine != scanning_.end()) {
    throw TierError(
        "This thread is reading all rows of a table, one chunk after the other, and rows stay "
        "where "
        "they are until it has come to the end. Read on, or close what reads them, before you "
        "train "
        "or write.");
  }
  auto nobody = [&] { return scanning_.empty(); };
  if (!ahead) {
    scanned_.wait(lock, nobody);
  } else if (!scanned_.wait_for(lock, kPatience, nobody)) {  // who scans may be asking for it
    throw TierError("All rows of a table are being read, so no batch is brought up ahead.");
  }
  return lock;
}

// -- messages from the training thread ------------------------------------------------------------

void RowSpace::post(Message message) {
  std::lock_guard lock(inbox_mutex_);
  inbox_.push_back(std::move(message));
}

void RowSpace::retract(int64_t batch) { post({Message::retract, batch, false, {}}); }
void RowSpace::consume(int64_t batch, bool ahead) { post({Message::consume, batch, ahead, {}}); }
void RowSpace::mark_dirty(int64_t batch) { post({Message::dirty_batch, batch, false, {}}); }
void RowSpace::mark_dirty(const int64_t* slots, int64_t n) {
  post({Message::dirty_slots, 0, false, {slots, slots + n}});
}
void RowSpace::end(int64_t batch) { post({Message::end, batch, false, {}}); }

// Under mutex_: what the training thread has said, in its order.
void RowSpace::drain() {
  std::vector<Message> messages;
  {
    std::lock_guard lock(inbox_mutex_);
    messages.swap(inbox_);
  }
  size_t done = 0;
  try {
    for (; done < messages.size(); ++done) carry_out(messages[done]);
  } catch (...) {  // no memory: later, then
    std::lock_guard lock(inbox_mutex_);
    inbox_.insert(inbox_.begin(), std::make_move_iterator(messages.begin() + done),
                  std::make_move_iterator(messages.end()));
    throw;
  }
}

void RowSpace::carry_out(const Message& message) {
  switch (message.kind) {
    case Message::retract:
      if (message.batch < residency_.next_batch() - residency_.announced()) break;
      forgotten_.insert(message.batch);
      retract_forgotten();
      break;
    case Message::consume: {
      std::vector<RowKey> born;
      residency_.consume(message.batch, &born);
      for (const RowKey& key : born) ++born_[key.table];
      counters_.used += residency_.count(message.batch);
      ++counters_.batches;
      counters_.batches_ahead += message.ahead;
      if (auto brought = brought_.extract(message.batch)) {
        counters_.missed += brought.mapped().missed;
        counters_.created += brought.mapped().created;
      }
      break;
    }
    case Message::dirty_batch: residency_.mark_dirty(message.batch); break;
    case Message::dirty_slots:
      residency_.mark_dirty(message.slots.data(), static_cast<int64_t>(message.slots.size()));
      break;
    case Message::end:
      if (residency_.consumed(message.batch)) {
        residency_.release(message.batch);
      } else {
        std::vector<int64_t> dropped;
        residency_.take_back(message.batch, dropped);
        brought_.erase(message.batch);
      }
      break;
  }
}

// -- moving rows
// ------------------------------------------------------------------------------------

void RowSpace::gather(const int64_t* slots, int64_t n, uint8_t* records) const {
  if (planes_) {
    if (n) planes_->gather(slots, n, records);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      prefetch<Use::write>(weights_.row(slots[i + kAhead]), weights_.row_bytes());
      for (const Plane& state : states_)
        prefetch<Use::write>(state.row(slots[i + kAhead]), state.row_bytes());
    }
    uint8_t* to = records + i * record_bytes_;
    std::memcpy(to, weights_.row(slots[i]), weights_.row_bytes());
    to += weights_.row_bytes();
    for (const Plane& state : states_) {
      std::memcpy(to, state.row(slots[i]), state.row_bytes());
      to += state.row_bytes();
    }
    if (layout_.steps) std::memcpy(to, steps_.row(slots[i]), sizeof(int64_t));
  }
}

void RowSpace::scatter(const uint8_t* records, const int64_t* slots, int64_t n) {
  if (planes_) {
    if (n) planes_->scatter(records, slots, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      prefetch<Use::write>(weights_.row(slots[i + kAhead]), weights_.row_bytes());
      for (const Plane& state : states_)
        prefetch<Use::write>(state.row(slots[i + kAhead]), state.row_bytes());
    }
    const uint8_t* from = records + i * record_bytes_;
    std::memcpy(weights_.row(slots[i]), from, weights_.row_bytes());
    from += weights_.row_bytes();
    for (const Plane& state : states_) {
      std::memcpy(state.row(slots[i]), from, state.row_bytes());
      from += state.row_bytes();
    }
    if (layout_.steps) std::memcpy(steps_.row(slots[i]), from, sizeof(int64_t));
  }
}

// The record of a row that is nowhere.
void RowSpace::new_record(const SpaceTable& table, const int64_t* id, uint8_t* record) const {
  table.first_values(id, 1, record);
  uint8_t* to = record + layout_.weight_bytes();
  for (size_t k = 0; k < states_.size(); ++k) {
    double initial = table.first_state(k);
    int64_t width = layout_.state_widths[k];
    if (layout_.dtype == DType::f64) {
      for (int64_t j = 0; j < width; ++j) std::memcpy(to + 8 * j, &initial, 8);
    } else {
      auto narrow = static_cast<float>(initial);
      for (int64_t j = 0; j < width; ++j) std::memcpy(to + 4 * j, &narrow, 4);
    }
    to += layout_.state_bytes(k);
  }
  int64_t step = table.first_step();
  if (layout_.steps) std::memcpy(to, &step, sizeof(int64_t));
}

void RowSpace::fill_new(const std::vector<RowKey>& keys, const std::vector<int64_t>& slots) {
  auto count = static_cast<int64_t>(keys.size());
  int64_t step = planes_ ? std::min(count, records_at_once()) : 1;
  std::vector<uint8_t> records(static_cast<size_t>(step * record_bytes_));
  for (int64_t begin = 0; begin < count; begin += step) {
    int64_t n = std::min(step, count - begin);
    for (int64_t i = 0; i < n; ++i) {
      const RowKey& key = keys[begin + i];
      new_record(*tables_[key.table], &key.id, records.data() + i * record_bytes_);
    }
    scatter(records.data(), &slots[begin], n);
  }
}

// Rows that could not be written stay in memory, and are what a read finds.
void RowSpace::read_below(std::span<const RowKey> keys, uint8_t* records, bool* found) {
  below_->read(keys, records, found);
  if (held_back_.empty()) return;
  for (size_t i = 0; i < keys.size(); ++i) {
    auto at = std::find(held_back_.begin(), held_back_.end(), keys[i]);
    if (at == held_back_.end()) continue;
    std::memcpy(records + i * record_bytes_,
                held_back_records_.data() + (at - held_back_.begin()) * record_bytes_,
                record_bytes_);
    found[i] = true;
  }
}

void RowSpace::write_held_back() {
  if (held_back_.empty()) return;
  below_->write(held_back_, held_back_records_.data());
  held_back_.clear();
  held_back_records_ = {};
  held_back_bytes_ = 0;
}

int64_t RowSpace::limit() const {
  std::lock_guard lock(mutex_);
  return residency_.limit();
}

// -- the way of a batch
// -----------------------------------------------------------------------------

void RowSpace::note_size(std::span<const TableIds> parts) {
  int64_t rows = 0;
  for (const TableIds& part : parts) rows += part.count;
  largest_ = std::max(largest_, rows);
}

int64_t RowSpace::announce(std::span<const TableIds> parts) {
  std::lock_guard lock(mutex_);
  note_size(parts);
  return residency_.announce(parts);
}

// Residency forgets its first announced batch, or all of them.
void RowSpace::retract_forgotten() {
  while (residency_.announced() &&
         forgotten_.erase(residency_.next_batch() - residency_.announced())) {
    residency_.retract_first();
  }
}

void RowSpace::retract_all() {
  std::lock_guard lock(mutex_);
  drain();
  residency_.retract();
  forgotten_.clear();
}

bool RowSpace::admit(int64_t batch, int64_t* slots) {
  Moving moving(*this);
  write_held_back();
  narrow();
  Moves moves;
  {
    std::lock_guard lock(mutex_);
    drain();
    if (batch != residency_.next_batch() - residency_.announced()) return false;
    if (!residency_.admit(batch, moves)) return false;
    retract_forgotten();
  }
  move(batch, moves);
  std::lock_guard lock(mutex_);
  residency_.slots(batch, slots);
  return true;
}

void RowSpace::leave_out_new(int64_t* slots, int64_t n) {
  std::lock_guard lock(mutex_);
  drain();
  for (int64_t i = 0; i < n; ++i) {
    if (residency_.is_new(slots[i])) slots[i] = -1;
  }
}

int64_t RowSpace::pinned() {
  std::lock_guard lock(mutex_);
  drain();
  return residency_.pinned();
}

int64_t RowSpace::slots_needed(std::span<const TableIds> parts) {
  std::lock_guard lock(mutex_);
  drain();
  note_size(parts);
  return residency_.slots_needed(parts);
}

int64_t RowSpace::slots_for_stream(int64_t ahead) {
  std::lock_guard lock(mutex_);
  drain();
  constexpr int64_t kMost = 1 << 20;  // batches
  return (std::min(ahead, kMost) + std::max<int64_t>(1, 2 * residency_.held()) + 1) * largest_;
}

int64_t RowSpace::admit_now(std::span<const TableIds> parts, int64_t* slots) {
  Moving moving(*this, true);
  write_held_back();
  narrow();
  Moves moves;
  int64_t batch;
  {
    std::lock_guard lock(mutex_);
    drain();
    note_size(parts);
    batch = residency_.admit_now(parts, moves);
    if (!batch) return 0;
  }
  move(batch, moves);
  std::lock_guard lock(mutex_);
  residency_.slots(batch, slots);
  return batch;
}

}  // namespace hotbed
