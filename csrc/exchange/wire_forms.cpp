#include "exchange/wire_forms.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"

namespace hotbed {
namespace {

DType stored_as(WireForm form) { return form == WireForm::f16 ? DType::f16 : DType::bf16; }

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
      kernels().encode_int8(row, piece.width, piece.at_random, piece.seed, out);
    } else {
      kernels().encode_values(stored_as(piece.form), row, piece.width, out);
    }
  });
}

void decode_piece(const WirePiece& piece) {
  by_row(piece, false, [&](float* row, const uint8_t* in) {
    if (piece.form == WireForm::int8) {
      kernels().decode_int8(in, piece.width, row);
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
