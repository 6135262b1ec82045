// A number in memory that processes share: one raises it, others wait until it is raised.
#pragma once

#include <cstdint>

namespace hotbed {

enum class Waited { raised, too_long, ended, exited };

// Makes what was written before visible to whoever has waited for `value`, from 0 on.
void raise_counter(int64_t* counter, int64_t value);

// Says that it will not be raised any more. What it has been raised to counts.
void leave_counter(int64_t* counter);

// Waits until the counter is at least `value`. A process that is about to raise it is on another
// core most likely, so this looks for some microseconds before it sleeps. Returns what came first:
// that, so many seconds, the end of the process (a descriptor of which pidfd_open gives; -1: it is
// not watched), or that the process has let go of the counter.
Waited wait_for_counter(const int64_t* counter, int64_t value, double seconds, int process);

}  // namespace hotbed
