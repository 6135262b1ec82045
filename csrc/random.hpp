// Counter-based integer generator: the bits are a pure function of what they are for, so they do
// not depend on order, thread count, tier or instruction set. Built on the finalizer of SplitMix64
// (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). The
// functions are static because kernels.cpp includes them once per instruction set.
#pragma once

#include <cstdint>

namespace hotbed {

static inline uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  return x;
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

// The stream of one row of one table. `purpose` separates uses of the same row: 0 is the first
// value; the step number plus one is the stochastic rounding of that step.
static inline uint64_t row_stream(uint64_t table_key, int64_t id, uint64_t purpose) {
  uint64_t x = mix(table_key + kGolden * (static_cast<uint64_t>(id) + 1));
  return mix(x ^ mix(purpose + kGolden));
}

// The 64 bits of one column of a stream.
static inline uint64_t column_bits(uint64_t stream, uint64_t column) {
  return mix(stream + kGolden * (column + 1));
}

}  // namespace hotbed
