// Whether the rows of a table are read or written.
#pragma once

#include <cstdint>

namespace hotbed {

// The lock of one table; only Hold looks inside.
struct RowLock {
  int readers = 0;
  int waiting = 0;  // writers; new readers let them go first
  bool writing = false;
  uint64_t process = 0;  // forks seen by whom it was last taken
};

}  // namespace hotbed
