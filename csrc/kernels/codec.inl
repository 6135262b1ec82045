// The codecs of codec.hpp over arrays. float64 is no codec's business: those rows are never
// converted.
#pragma once

#include <cstring>

#include "base/dtype.hpp"
#include "kernels/codec.hpp"

namespace hotbed::HOTBED_ISA {
namespace codec {

template <class T>
static void encode_array(const float* values, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = encode<T>(values[i]);
}

template <class T>
static void decode_array(const T* values, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = decode(values[i]);
}

template <class T>
static void encode_array_stochastic(const float* values, const uint32_t* random, int64_t n,
                                    T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = encode_stochastic<T>(values[i], random[i]);
}

#ifdef __F16C__
// The compiler does not widen the conversion of one element by itself.
template <>
void encode_array<f16>(const float* values, int64_t n, f16* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bits);
  }
  for (; i < n; ++i) out[i] = encode<f16>(values[i]);
}

template <>
void decode_array<f16>(const f16* values, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
  }
  for (; i < n; ++i) out[i] = decode(values[i]);
}
#endif

}  // namespace codec

static void encode_values(DType dtype, const float* values, int64_t n, void* out) {
  switch (dtype) {
    case DType::f16: codec::encode_array(values, n, static_cast<f16*>(out)); return;
    case DType::bf16: codec::encode_array(values, n, static_cast<bf16*>(out)); return;
    default: std::memcpy(out, values, n * sizeof(float));
  }
}

static void encode_values_stochastic(DType dtype, const float* values, const uint32_t* random,
                                     int64_t n, void* out) {
  switch (dtype) {
    case DType::f16:
      codec::encode_array_stochastic(values, random, n, static_cast<f16*>(out));
      return;
    case DType::bf16:
      codec::encode_array_stochastic(values, random, n, static_cast<bf16*>(out));
      return;
    default: std::memcpy(out, values, n * sizeof(float));
  }
}

static void decode_values(DType dtype, const void* values, int64_t n, float* out) {
  switch (dtype) {
    case DType::f16: codec::decode_array(static_cast<const f16*>(values), n, out); return;
    case DType::bf16: codec::decode_array(static_cast<const bf16*>(values), n, out); return;
    default: std::memcpy(out, values, n * sizeof(float));
  }
}

}  // namespace hotbed::HOTBED_ISA
