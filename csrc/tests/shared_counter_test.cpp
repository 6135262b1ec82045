#include "base/shared_counter.hpp"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "tests/check.hpp"

using namespace hotbed;

namespace {

constexpr double kLong = 60.0;

int descriptor_of(pid_t process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

}  // namespace

TEST(what_was_raised_is_seen_at_once_or_later) {
  int64_t counter = 3;
  CHECK(wait_for_counter(&counter, 2, 0.0, -1) == Waited::raised);
  CHECK(wait_for_counter(&counter, 3, 0.0, -1) == Waited::raised);
  for (int after : {0, 1, 30}) {
    const int64_t next = counter + 1;
    int written = 0;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(after));
      written = 7;
      raise_counter(&counter, next);
    });
    CHECK(wait_for_counter(&counter, next, kLong, -1) == Waited::raised);
    CHECK(written == 7);
    other.join();
  }
}

TEST(waiting_ends_in_time) {
  int64_t counter = 0;
  const auto begin = std::chrono::steady_clock::now();
  CHECK(wait_for_counter(&counter, 1, 0.1, -1) == Waited::too_long);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() > 0.09 && took.count() < 20);
}

TEST(who_has_left_is_not_waited_for) {
  int64_t counter = 5;
  leave_counter(&counter);
  leave_counter(&counter);
  CHECK(wait_for_counter(&counter, 6, kLong, -1) == Waited::exited);
  CHECK(wait_for_counter(&counter, 5, kLong, -1) == Waited::raised);
  counter = 0;
  leave_counter(&counter);
  CHECK(wait_for_counter(&counter, 1, kLong, -1) == Waited::exited);
}

TEST(who_has_ended_is_not_waited_for) {
  int64_t counter = 0;
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const int process = descriptor_of(child);
  if (process < 0) return;  // a kernel without it, on which ranks do not share memory
  CHECK(wait_for_counter(&counter, 1, 0.1, process) == Waited::too_long);
  kill(child, SIGKILL);  // and it is not waited for: a zombie has ended, too
  CHECK(wait_for_counter(&counter, 1, kLong, process) == Waited::ended);
  waitpid(child, nullptr, 0);
  close(process);
}
