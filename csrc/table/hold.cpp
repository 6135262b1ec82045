#include "table/hold.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "base/forks.hpp"

namespace hotbed {

namespace {

// One mutex for all locks: they are taken and left twice a step, for nanoseconds. Both for threads
// that outlive everything; who waited is not in a child.
std::condition_variable& moved = *new std::condition_variable;
std::mutex& gate = *new ForkMutex([] { new (&moved) std::condition_variable; });

// What the thread holds by now: each lock, and whether alone.
thread_local std::vector<std::pair<RowLock*, bool>> held;
thread_local uint64_t held_in = 0;

}  // namespace

Hold::Hold(std::vector<std::shared_ptr<Table>> tables, bool alone)
    : tables_(std::move(tables)), alone_(alone) {
  std::sort(tables_.begin(), tables_.end());
  tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
}

std::unique_ptr<Hold> Hold::of_forward(std::vector<std::shared_ptr<Table>> tables, bool training) {
  bool writes = training && std::any_of(tables.begin(), tables.end(), [](const auto& table) {
                  return table->dynamic() || table->tiered() || table->catch_up;
                });
  return std::make_unique<Hold>(std::move(tables), writes);
}

bool Hold::ready(bool nested) const {
  return std::all_of(mine_.begin(), mine_.end(), [&](const RowLock* lock) {
    if (lock->writing) return false;
    return alone_ ? lock->readers == 0 : nested || lock->waiting == 0;
  });
}

void Hold::refuse_unless_possible() {
  if (taken_) throw std::logic_error("a hold on rows is taken twice");
  if (held_in != forks()) {
    held.clear();
    held_in = forks();
  }
  mine_.clear();
  for (const std::shared_ptr<Table>& table : tables_) {
    RowLock* lock = &table->lock;
    if (lock->process != forks()) *lock = RowLock{.process = forks()};
    auto at = std::find_if(held.begin(), held.end(),
                           [&](const auto& entry) { return entry.first == lock; });
    if (at == held.end()) {
      mine_.push_back(lock);
    } else if (alone_ && !at->second) {
      throw std::logic_error("rows of table '" + table->name() +
                             "' are to be written by a thread that reads them");
    }
  }
}

bool Hold::take_now() {
  if (!ready(!held.empty())) return false;
  for (RowLock* lock : mine_) {
    if (alone_) {
      lock->writing = true;
    } else {
      ++lock->readers;
    }
    held.push_back({lock, alone_});
  }
  process_ = forks();
  return taken_ = true;
}

bool Hold::try_take() {
  std::lock_guard guard(gate);
  refuse_unless_possible();
  return take_now();
}

void Hold::take() {
  std::unique_lock guard(gate);
  refuse_unless_possible();
  if (take_now()) return;
  if (alone_) {
    for (RowLock* lock : mine_) ++lock->waiting;
  }
  moved.wait(guard, [&] { return ready(!held.empty()); });
  if (alone_) {
    for (RowLock* lock : mine_) --lock->waiting;
  }
  take_now();
}

void Hold::share() {
  std::lock_guard guard(gate);
  if (!taken_ || !alone_ || process_ != forks()) return;
  alone_ = false;
  for (RowLock* lock : mine_) {
    lock->writing = false;
    lock->readers = 1;
  }
  for (auto entry = held.end() - mine_.size(); entry != held.end(); ++entry) entry->second = false;
  moved.notify_all();
}

void Hold::release() {
  std::lock_guard guard(gate);
  if (!taken_) return;
  taken_ = false;
  if (process_ != forks()) return;
  for (RowLock* lock : mine_) {
    if (alone_) {
      lock->writing = false;
    } else {
      --lock->readers;
    }
  }
  held.resize(held.size() - mine_.size());  // what was taken last is left first
  moved.notify_all();
}

}  // namespace hotbed
