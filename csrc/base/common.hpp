// Words shared by the whole core: element types, errors, small integer helpers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace hotbed {

// Element type of a row. Arithmetic runs in double for f64 rows and in float for the others.
enum class DType : int { f32 = 0, f64 = 1, f16 = 2, bf16 = 3 };

inline size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    default: return 2;
  }
}

// How the rows of one bag become one vector.
enum class Combiner : int { none = 0, sum = 1, mean = 2, sqrtn = 3, max = 4 };

// Thrown before anything is lost; the binding turns it into hotbed.OutOfMemory.
struct OutOfMemory : std::runtime_error {
  OutOfMemory(const std::string& what_for, uint64_t asked_bytes, uint64_t free_bytes,
              const std::string& remedy = kRemedy);
  static constexpr const char* kRemedy = "Use smaller or fewer tables, or free memory.";
  uint64_t asked;
  uint64_t free;
};

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
