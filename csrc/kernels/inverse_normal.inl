// The inverse of the standard normal distribution function, by algorithm AS 241 (Wichura, "The
// percentage points of the normal distribution", Applied Statistics 37, 1988): PPND7 for float,
// PPND16 for double. Only + - * / and sqrt, each rounded as IEEE 754 says, so the bits are the
// same on every machine; no libm. Selections in place of branches, so that loops over it
// vectorise. Included by kernels.cpp once per instruction set, hence the inner namespace.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifndef HOTBED_ISA
#define HOTBED_ISA base
#endif

namespace hotbed::HOTBED_ISA {

// -log(p) of a normal number p in (0, 1): p = 2^e m with m in [sqrt(1/2), sqrt(2)), and
// log m = 2 artanh(s), s = (m - 1) / (m + 1), by its power series (|s| < 0.172).
static inline float minus_log(float p) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3, kOne = 127u << 23;
  uint32_t bits = std::bit_cast<uint32_t>(p);
  uint32_t biased = (bits - kSqrtHalf + kOne) >> 23;
  float m = std::bit_cast<float>(bits - (biased << 23) + kOne);
  float e = static_cast<float>(static_cast<int32_t>(biased) - 127);
  float s = (m - 1.0f) / (m + 1.0f);
  float t = s * s;
  float series = 2.0f + t * (2.0f / 3 + t * (2.0f / 5 + t * (2.0f / 7 + t * (2.0f / 9))));
  return -(e * 0x1.62e43p-1f + s * series);
}

static inline double minus_log(double p) {
  constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd, kOne = 1023ull << 52;
  uint64_t bits = std::bit_cast<uint64_t>(p);
  uint64_t biased = (bits - kSqrtHalf + kOne) >> 52;
  double m = std::bit_cast<double>(bits - (biased << 52) + kOne);
  // An integer below 2^52 becomes a double by taking the place of the low bits of 2^52.
  double e = std::bit_cast<double>(biased | 0x4330000000000000) - (0x1p52 + 1023);
  double s = (m - 1.0) / (m + 1.0);
  double t = s * s;
  double series = 2.0 / 17 + t * (2.0 / 19 + t * (2.0 / 21 + t * (2.0 / 23)));
  series = 2.0 / 11 + t * (2.0 / 13 + t * (2.0 / 15 + t * series));
  series = 2.0 / 5 + t * (2.0 / 7 + t * (2.0 / 9 + t * series));
  series = 2.0 + t * (2.0 / 3 + t * series);
  return -(e * 0x1.62e42fefa39efp-1 + s * series);
}

// The point below which lies the probability `tail`, for 2^-36 <= tail <= 1/2; never positive.
// `center` is 1/2 - tail: a caller that knows it better than the subtraction would passes it.
static inline float inverse_normal(float tail, float center) {
  float r = 0.180625f - center * center;
  float central_top =
      3.3871327179e0f + r * (5.0434271938e1f + r * (1.5929113202e2f + r * 5.9109374720e1f));
  float central_bottom = 1.0f + r * (1.7895169469e1f + r * (7.8757757664e1f + r * 6.7187563600e1f));
  float w = std::sqrt(minus_log(tail)) - 1.6f;
  float tail_top =
      1.4234372777e0f + w * (2.7568153900e0f + w * (1.3067284816e0f + w * 1.7023821103e-1f));
  float tail_bottom = 1.0f + w * (7.3700164250e-1f + w * 1.2021132975e-1f);
  bool central = center <= 0.425f;
  float top = central ? center * central_top : tail_top;
  float bottom = central ? central_bottom : tail_bottom;
  return -(top / bottom);
}

// Below this probability (exp(-25)) inverse_normal_far has to be used.
constexpr double kFarTail = 1.3887943864964021e-11;

// The same for kFarTail <= tail <= 1/2, to about 1e-16.
static inline double inverse_normal(double tail, double center) {
  double r = 0.180625 - center * center;
  double central_top = 3.3430575583588128105e4 + r * 2.5090809287301226727e3;
  central_top = 4.5921953931549871457e4 + r * (6.7265770927008700853e4 + r * central_top);
  central_top = 1.9715909503065514427e3 + r * (1.3731693765509461125e4 + r * central_top);
  central_top = 3.3871328727963666080e0 + r * (1.3314166789178437745e2 + r * central_top);
  double central_bottom = 2.8729085735721942674e4 + r * 5.2264952788528545610e3;
  central_bottom = 2.1213794301586595867e4 + r * (3.9307895800092710610e4 + r * central_bottom);
  central_bottom = 6.8718700749205790830e2 + r * (5.3941960214247511077e3 + r * central_bottom);
  central_bottom = 1.0 + r * (4.2313330701600911252e1 + r * central_bottom);
  double w = std::sqrt(minus_log(tail)) - 1.6;
  double tail_top = 2.27238449892691845833e-2 + w * 7.74545014278341407640e-4;
  tail_top = 1.27045825245236838258e0 + w * (2.41780725177450611770e-1 + w * tail_top);
  tail_top = 5.76949722146069140550e0 + w * (3.64784832476320460504e0 + w * tail_top);
  tail_top = 1.42343711074968357734e0 + w * (4.63033784615654529590e0 + w * tail_top);
  double tail_bottom = 5.47593808499534494600e-4 + w * 1.05075007164441684324e-9;
  tail_bottom = 1.48103976427480074590e-1 + w * (1.51986665636164571966e-2 + w * tail_bottom);
  tail_bottom = 1.67638483018380384940e0 + w * (6.89767334985100004550e-1 + w * tail_bottom);
  tail_bottom = 1.0 + w * (2.05319162663775882187e0 + w * tail_bottom);
  bool central = center <= 0.425;
  double top = central ? center * central_top : tail_top;
  double bottom = central ? central_bottom : tail_bottom;
  return -(top / bottom);
}

// The same for 2^-1022 <= tail < kFarTail.
static inline double inverse_normal_far(double tail) {
  double w = std::sqrt(minus_log(tail)) - 5.0;
  double top = 2.71155556874348757815e-5 + w * 2.01033439929228813265e-7;
  top = 2.65321895265761230930e-2 + w * (1.24266094738807843860e-3 + w * top);
  top = 1.78482653991729133580e0 + w * (2.96560571828504891230e-1 + w * top);
  top = 6.65790464350110377720e0 + w * (5.46378491116411436990e0 + w * top);
  double bottom = 1.42151175831644588870e-7 + w * 2.04426310338993978564e-15;
  bottom = 7.86869131145613259100e-4 + w * (1.84631831751005468180e-5 + w * bottom);
  bottom = 1.36929880922735805310e-1 + w * (1.48753612908506148525e-2 + w * bottom);
  bottom = 1.0 + w * (5.99832206555887937690e-1 + w * bottom);
  return -(top / bottom);
}

}  // namespace hotbed::HOTBED_ISA
