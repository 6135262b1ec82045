// Rows as int8: a scale, a float, and then a byte a number. Where it rounds to the nearest, the
// bits are those of hotbed/ops/gpu/codec.py.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace hotbed::HOTBED_ISA {
namespace int8 {

constexpr float kMost = 127.0f;
// Added to a float of less than 2^22 and taken away again, it rounds that to the nearest integer.
constexpr float kRounds = 12582912.0f;

static inline uint32_t mixed(uint32_t x) {  // the finaliser of MurmurHash3
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// The bits of the largest magnitude; those of infinity and NaN are larger than all others.
static inline uint32_t largest(const float* row, int64_t width) {
  int32_t most = 0;
  for (int64_t c = 0; c < width; ++c) {
    int32_t bits = std::bit_cast<int32_t>(row[c]) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return static_cast<uint32_t>(most);
}

static inline void nearest(const float* row, int64_t width, float scale, int8_t* out) {
  for (int64_t c = 0; c < width; ++c) {
    out[c] = static_cast<int8_t>(static_cast<int32_t>(row[c] / scale + kRounds - kRounds));
  }
}

static inline void at_random(const float* row, int64_t width, float scale, uint64_t seed,
                             int8_t* out) {
  uint32_t of_row = mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32)));
  for (int64_t c = 0; c < width; ++c) {
    of_row += std::bit_cast<uint32_t>(row[c]) * (2 * static_cast<uint32_t>(c) + 0x9e3779b1u);
  }
  of_row = mixed(of_row);
  for (int64_t c = 0; c < width; ++c) {
    uint32_t random = mixed(of_row + static_cast<uint32_t>(c) * 0x9e3779b9u);
    float share = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;  // in [0, 1)
    float value = row[c] / scale + (share - 0.5f) + kRounds - kRounds;
    value = value < -kMost ? -kMost : value > kMost ? kMost : value;
    out[c] = static_cast<int8_t>(static_cast<int32_t>(value));
  }
}

}  // namespace int8

static void encode_int8(const float* row, int64_t width, bool at_random, uint64_t seed, void* out) {
  uint32_t most = int8::largest(row, width);
  float scale = std::bit_cast<float>(most) / int8::kMost;
  auto* bytes = static_cast<int8_t*>(out) + sizeof(float);
  if (most >= 0x7f800000u) scale = std::numeric_limits<float>::quiet_NaN();
  if (scale < std::numeric_limits<float>::min()) scale = 0;
  std::memcpy(out, &scale, sizeof(float));
  if (!(scale > 0)) {
    std::memset(bytes, 0, width);
    return;
  }
  if (at_random) {
    int8::at_random(row, width, scale, seed, bytes);
  } else {
    int8::nearest(row, width, scale, bytes);
  }
}

static void decode_int8(const void* in, int64_t width, float* row) {
  float scale;
  std::memcpy(&scale, in, sizeof(float));
  auto* bytes = static_cast<const int8_t*>(in) + sizeof(float);
  for (int64_t c = 0; c < width; ++c) row[c] = static_cast<float>(bytes[c]) * scale;
}

}  // namespace hotbed::HOTBED_ISA
