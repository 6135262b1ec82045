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

Waited wait_for_counter(const int64_t* counter, int64_t value, double seconds, int process) {
  using Clock = std::chrono::steady_clock;
  std::atomic_ref<int64_t> shared(*const_cast<int64_t*>(counter));
  auto there = [&] { return shared.load(std::memory_order_acquire); };
  for (int i = 0; i < kLooks; ++i) {
    if (there() >= value) return Waited::raised;
    pause();
  }
  const auto begin = Clock::now();
  auto checked = begin;
  while (true) {
    const int64_t now_there = there();
    if (now_there >= value) return Waited::raised;
    if (now_there < 0) return Waited::left;
    const auto now = Clock::now();
    if (now - begin < kYielding) {
      sched_yield();
      continue;
    }
    if (now - checked > kBetweenChecks) {
      checked = now;
      // What it raised before its end counts.
      if (has_ended(process)) return there() >= value ? Waited::raised : Waited::ended;
      if (std::chrono::duration<double>(now - begin).count() > seconds) return Waited::too_long;
    }
    const timespec nap{0, kNapNanoseconds};
    nanosleep(&nap, nullptr);
  }
}

}  // namespace hotbed
