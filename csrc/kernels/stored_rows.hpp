// Rows of files that are only read: as numbers, or in few bits with a scale and an offset a row.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"

namespace hotbed {

// How a row is stored. int8 has numbers from 0 to 255 and two floats, int4 numbers from 0 to 15, of
// which a byte has two, the first in its lower half, and two halves: scale and offset. A number
// stands for number * scale + offset, by a multiplication and an addition, both rounded to float.
enum class StoredAs : int { f32 = 0, f16 = 1, int8 = 2, int4 = 3 };

// Bytes of the numbers of a row.
inline int64_t stored_bytes(StoredAs stored_as, int64_t dim) {
  switch (stored_as) {
    case StoredAs::f32: return dim * 4;
    case StoredAs::f16: return dim * 2;
    case StoredAs::int8: return dim;
    default: return (dim + 1) / 2;
  }
}

// Bytes of the scale and the offset of a row.
inline int64_t scale_bytes(StoredAs stored_as) {
  return stored_as == StoredAs::int8 ? 8 : stored_as == StoredAs::int4 ? 4 : 0;
}

// Rows of one file, in memory that others keep.
struct StoredRows {
  StoredAs stored_as;
  const uint8_t* rows;
  const uint8_t* scales;  // nullptr: there are none
  int64_t row_bytes;
};

// A position without row, and one that is left out. Others have the number of a layer from bit
// kLayerBit on and below it that of a row.
constexpr int64_t kMissingRow = -1;
constexpr int64_t kSkippedRow = -2;
constexpr int kLayerBit = 48;
constexpr int64_t kRowMask = (int64_t{1} << kLayerBit) - 1;

// Bags of one lookup, as the kernel sees them.
struct StoredTask {
  const StoredRows* layers;  // all are stored alike
  bool is_plain;             // there is one layer, and each position has a row
  const float* missing;      // dim numbers, of kMissingRow
  int64_t dim;
  const int64_t* rows;     // of each position; the first is that of offsets[0]
  const int64_t* offsets;  // nullptr: a bag has one position
  int64_t skipped;         // positions whose row this is are left out
  Combiner combiner;
  float* out;
  int64_t out_stride;
};

}  // namespace hotbed
