#include "base/forks.hpp"

#include <pthread.h>

#include <atomic>
#include <utility>
#include <vector>

namespace hotbed {

namespace {

// Threads in the midst of a change, and forks that wait for them to come out. Both are looked at
// after the own one has changed, so that one of two sees the other.
std::atomic<int> changing = 0;
std::atomic<int> waiting = 0;
thread_local int depth = 0;

void await_changes() {
  ++waiting;
  for (int now = changing; now; now = changing) changing.wait(now);
}

struct Registry {
  std::mutex mutex;
  std::vector<std::pair<ForkMutex*, std::function<void()>>> all;
  uint64_t forks = 0;
};

Registry& registry() {
  static Registry* made = [] {
    pthread_atfork(
        [] {
          await_changes();
          registry().mutex.lock();
          for (auto& [mutex, in_child] : registry().all) mutex->lock();
        },
        [] {
          for (auto& [mutex, in_child] : registry().all) mutex->unlock();
          registry().mutex.unlock();
          --waiting;
          waiting.notify_all();
        },
        [] {
          ++registry().forks;
          waiting = 0;  // other threads that fork are not here
          for (auto& [mutex, in_child] : registry().all) {
            in_child();
            mutex->unlock();
          }
          registry().mutex.unlock();
        });
    return new Registry;
  }();
  return *made;
}

}  // namespace

// Changes only where there is one thread.
uint64_t forks() { return registry().forks; }

WholeInForks::WholeInForks() {
  if (depth++) return;
  while (true) {
    ++changing;
    int forking = waiting;
    if (!forking) return;
    if (--changing == 0) changing.notify_all();
    waiting.wait(forking);
  }
}

WholeInForks::~WholeInForks() {
  if (--depth) return;
  if (--changing == 0 && waiting) changing.notify_all();
}

ForkMutex::ForkMutex(std::function<void()> in_child) {
  std::lock_guard lock(registry().mutex);
  registry().all.emplace_back(this, std::move(in_child));
}

}  // namespace hotbed
