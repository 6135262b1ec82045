#include "base/shared_counter.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <climits>

namespace hotbed {

namespace {

constexpr int kLooks = 2000;                  // some 50 microseconds
constexpr long kNapNanoseconds = 20'000'000;  // between looks at the process

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The half of the counter that every raise changes: the kernel compares no more than that.
uint32_t* changing_half(int64_t* counter) {
  return reinterpret_cast<uint32_t*>(counter) + (std::endian::native == std::endian::big);
}

// Other processes see the memory as well, so it is no private futex.
void wake_all(int64_t* counter) {
  syscall(SYS_futex, changing_half(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Until it is something else than `seen`, for a nap at most.
void sleep_on(int64_t* counter, int64_t seen) {
  const timespec nap{0, kNapNanoseconds};
  const auto half = static_cast<uint32_t>(seen);
  syscall(SYS_futex, changing_half(counter), FUTEX_WAIT, half, &nap, nullptr, 0);
}

bool has_ended(int process) {
  if (process < 0) return false;
  pollfd watched{process, POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

}  // namespace

void raise_counter(int64_t* counter, int64_t value) {
  std::atomic_ref<int64_t>(*counter).store(value, std::memory_order_release);
  wake_all(counter);
}

void leave_counter(int64_t* counter) {
  std::atomic_ref<int64_t> shared(*counter);
  const int64_t last = shared.load(std::memory_order_relaxed);
  if (last < 0) return;
  shared.store(-1 - last, std::memory_order_release);
  wake_all(counter);
}

Waited wait_for_counter(const int64_t* counter, int64_t value, double seconds, int process) {
  using Clock = std::chrono::steady_clock;
  auto* shared = const_cast<int64_t*>(counter);
  int64_t there = 0;
  auto raised = [&] {
    there = std::atomic_ref<int64_t>(*shared).load(std::memory_order_acquire);
    return (there < 0 ? -1 - there : there) >= value;
  };
  for (int i = 0; i < kLooks; ++i) {
    if (raised()) return Waited::raised;
    pause();
  }
  const auto begin = Clock::now();
  while (true) {
    if (raised()) return Waited::raised;
    if (there < 0) return Waited::exited;
    // What it raised before its end counts.
    if (has_ended(process)) return raised() ? Waited::raised : Waited::ended;
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) {
      return Waited::too_long;
    }
    sleep_on(shared, there);
  }
}

}  // namespace hotbed
