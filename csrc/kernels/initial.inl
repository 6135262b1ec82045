// First values of rows. Columns of consecutive rows are worked on as one flat run, in blocks that
// fit the first-level cache, so that narrow rows vectorise as well as wide ones.
#pragma once

#include <cstring>

#include "base/random.hpp"
#include "kernels/codec.hpp"
#include "kernels/codec.inl"
#include "kernels/initial_spec.hpp"
#include "kernels/inverse_normal.inl"

namespace hotbed::HOTBED_ISA {
namespace initial {

constexpr int64_t kBlock = 512;

// An integer below 2^52, exactly; the plain conversion has no instruction before AVX-512.
static inline double small_to_double(uint64_t x) {
  return std::bit_cast<double>(x | 0x4330000000000000) - 0x1p52;
}

// 32 bits in [0, 1) in steps of 2^-24.
static inline float unit_float(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
}

// 64 bits in [0, 1) in steps of 2^-53. The top bits are those that unit_float uses, so a table's
// first values differ between dtypes by rounding only.
static inline double unit_double(uint64_t bits) {
  return small_to_double(bits >> 32) * 0x1p-32 + small_to_double((bits >> 11) & 0x1fffff) * 0x1p-53;
}

// One sign bit, and 31 bits that place the value between 1/2 and the tail: the probability and
// its distance from 1/2 each come from an integer, so neither loses digits to a subtraction.
static inline float normal_float(uint32_t bits) {
  uint32_t place = bits & 0x7fffffff;
  float tail = (static_cast<float>(static_cast<int32_t>(place)) + 0.5f) * 0x1p-32f;
  float center = (static_cast<float>(static_cast<int32_t>(0x7fffffff - place)) + 0.5f) * 0x1p-32f;
  float below = inverse_normal(tail, center);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(below) ^ (bits & 0x80000000));
}

static inline double tail_of(uint64_t bits) {
  return (small_to_double((bits & 0x7fffffffffffffff) >> 12) + 0.5) * 0x1p-52;
}

static inline double with_sign(double below, uint64_t bits) {
  return std::bit_cast<double>(std::bit_cast<uint64_t>(below) ^ (bits & 0x8000000000000000));
}

static void uniform_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, float* out) {
  auto low = static_cast<float>(spec.a);
  auto high = static_cast<float>(spec.b);
  auto span = static_cast<float>(spec.b - spec.a);
  for (int64_t i = 0; i < n; ++i) {
    float x = low + span * unit_float(static_cast<uint32_t>(bits[i] >> 32));
    out[i] = x < high ? x : high;
  }
}

static void uniform_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, double* out) {
  double low = spec.a, high = spec.b, span = spec.b - spec.a;
  for (int64_t i = 0; i < n; ++i) {
    double x = low + span * unit_double(bits[i]);
    out[i] = x < high ? x : high;
  }
}

static void normal_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, float* out) {
  auto mean = static_cast<float>(spec.a);
  auto deviation = static_cast<float>(spec.b);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = mean + deviation * normal_float(static_cast<uint32_t>(bits[i] >> 32));
  }
}

static void normal_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, double* out) {
  uint64_t far = 0;
  for (int64_t i = 0; i < n; ++i) {
    double tail = tail_of(bits[i]);
    double center = 0.5 - tail;  // exact: both are multiples of 2^-53
    far |= tail < kFarTail ? 1 : 0;
    out[i] = spec.a + spec.b * with_sign(inverse_normal(tail, center), bits[i]);
  }
  if (!far) return;
  for (int64_t i = 0; i < n; ++i) {
    double tail = tail_of(bits[i]);
    if (tail >= kFarTail) continue;
    out[i] = spec.a + spec.b * with_sign(inverse_normal_far(tail), bits[i]);
  }
}

// The probability that 64 bits draw from the interval.
static inline double truncated_probability(const InitialSpec& spec, uint64_t bits) {
  double span = spec.probability_high - spec.probability_low;
  return spec.probability_low + span * (unit_double(bits) + 0x1p-54);
}

