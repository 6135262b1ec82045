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

// Where the rows of a part lie in the table that was cut: row `id` is its row first + stride x id,
// and column j its column `column` + j. What is drawn for a row is drawn for that one.
struct Origin {
  int64_t first = 0, stride = 1, column = 0;

  // Unsigned, since ids may count past the largest one.
  int64_t id(int64_t own) const {
    return static_cast<int64_t>(static_cast<uint64_t>(first) +
                                static_cast<uint64_t>(stride) * static_cast<uint64_t>(own));
  }
};

// The stream of a row of a part; its columns count from the part's first.
static inline uint64_t row_stream(uint64_t table_key, const Origin& origin, int64_t id,
                                  uint64_t purpose) {
  return row_stream(table_key, origin.id(id), purpose) +
         kGolden * static_cast<uint64_t>(origin.column);
}

// The 64 bits of one column of a stream.
static inline uint64_t column_bits(uint64_t stream, uint64_t column) {
  return mix(stream + kGolden * (column + 1));
}

}  // namespace hotbed
