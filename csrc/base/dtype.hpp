// What rows are made of, and how those of a bag become one vector.
#pragma once

#include <cstddef>

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

// Of the type that arithmetic runs in, and states and gradients have.
inline size_t compute_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

// How the rows of one bag become one vector.
enum class Combiner : int { none = 0, sum = 1, mean = 2, sqrtn = 3, max = 4 };

}  // namespace hotbed
