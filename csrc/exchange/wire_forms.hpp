// Forms in which rows travel between ranks that are shorter than those in which they are stored.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.hpp"

namespace hotbed {

// int8: a scale a row, a float, and then a byte a number: the number over the scale.
enum class WireForm : int { f16 = 0, bf16 = 1, int8 = 2 };

// Rows of one shard in a message. In the core's form they are of `dtype`.
struct WirePiece {
  WireForm form;
  DType dtype;
  int64_t rows;
  int64_t width;
  void* in_core;
  void* on_wire;
  bool at_random;  // int8 rounds up with the probability of what is cut off, else to the nearest
  uint64_t seed;
};

int64_t wire_row_bytes(WireForm form, int64_t width);

// A row of int8 that is not finite becomes one of NaN. What is rounded at random depends on the
// seed and the row alone: equal rows become equal bytes.
void encode_pieces(const std::vector<WirePiece>& pieces);
void decode_pieces(const std::vector<WirePiece>& pieces);

}  // namespace hotbed
