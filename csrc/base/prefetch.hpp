// Asking for memory ahead of its use.
//
// Whatever only does that must be inlined by force, lambdas too: GCC takes a function that only
// prefetches for one without effect, and drops the calls of it that it has not inlined.
#pragma once

#include <cstdint>

#define HOTBED_INLINE inline __attribute__((always_inline))

namespace hotbed {

constexpr int64_t kPrefetched = 512;  // the processor itself follows a longer row

// How many rows ahead: some 4 KB are on their way at a time.
constexpr int64_t rows_ahead(int64_t row_bytes) {
  return row_bytes <= 64 ? 64 : row_bytes <= 128 ? 32 : row_bytes <= 256 ? 24 : 12;
}

enum class Use { read, write };

// The lines of a row, up to kPrefetched bytes. Its branches depend on the size alone: those on an
// address would be decided, and mistaken, as late as the address is loaded.
template <Use use = Use::read>
HOTBED_INLINE void prefetch(const void* row, int64_t bytes) {
  const char* start = static_cast<const char*>(row);
  int64_t end = bytes < kPrefetched ? bytes : kPrefetched;
  for (int64_t at = 0; at < end; at += 64) __builtin_prefetch(start + at, use == Use::write);
  if (end % 64) __builtin_prefetch(start + end - 1, use == Use::write);  // may begin a line
}

}  // namespace hotbed
