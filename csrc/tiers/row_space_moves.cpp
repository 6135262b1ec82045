// Rows on their way between slots and the tier below.
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <semaphore>
#include <system_error>
#include <thread>

#include "tiers/row_space.hpp"

namespace hotbed {

namespace {

// Rows for which a second thread is worth its start.
constexpr int64_t kWorthAThread = 2048;

// Reads parts here while another thread, after `first`, places those that were read; two may be on
// their way. False, with nothing done: the system has no thread to give.
bool beside(const std::function<void()>& first, const std::function<void(int64_t)>& read,
            const std::function<void(int64_t)>& place, int64_t parts) {
  std::counting_semaphore<> room(2), filled(0);
  std::atomic<bool> ended{false};
  std::exception_ptr placing_failure, reading_failure;
  auto guarded = [&](auto&& work, std::exception_ptr& failure, std::counting_semaphore<>& wakes) {
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
      ended = true;
      wakes.release();
    }
  };
  auto place_all = [&] {
    first();
    for (int64_t k = 0; k < parts; ++k) {
      filled.acquire();
      if (ended) return;
      place(k);
      room.release();
    }
  };
  auto read_all = [&] {
    for (int64_t k = 0; k < parts; ++k) {
      room.acquire();
      if (ended) return;
      read(k);
      filled.release();
    }
  };
  std::thread placing;
  try {
    placing = std::thread([&] { guarded(place_all, placing_failure, room); });
  } catch (const std::system_error&) {
    return false;
  }
  guarded(read_all, reading_failure, filled);
  placing.join();
  if (placing_failure) std::rethrow_exception(placing_failure);
  if (reading_failure) std::rethrow_exception(reading_failure);
  return true;
}

}  // namespace

// Writes evicted rows to the tier below, under moving_, by way of `records` with room for `part` of
// them. On TierError those that are not there are held back.
void RowSpace::write_back(const Moves& moves, int64_t& written, uint8_t* records, int64_t part) {
  std::vector<RowKey> keys;
  std::vector<int64_t> slots;
  for (size_t i = 0; i < moves.evicted.size(); ++i) {
    if (!moves.evicted_dirty[i]) continue;
    keys.push_back(moves.evicted[i]);
    slots.push_back(moves.evicted_slots[i]);
  }
  keep(moves.evicted_slots);
  auto dirty = static_cast<int64_t>(keys.size());
  for (int64_t begin = 0; begin < dirty; begin += part) {
    int64_t n = std::min(part, dirty - begin);
    gather(slots.data() + begin, n, records);
    try {
      below_->write(std::span(keys).subspan(begin, n), records);
    } catch (...) {
      // These slots are given away: what is in them goes into memory of its own.
      held_back_.assign(keys.begin() + begin, keys.end());
      held_back_records_.resize(static_cast<size_t>((dirty - begin) * record_bytes_));
      held_back_bytes_ = held_back_records_.size();
      gather(slots.data() + begin, dirty - begin, held_back_records_.data());
      throw;
    }
    written += n;
  }
}

// Under moving_: gives slots back that the budget holds no more. Throws TierError, every row being
// safe.
void RowSpace::narrow() {
  if (!allowed_) return;
  uint64_t bookkeeping;
  {
    std::lock_guard lock(mutex_);
    drain();
    bookkeeping = bookkeeping_bytes();
  }
  int64_t limit = allowed_(bookkeeping);
  Moves moves;
  {
    std::lock_guard lock(mutex_);
    drain();
    if (limit >= residency_.limit()) return;
    residency_.narrow(limit, moves);
    limit = residency_.limit();
    counters_.evicted += static_cast<int64_t>(moves.evicted.size());
  }
  int64_t written = 0;
  std::exception_ptr failure;
  try {
    write_back(moves, written, staging(0), 3 * at_once());
  } catch (...) {
    failure = std::current_exception();  // what was in the slots is elsewhere all the same
  }
  weights_.release(limit);
  ids_.release(limit);
  for (Plane& state : states_) state.release(limit);
  if (layout_.steps) steps_.release(limit);
  {
    std::lock_guard lock(mutex_);
    counters_.written_back += written;
  }
  if (failure) std::rethrow_exception(failure);
}

// Carries out what residency has decided; under moving_. On TierError the batch is resident no
// more, and no row is lost.
//
// A disk that waits is lost time: while one part of the rows is read here, a second thread puts the
// part before into its slots, which it has emptied first. Few rows are read at once instead, as the
// disk would wait between parts too.
void RowSpace::move(int64_t batch, Moves& moves) {
  auto count = static_cast<int64_t>(moves.loaded.size());
  bool several = count >= kWorthAThread;
  int64_t part = several ? at_once() : 3 * at_once();
  int64_t written = 0;
  std::vector<RowKey> absent;
  std::vector<int64_t> absent_slots;
  std::unique_ptr<bool[]> found(new bool[6 * at_once()]);
  auto read = [&](int64_t k) {
    int64_t begin = k * part, n = std::min(part, count - begin), buffer = several ? k % 2 : 0;
    bool* there = found.get() + buffer * part;
    std::fill_n(there, n, false);
    below_->read(std::span(moves.loaded).subspan(begin, n), staging(buffer), there);
  };
  auto place = [&](int64_t k) {
    int64_t begin = k * part, n = std::min(part, count - begin), buffer = several ? k % 2 : 0;
    const bool* there = found.get() + buffer * part;
    uint8_t* records = staging(buffer);
    const RowKey* keys = moves.loaded.data() + begin;
    const int64_t* slots = moves.loaded_slots.data() + begin;
    for (int64_t i = 0; i < n; ++i) {
      if (there[i]) continue;
      new_record(*tables_[keys[i].table], &keys[i].id, records + i * record_bytes_);
      absent.push_back(keys[i]);
      absent_slots.push_back(slots[i]);
    }
    scatter(records, slots, n);
    auto* id_plane = reinterpret_cast<int64_t*>(ids_.data());
    for (int64_t i = 0; i < n; ++i) id_plane[slots[i]] = keys[i].id;
  };
  auto parts = [&] { return (count + part - 1) / part; };
  try {
    several = several && beside([&] { write_back(moves, written, staging(2), at_once()); }, read,
                                place, parts());
    if (!several) {
      part = 3 * at_once();
      write_back(moves, written, staging(0), part);
      for (int64_t k = 0; k < parts(); ++k) {
        read(k);
        place(k);
      }
    }
  } catch (...) {
    std::lock_guard lock(mutex_);
    std::vector<int64_t> dropped;
    residency_.take_back(batch, dropped);
    residency_.drop(moves.loaded_slots.data(), count);
    counters_.evicted += static_cast<int64_t>(moves.evicted.size());
    counters_.written_back += written;
    throw;
  }
  // A row of a static table exists always; it is its first values until something else is written.
  std::vector<int64_t> reserved;
  for (size_t i = 0; i < absent.size(); ++i) {
    if (tables_[absent[i].table]->dynamic()) reserved.push_back(absent_slots[i]);
  }
  std::lock_guard lock(mutex_);
  residency_.mark_new(reserved.data(), static_cast<int64_t>(reserved.size()));
  if (count) brought_[batch] = {count, static_cast<int64_t>(absent.size())};
  counters_.evicted += static_cast<int64_t>(moves.evicted.size());
  counters_.written_back += written;
}

}  // namespace hotbed
