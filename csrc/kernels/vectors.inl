// Sixteen floats, in one register or in some, and stored numbers that become such. Every operation
// is rounded by itself, so all instruction sets give the same bits.
#pragma once

#include <cstring>

#include "kernels/codec.hpp"

namespace hotbed::HOTBED_ISA {

#if defined(__AVX512F__)

struct Floats16 {
  __m512 all;
};

static HOTBED_INLINE Floats16 splat(float x) { return {_mm512_set1_ps(x)}; }
static HOTBED_INLINE Floats16 operator+(Floats16 a, Floats16 b) {
  return {_mm512_add_ps(a.all, b.all)};
}
static HOTBED_INLINE Floats16 operator*(Floats16 a, Floats16 b) {
  return {_mm512_mul_ps(a.all, b.all)};
}
static HOTBED_INLINE Floats16 operator/(Floats16 a, Floats16 b) {
  return {_mm512_div_ps(a.all, b.all)};
}
// b where it is larger, or no number; else a, which stays once it is none.
static HOTBED_INLINE Floats16 larger(Floats16 a, Floats16 b) {
  __mmask16 taken =
      _mm512_cmp_ps_mask(b.all, a.all, _CMP_GT_OQ) | _mm512_cmp_ps_mask(b.all, b.all, _CMP_UNORD_Q);
  return {_mm512_mask_blend_ps(taken, a.all, b.all)};
}
static HOTBED_INLINE void store(float* to, Floats16 x) { _mm512_storeu_ps(to, x.all); }
static HOTBED_INLINE Floats16 of_floats(const void* from) { return {_mm512_loadu_ps(from)}; }
static HOTBED_INLINE Floats16 of_halves(const void* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
static HOTBED_INLINE Floats16 of_bytes(const void* from) {
  __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
// Numbers of eight bytes, each in the lowest bits of its lane; the bits above are any.
static HOTBED_INLINE __m512i nibbles(const void* from) {
  const __m512i of_half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return _mm512_srlv_epi32(_mm512_permutexvar_epi32(of_half, _mm512_castsi128_si512(bytes)), shift);
}

#elif defined(__AVX2__)

struct Floats16 {
  __m256 low, high;
};

static HOTBED_INLINE Floats16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static HOTBED_INLINE Floats16 operator+(Floats16 a, Floats16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static HOTBED_INLINE Floats16 operator*(Floats16 a, Floats16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static HOTBED_INLINE Floats16 operator/(Floats16 a, Floats16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
static HOTBED_INLINE __m256 larger_of_8(__m256 a, __m256 b) {
  __m256 taken = _mm256_or_ps(_mm256_cmp_ps(b, a, _CMP_GT_OQ), _mm256_cmp_ps(b, b, _CMP_UNORD_Q));
  return _mm256_blendv_ps(a, b, taken);
}
// b where it is larger, or no number; else a, which stays once it is none.
static HOTBED_INLINE Floats16 larger(Floats16 a, Floats16 b) {
  return {larger_of_8(a.low, b.low), larger_of_8(a.high, b.high)};
}
static HOTBED_INLINE void store(float* to, Floats16 x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
static HOTBED_INLINE Floats16 of_floats(const void* from) {
  auto floats = static_cast<const float*>(from);
  return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8)};
}
static HOTBED_INLINE Floats16 of_halves(const void* from) {
  auto halves = static_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
static HOTBED_INLINE Floats16 of_bytes(__m128i bytes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
static HOTBED_INLINE Floats16 of_bytes(const void* from) {
  return of_bytes(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
static HOTBED_INLINE Floats16 of_nibbles(const void* from) {
  __m128i both = _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
  __m128i apart = _mm_or_si128(both, _mm_slli_epi16(both, 4));
  return of_bytes(_mm_and_si128(apart, _mm_set1_epi8(15)));
}

#else

struct Floats16 {
  float at[16];
};

// One by one, which compilers make vectors of.
template <class Term>
static HOTBED_INLINE Floats16 each(Term term) {
  Floats16 x;
  for (int i = 0; i < 16; ++i) x.at[i] = term(i);
  return x;
}

static HOTBED_INLINE Floats16 splat(float x) {
  return each([&](int) { return x; });
}
static HOTBED_INLINE Floats16 operator+(const Floats16& a, const Floats16& b) {
  return each([&](int i) { return a.at[i] + b.at[i]; });
}
static HOTBED_INLINE Floats16 operator*(const Floats16& a, const Floats16& b) {
  return each([&](int i) { return a.at[i] * b.at[i]; });
}
static HOTBED_INLINE Floats16 operator/(const Floats16& a, const Floats16& b) {
  return each([&](int i) { return a.at[i] / b.at[i]; });
}
// b where it is larger, or no number; else a, which stays once it is none.
static HOTBED_INLINE Floats16 larger(const Floats16& a, const Floats16& b) {
  return each([&](int i) { return b.at[i] > a.at[i] || b.at[i] != b.at[i] ? b.at[i] : a.at[i]; });
}
static HOTBED_INLINE void store(float* to, const Floats16& x) { std::memcpy(to, x.at, sizeof x); }
static HOTBED_INLINE Floats16 of_floats(const void* from) {
  Floats16 x;
  std::memcpy(x.at, from, sizeof x);
  return x;
}
static HOTBED_INLINE Floats16 of_halves(const void* from) {
  f16 halves[16];
  std::memcpy(halves, from, sizeof halves);
  return each([&](int i) { return decode(halves[i]); });
}
static HOTBED_INLINE Floats16 of_bytes(const void* from) {
  auto bytes = static_cast<const uint8_t*>(from);
  return each([&](int i) { return static_cast<float>(bytes[i]); });
}
static HOTBED_INLINE Floats16 of_nibbles(const void* from) {
  auto bytes = static_cast<const uint8_t*>(from);
  return each([&](int i) { return static_cast<float>(bytes[i / 2] >> (i % 2 * 4) & 15); });
}

#endif

}  // namespace hotbed::HOTBED_ISA
