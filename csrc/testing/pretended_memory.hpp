// Machines with as much memory as a test wants.
#pragma once

#include <cstdint>

namespace hotbed {

// available_memory() answers `bytes` from now on; 0: as the system has it.
void pretend_memory(uint64_t bytes);

}  // namespace hotbed
