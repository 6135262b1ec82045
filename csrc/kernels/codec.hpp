// float32 <-> float16 and bfloat16, by integer arithmetic or by instructions that give the same
// bits. Rounding is to nearest even, or stochastic with bits that the caller supplies.
// Included by kernels.cpp once per instruction set, hence the inner namespace.
#pragma once

#include <bit>
#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#ifndef HOTBED_ISA
#define HOTBED_ISA base
#endif

namespace hotbed::HOTBED_ISA {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

static inline float decode(float x) { return x; }
static inline double decode(double x) { return x; }

static inline float decode(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

static inline float decode(f16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  uint32_t rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) {  // infinity, NaN (made quiet, as the instruction does)
    uint32_t quiet = rest > 0x7c00 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | 0x7f800000 | ((rest & 0x3ff) << 13) | quiet);
  }
  // A subnormal counts units of 2^-24, which is the last bit of a float in [0.5, 1). No float
  // subnormal appears, so flushing those to zero (torch.set_flush_denormal) changes nothing.
  float value = rest < 0x400 ? std::bit_cast<float>(0x3f000000 + rest) - 0.5f
                             : std::bit_cast<float>((rest << 13) + 0x38000000);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
#endif
}

template <class T>
static inline T encode(float x);

template <>
inline float encode<float>(float x) {
  return x;
}

template <>
inline bf16 encode<bf16>(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline f16 encode<f16>(float x) {
#ifdef __F16C__
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#else
  uint32_t bits = std::bit_cast<uint32_t>(x);
  auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    return {static_cast<uint16_t>(sign | 0x7e00 | ((rest >> 13) & 0x3ff))};
  }
  if (rest >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (rest < 0x38800000) {  // subnormal in half: let a float addition do the rounding
    float shifted = std::bit_cast<float>(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
  }
  uint32_t rounded = rest - 0x38000000 + 0xfff + ((rest >> 13) & 1);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
}

// Rounds up with the probability of the part that is cut off: unbiased over the random bits.
// Overflow saturates to the largest finite value; NaN and infinity are kept.
template <class T>
static inline T encode_stochastic(float x, uint32_t random);

template <>
inline bf16 encode_stochastic<bf16>(float x, uint32_t random) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) >= 0x7f800000) return encode<bf16>(x);
  uint32_t sum = bits + (random & 0xffff);
  if ((sum & 0x7fffffff) >= 0x7f800000) sum = (bits & 0x80000000) | 0x7f7f0000;
  return {static_cast<uint16_t>(sum >> 16)};
}

template <>
inline f16 encode_stochastic<f16>(float x, uint32_t random) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t rest = bits & 0x7fffffff;
  if (rest >= 0x7f800000) return encode<f16>(x);
  if (rest < 0x38800000) {    // subnormal in half: one unit is 2^-24
    if (rest < 0x33800000) {  // below one unit: up with probability x / 2^-24
      // That probability in units of 2^-32, by shifting the mantissa.
      uint32_t exponent = rest >> 23;
      uint32_t mantissa = (rest & 0x7fffff) | 0x800000;
      uint32_t share = exponent >= 94  ? mantissa << (exponent - 94)
                       : exponent > 70 ? mantissa >> (94 - exponent)
                                       : 0;
      return {static_cast<uint16_t>(sign | (random < share ? 1 : 0))};
    }
    uint32_t shift = 126 - (rest >> 23);  // 14 .. 23
    uint32_t mantissa = (rest & 0x7fffff) | 0x800000;
    uint32_t sum = mantissa + (random & ((1u << shift) - 1));
    return {static_cast<uint16_t>(sign | (sum >> shift))};
  }
  uint32_t sum = rest - 0x38000000 + (random & 0x1fff);
  if (sum >= 0x0f800000) sum = 0x0f7fe000;
  return {static_cast<uint16_t>(sign | (sum >> 13))};
}

}  // namespace hotbed::HOTBED_ISA
