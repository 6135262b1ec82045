#include "data/hash_ids.hpp"

#include <bit>
#include <cstring>

namespace hotbed {

namespace {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87ull;
constexpr uint64_t kPrime2 = 0xc2b2ae3d27d4eb4full;
constexpr uint64_t kPrime3 = 0x165667b19e3779f9ull;
constexpr uint64_t kPrime4 = 0x85ebca77c2b2ae63ull;
constexpr uint64_t kPrime5 = 0x27d4eb2f165667c5ull;

// Little-endian whatever the machine is.
uint64_t read64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap64(value);
  return value;
}

uint32_t read32(const uint8_t* at) {
  uint32_t value;
  std::memcpy(&value, at, sizeof value);
  if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap32(value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

uint64_t xxh64(const uint8_t* bytes, size_t size, uint64_t seed) {
  const uint8_t* at = bytes;
  const uint8_t* end = bytes + size;
  uint64_t hash = seed + kPrime5;
  if (size >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - at >= 32; at += 32) {
      for (int k = 0; k < 4; ++k) lanes[k] = round(lanes[k], read64(at + 8 * k));
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
           std::rotl(lanes[3], 18);
    for (uint64_t lane : lanes) hash = merge(hash, lane);
  }
  hash += size;
  for (; end - at >= 8; at += 8) {
    hash = std::rotl(hash ^ round(0, read64(at)), 27) * kPrime1 + kPrime4;
  }
  if (end - at >= 4) {
    hash = std::rotl(hash ^ read32(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

void hash_ids(const uint8_t* bytes, const int64_t* offsets, size_t width, size_t count,
              uint64_t seed, int64_t* out) {
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* at = bytes + (offsets ? static_cast<size_t>(offsets[i]) : i * width);
    size_t size = offsets ? static_cast<size_t>(offsets[i + 1] - offsets[i]) : width;
    out[i] = static_cast<int64_t>(xxh64(at, size, seed));
  }
}

}  // namespace hotbed
