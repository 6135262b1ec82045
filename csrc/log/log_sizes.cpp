#include "log/log_sizes.hpp"

#include <algorithm>

#include "log/io_engine.hpp"
#include "log/log_format.hpp"
#include "log/log_options.hpp"
#include "log/log_writer.hpp"

namespace hotbed {

namespace {

constexpr uint64_t kQueueShare = 64;   // of each queue
constexpr uint64_t kAppendShare = 32;  // of all buffers but two a store
constexpr uint64_t kLeastArena = 32 << 10;
constexpr uint64_t kLeastAppend = 32 << 10;
constexpr uint64_t kBuffers = 8;  // fewer and larger ones where a budget is small

uint64_t whole_units(uint64_t bytes) { return bytes / kBlockUnit * kBlockUnit; }

}  // namespace

LogSizes::LogSizes(uint64_t budget, std::span<const int64_t> record_bytes) {
  const LogOptions most;
  uint64_t block = kBlockUnit, stores = record_bytes.size();
  for (int64_t of_store : record_bytes) {
    block = std::max<uint64_t>(block, BlockLayout(of_store).block_bytes);
  }
  uint64_t arena =
      std::max(block, std::clamp(budget / kQueueShare, kLeastArena, most.io.arena_bytes));
  append_bytes = std::clamp(budget / kAppendShare, kLeastAppend, most.append_bytes);
  uint64_t part = append_bytes / std::max(kBuffers, 2 * stores);
  uint64_t buffer = std::max(block, std::min(most.buffer_bytes, part));
  arena_bytes = whole_units(arena);
  buffer_bytes = whole_units(buffer);
  bytes = IoEngine::kArenas * arena + std::max(2 * buffer, append_bytes) + 2 * stores * buffer;
}

}  // namespace hotbed