// In double whatever the row's dtype: an interval may lie anywhere in the tail.
static void truncated_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, double* out) {
  double deviation = spec.mirrored ? -spec.b : spec.b;
  uint64_t far = 0;
  for (int64_t i = 0; i < n; ++i) {
    double p = truncated_probability(spec, bits[i]);
    bool upper = p > 0.5;
    double tail = upper ? 1.0 - p : p;
    far |= tail < kFarTail ? 1 : 0;
    double z = inverse_normal(tail, 0.5 - tail);
    double x = spec.a + deviation * (upper ? -z : z);
    x = x > spec.c ? x : spec.c;
    out[i] = x < spec.d ? x : spec.d;
  }
  if (!far) return;
  for (int64_t i = 0; i < n; ++i) {
    double p = truncated_probability(spec, bits[i]);
    bool upper = p > 0.5;
    double tail = upper ? 1.0 - p : p;
    if (tail >= kFarTail) continue;
    // Rounding may have reached an interval's end at 0 or 1, where the point is infinite.
    double least = upper ? 0x1p-54 : 0x1p-1022;
    double z = inverse_normal_far(tail > least ? tail : least);
    double x = spec.a + deviation * (upper ? -z : z);
    x = x > spec.c ? x : spec.c;
    out[i] = x < spec.d ? x : spec.d;
  }
}

static void constant_block(const InitialSpec& spec, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(spec.a);
}

static void constant_block(const InitialSpec& spec, int64_t n, double* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = spec.a;
}

// T is what the values are computed as: double for f64 rows, float for the others.
template <class T>
static void value_block(const InitialSpec& spec, const uint64_t* bits, int64_t n, T* out) {
  switch (spec.kind) {
    case Initial::constant: constant_block(spec, n, out); return;
    case Initial::uniform: uniform_block(spec, bits, n, out); return;
    case Initial::normal: normal_block(spec, bits, n, out); return;
    case Initial::truncated_normal: {
      alignas(64) double values[kBlock];
      truncated_block(spec, bits, n, values);
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(values[i]);
      return;
    }
  }
}

// The random words of the `n` values that begin at flat position `begin`.
static void word_block(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t begin,
                       int64_t n, int64_t dim, uint64_t* words) {
  if (spec.kind == Initial::constant) return;
  alignas(64) uint64_t streams[kBlock];
  int64_t first_row = begin / dim;
  int64_t rows = (begin + n - 1) / dim - first_row + 1;
  for (int64_t r = 0; r < rows; ++r) {
    // Unsigned, since ids may count past the largest id of a caller's last block.
    int64_t id = ids ? ids[first_row + r]
                     : static_cast<int64_t>(static_cast<uint64_t>(first_id) +
                                            static_cast<uint64_t>(first_row + r));
    streams[r] = row_stream(spec.table_key, spec.origin, id, 0);
  }
  int64_t column = begin - first_row * dim;
  int64_t at = 0;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t take = dim - column < n - at ? dim - column : n - at;
    uint64_t counter = streams[r] + kGolden * static_cast<uint64_t>(column + 1);
    for (int64_t k = 0; k < take; ++k) {
      words[at + k] = counter + kGolden * static_cast<uint64_t>(k);
    }
    at += take;
    column = 0;
  }
  for (int64_t i = 0; i < n; ++i) words[i] = mix(words[i]);
}

}  // namespace initial

static void initial_rows(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t n,
                         int64_t dim, DType dtype, void* rows) {
  using namespace initial;
  auto* out = static_cast<uint8_t*>(rows);
  auto item = static_cast<int64_t>(size_of(dtype));
  alignas(64) uint64_t words[kBlock];
  alignas(64) float values[kBlock];
  for (int64_t begin = 0; begin < n * dim; begin += kBlock) {
    int64_t count = n * dim - begin < kBlock ? n * dim - begin : kBlock;
    word_block(spec, ids, first_id, begin, count, dim, words);
    uint8_t* to = out + begin * item;
    switch (dtype) {
      case DType::f64: value_block(spec, words, count, reinterpret_cast<double*>(to)); break;
      case DType::f32: value_block(spec, words, count, reinterpret_cast<float*>(to)); break;
      default: value_block(spec, words, count, values); encode_values(dtype, values, count, to);
    }
  }
  if (!spec.has_padding) return;
  for (int64_t r = 0; r < n; ++r) {
    int64_t id =
        ids ? ids[r]
            : static_cast<int64_t>(static_cast<uint64_t>(first_id) + static_cast<uint64_t>(r));
    if (id == spec.padding_id) std::memset(out + r * dim * item, 0, dim * item);
  }
}

}  // namespace hotbed::HOTBED_ISA
