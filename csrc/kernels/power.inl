// x^p by polynomials in double: the same bits on every machine, which libm does not promise.
#pragma once

#include <bit>
#include <cstdint>

namespace hotbed::HOTBED_ISA {

// ln(x) for x > 0. With x = m 2^e, m in [sqrt(1/2), sqrt(2)) and s = (m-1)/(m+1):
// ln m = 2 (s + s^3/3 + s^5/5 + ...), |s| < 0.172.
static inline double natural_log(double x) {
  double extra = 0;
  if (x < 0x1p-1022) {
    x *= 0x1p54;
    extra = -54;
  }
  uint64_t bits = std::bit_cast<uint64_t>(x);
  // Adding the distance from sqrt(1/2) to 1 rounds the exponent at sqrt(2) instead of at 2.
  uint64_t shifted = bits + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
  double exponent = static_cast<double>(static_cast<int64_t>(shifted >> 52) - 1023) + extra;
  double m = std::bit_cast<double>((shifted & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
  double s = (m - 1) / (m + 1), t = s * s, sum = 0;
  for (int k = 23; k >= 3; k -= 2) sum = (sum + 1.0 / k) * t;
  return exponent * 0.69314718055994530942 + 2 * s * (1 + sum);
}

// e^y for y in [-745, 709]; beyond, 0 or infinity.
static inline double exponential(double y) {
  if (y < -745) return 0;
  if (y > 709.78) return std::bit_cast<double>(uint64_t{0x7ff0000000000000});
  double k =
      static_cast<double>(static_cast<int64_t>(y * 1.4426950408889634074 + (y < 0 ? -0.5 : 0.5)));
  // ln 2 in two parts, the first with trailing zero bits, so that k times it is exact.
  double f = y - k * 6.93147180369123816490e-01 - k * 1.90821492927058770002e-10;
  double sum = 1;
  for (int n = 14; n >= 1; --n) sum = 1 + sum * f / n;
  auto power = static_cast<int64_t>(k);
  int64_t half = power / 2;
  auto two_to = [](int64_t e) {
    return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52);
  };
  return sum * two_to(half) * two_to(power - half);
}

// x^p for x >= 0 and p >= 0.
static inline double power_of(double x, double p) {
  if (p == 0) return 1;
  if (!(x > 0)) return x == 0 ? 0 : x;  // NaN stays
  return exponential(p * natural_log(x));
}

// 1 - beta^steps, the bias correction of Adam, for 0 <= beta < 1.
static inline double one_minus_power(double beta, int64_t steps) {
  double result = 1, base = beta;
  for (int64_t n = steps; n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return 1 - result;
}

}  // namespace hotbed::HOTBED_ISA
