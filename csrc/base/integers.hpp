// Sums, products and roundings of counts.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hotbed {

inline uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// UINT64_MAX where the sum or the product is beyond counting: no memory is that large.
inline uint64_t sum(uint64_t a, uint64_t b) {
  uint64_t bytes;
  return __builtin_add_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}
inline uint64_t product(uint64_t a, uint64_t b) {
  uint64_t bytes;
  return __builtin_mul_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}

// Rows to work on at once: so many, but of wide ones no more than 64 MB, and one at least.
inline int64_t rows_at_once(int64_t most, int64_t row_bytes) {
  return std::max<int64_t>(1, std::min(most, (int64_t{64} << 20) / row_bytes));
}

}  // namespace hotbed
