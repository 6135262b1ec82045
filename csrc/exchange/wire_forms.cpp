#include "exchange/wire_forms.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kernels/kernels.hpp"

namespace hotbed {
namespace {

constexpr float kMost = 127.0f;
// Below, the inverse of the scale is no finite float: such rows travel as zeros.
constexpr float kLeast = 4e-37f;
// Added to a float of less than 2^22 and taken away again, it rounds that to the nearest integer.
constexpr float kRounds = 12582912.0f;

DType stored_as(WireForm form) { return form == WireForm::f16 ? DType::f16 : DType::bf16; }

uint32_t mixed(uint32_t x) {  // the finaliser of MurmurHash3
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

void to_floats(DType dtype, const void* in, int64_t n, float* out) {
  if (dtype == DType::f64) {
    std::copy_n(static_cast<const double*>(in), n, out);
  } else {
    kernels().decode_values(dtype, in, n, out);
  }
}

void from_floats(DType dtype, const float* in, int64_t n, void* out) {
  if (dtype == DType::f64) {
    std::copy_n(in, n, static_cast<double*>(out));
  } else {
    kernels().encode_values(dtype, in, n, out);
  }
}

// The bits of the largest magnitude; those of infinity and NaN are larger than all others.
uint32_t largest(const float* row, int64_t width) {
  uint32_t most = 0;
  for (int64_t c = 0; c < width; ++c) {
    most = std::max(most, std::bit_cast<uint32_t>(row[c]) & 0x7fffffffu);
  }
  return most;
}

void encode_int8(const float* row, int64_t width, bool at_random, uint64_t seed, uint8_t* out) {
  uint32_t most = largest(row, width);
  float scale = std::bit_cast<float>(most) / kMost;
  auto* bytes = reinterpret_cast<int8_t*>(out + sizeof(float));
  if (most >= 0x7f800000u) scale = std::numeric_limits<float>::quiet_NaN();
  if (std::bit_cast<float>(most) < kLeast) scale = 0;
  std::memcpy(out, &scale, sizeof(float));
  if (!(scale > 0)) {
    std::memset(bytes, 0, width);
    return;
  }
  float inverse = kMost / std::bit_cast<float>(most);
  if (!at_random) {
    for (int64_t c = 0; c < width; ++c) {
      bytes[c] = static_cast<int8_t>(static_cast<int32_t>(row[c] * inverse + kRounds - kRounds));
    }
    return;
  }
  uint32_t of_row = mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32)));
  for (int64_t c = 0; c < width; ++c) {
    of_row = std::rotl(of_row, 5) * 0x9e3779b1u + std::bit_cast<uint32_t>(row[c]);
  }
  of_row = mixed(of_row);
  for (int64_t c = 0; c < width; ++c) {
    uint32_t random = mixed(of_row + static_cast<uint32_t>(c) * 0x9e3779b9u);
    float share = static_cast<float>(random >> 8) * 0x1p-24f;  // in [0, 1)
    float value = row[c] * inverse + (share - 0.5f);
    value = std::min(kMost, std::max(-kMost, value + kRounds - kRounds));
    bytes[c] = static_cast<int8_t>(static_cast<int32_t>(value));
  }
}

void decode_int8(const uint8_t* in, int64_t width, float* row) {
  float scale;
  std::memcpy(&scale, in, sizeof(float));
  auto* bytes = reinterpret_cast<const int8_t*>(in + sizeof(float));
  for (int64_t c = 0; c < width; ++c) row[c] = static_cast<float>(bytes[c]) * scale;
}

// `f(floats, row)` for each row of a piece, by way of floats: `reads` from the core's form before,
// else writes to it after.
template <class F>
void by_row(const WirePiece& piece, bool reads, const F& f) {
  std::vector<float> wide(piece.dtype == DType::f32 ? 0 : piece.width);
  auto size = static_cast<int64_t>(size_of(piece.dtype)) * piece.width;
  auto* in_core = static_cast<uint8_t*>(piece.in_core);
  auto* on_wire = static_cast<uint8_t*>(piece.on_wire);
  int64_t step = wire_row_bytes(piece.form, piece.width);
  for (int64_t i = 0; i < piece.rows; ++i, in_core += size, on_wire += step) {
    float* row = wide.empty() ? reinterpret_cast<float*>(in_core) : wide.data();
    if (reads && !wide.empty()) to_floats(piece.dtype, in_core, piece.width, row);
    f(row, on_wire);
    if (!reads && !wide.empty()) from_floats(piece.dtype, row, piece.width, in_core);
  }
}

void encode_piece(const WirePiece& piece) {
  by_row(piece, true, [&](const float* row, uint8_t* out) {
    if (piece.form == WireForm::int8) {
      encode_int8(row, piece.width, piece.at_random, piece.seed, out);
    } else {
      kernels().encode_values(stored_as(piece.form), row, piece.width, out);
    }
  });
}

void decode_piece(const WirePiece& piece) {
  by_row(piece, false, [&](float* row, const uint8_t* in) {
    if (piece.form == WireForm::int8) {
      decode_int8(in, piece.width, row);
    } else {
      kernels().decode_values(stored_as(piece.form), in, piece.width, row);
    }
  });
}

template <class F>
void each(const std::vector<WirePiece>& pieces, const F& f) {
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1)
  for (size_t p = 0; p < pieces.size(); ++p) f(pieces[p]);
}

}  // namespace

int64_t wire_row_bytes(WireForm form, int64_t width) {
  return form == WireForm::int8 ? static_cast<int64_t>(sizeof(float)) + width : 2 * width;
}

void encode_pieces(const std::vector<WirePiece>& pieces) { each(pieces, encode_piece); }
void decode_pieces(const std::vector<WirePiece>& pieces) { each(pieces, decode_piece); }

}  // namespace hotbed
