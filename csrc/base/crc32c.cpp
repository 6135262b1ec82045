// The instruction gives one result every three cycles and starts one each cycle, so three lanes run
// side by side and are joined by the operator that appends zeros (V. Gopal et al., "Fast CRC
// Computation for iSCSI Polynomial Using CRC32 Instruction", Intel white paper, 2011).
#include "base/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace hotbed {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41, bits reversed
constexpr size_t kLane = 1360;                // three lanes are a block of 4096 but for the header

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b does to the state when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t state = b;
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? kPolynomial : 0);
    tables[0][b] = state;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t before = tables[k - 1][b];
      tables[k][b] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// Eight bytes at a time (M. Kounavis and F. Berry, "A Systematic Approach to Building High
// Performance, Software-based, CRC Generators", ISCC 2005).
uint32_t advance_software(uint32_t state, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint32_t low = state;
    for (int i = 0; i < 4; ++i) low ^= static_cast<uint32_t>(data[i]) << 8 * i;
    state = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^
            kTables[4][low >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^
            kTables[1][data[6]] ^ kTables[0][data[7]];
  }
  for (; bytes > 0; ++data, --bytes) state = state >> 8 ^ kTables[0][(state ^ *data) & 0xff];
  return state;
}

#if defined(__x86_64__)

// The state after kLane zero bytes, a linear map, by the bytes of the state before.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

Shift make_shift() {
  std::array<uint8_t, kLane> zeros{};
  std::array<uint32_t, 32> images;
  for (int bit = 0; bit < 32; ++bit) {
    images[bit] = advance_software(uint32_t{1} << bit, zeros.data(), kLane);
  }
  Shift shift{};
  for (int k = 0; k < 4; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      for (int bit = 0; bit < 8; ++bit) {
        if (b >> bit & 1) shift[k][b] ^= images[8 * k + bit];
      }
    }
  }
  return shift;
}

uint32_t append_lane(const Shift& shift, uint32_t state) {
  return shift[0][state & 0xff] ^ shift[1][state >> 8 & 0xff] ^ shift[2][state >> 16 & 0xff] ^
         shift[3][state >> 24];
}

uint64_t eight(const uint8_t* data) {
  uint64_t value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

__attribute__((target("sse4.2"))) uint32_t advance_hardware(uint32_t start, const uint8_t* data,
                                                            size_t bytes) {
  static const Shift shift = make_shift();
  uint64_t state = start;
  for (; bytes >= 3 * kLane; data += 3 * kLane, bytes -= 3 * kLane) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      state = _mm_crc32_u64(state, eight(data + i));
      second = _mm_crc32_u64(second, eight(data + kLane + i));
      third = _mm_crc32_u64(third, eight(data + 2 * kLane + i));
    }
    state = append_lane(shift, static_cast<uint32_t>(state)) ^ second;
    state = append_lane(shift, static_cast<uint32_t>(state)) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) state = _mm_crc32_u64(state, eight(data));
  auto rest = static_cast<uint32_t>(state);
  for (; bytes > 0; ++data, --bytes) rest = _mm_crc32_u8(rest, *data);
  return rest;
}

#endif

}  // namespace

uint32_t crc32c_software(const void* data, size_t bytes, uint32_t before) {
  return ~advance_software(~before, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~advance_hardware(~before, static_cast<const uint8_t*>(data), bytes);
#endif
  return crc32c_software(data, bytes, before);
}

}  // namespace hotbed
