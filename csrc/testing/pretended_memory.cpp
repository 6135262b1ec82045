#include "testing/pretended_memory.hpp"

#include <atomic>

#include "base/memory.hpp"

namespace hotbed {

namespace {

std::atomic<uint64_t> pretended{0};

}  // namespace

void pretend_memory(uint64_t bytes) {
  if (bytes) pretended = bytes;
  set_memory_source(bytes ? +[] { return pretended.load(); } : nullptr);
}

}  // namespace hotbed
