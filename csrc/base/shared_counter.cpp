#include "base/shared_counter.hpp"

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>

namespace hotbed {

namespace {

constexpr int kLooks = 2000;  // some 50 microseconds
constexpr auto kYielding = std::chrono::milliseconds(2);
constexpr auto kBetweenChecks = std::chrono::milliseconds(20);
constexpr long kNapNanoseconds = 50'000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

bool has_ended(int process) {
  if (process < 0) return false;
  pollfd watched{process, POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

}  // namespace

void raise_counter(int64_t* counter, int64_t value) {
  std::atomic_ref<int64_t>(*counter).store(value, std::memory_order_release);
}

void leave_counter(int64_t* counter) {
  std::atomic_ref<int64_t> shared(*counter);
  const int64_t last = shared.load(std::memory_order_relaxed);
  if (last >= 0) shared.store(-1 - last, std::memory_order_release);
}

Waited wait_for_counter(const int64_t* counter, int64_t value, double seconds, int process) {
  using Clock = std::chrono::steady_clock;
  std::atomic_ref<int64_t> shared(*const_cast<int64_t*>(counter));
  bool left = false;
  auto raised = [&] {
    const int64_t there = shared.load(std::memory_order_acquire);
    left = there < 0;
    return (left ? -1 - there : there) >= value;
  };
  for (int i = 0; i < kLooks; ++i) {
    if (raised()) return Waited::raised;
    pause();
  }
  const auto begin = Clock::now();
  auto checked = begin;
  while (true) {
    if (raised()) return Waited::raised;
    if (left) return Waited::left;
    const auto now = Clock::now();
    if (now - begin < kYielding) {
      sched_yield();
      continue;
    }
    if (now - checked > kBetweenChecks) {
      checked = now;
      // What it raised before its end counts.
      if (has_ended(process)) return raised() ? Waited::raised : Waited::ended;
      if (std::chrono::duration<double>(now - begin).count() > seconds) return Waited::too_long;
    }
    const timespec nap{0, kNapNanoseconds};
    nanosleep(&nap, nullptr);
  }
}

}  // namespace hotbed
