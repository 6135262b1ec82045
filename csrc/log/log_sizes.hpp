// How much memory a log takes beside its index, by the budget that it is in.
#pragma once

#include <cstdint>
#include <span>

namespace hotbed {

// A sixteenth of a budget for queues and a thirtieth for buffers, up to what a fast disk needs; at
// least what a block of the widest record takes.
struct LogSizes {
  LogSizes(uint64_t budget, std::span<const int64_t> record_bytes);

  uint64_t arena_bytes;   // of one queue
  uint64_t buffer_bytes;  // of one buffer for writing
  uint64_t append_bytes;  // of the buffers that all stores share
  // All of it at most. Rises steadily with the budget, though the others rise by whole blocks: a
  // budget that suffices does so with every larger one.
  uint64_t bytes;
};

}  // namespace hotbed
