#include "base/forks.hpp"

#include <pthread.h>

#include <utility>
#include <vector>

namespace hotbed {

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::pair<ForkMutex*, std::function<void()>>> all;
  uint64_t forks = 0;
};

Registry& registry() {
  static Registry* made = [] {
    pthread_atfork(
        [] {
          registry().mutex.lock();
          for (auto& [mutex, in_child] : registry().all) mutex->lock();
        },
        [] {
          for (auto& [mutex, in_child] : registry().all) mutex->unlock();
          registry().mutex.unlock();
        },
        [] {
          ++registry().forks;
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

ForkMutex::ForkMutex(std::function<void()> in_child) {
  std::lock_guard lock(registry().mutex);
  registry().all.emplace_back(this, std::move(in_child));
}

}  // namespace hotbed
