#include "data/hash_ids.hpp"

#include <string_view>

#include "check.hpp"

using hotbed::hash_ids;
using hotbed::xxh64;

namespace {

uint64_t of(std::string_view text, uint64_t seed = 0) {
  return xxh64(reinterpret_cast<const uint8_t*>(text.data()), text.size(), seed);
}

}  // namespace

TEST(agrees_with_published_values) {
  // xxHash's own sanity check: a pseudorandom buffer, hashed with two seeds.
  constexpr uint64_t kPrime32 = 2654435761u;
  std::vector<uint8_t> buffer(222);
  uint64_t state = kPrime32;
  for (uint8_t& byte : buffer) {
    byte = static_cast<uint8_t>(state >> 56);
    state *= 11400714785074694797ull;
  }
  CHECK_EQ(xxh64(buffer.data(), 0, 0), 0xef46db3751d8e999ull);
  CHECK_EQ(xxh64(buffer.data(), 0, kPrime32), 0xac75fda2929b17efull);
  CHECK_EQ(xxh64(buffer.data(), 1, 0), 0xe934a84adb052768ull);
  CHECK_EQ(xxh64(buffer.data(), 1, kPrime32), 0x5014607643a9b4c3ull);
  CHECK_EQ(xxh64(buffer.data(), 4, 0), 0x9136a0dca57457eeull);
  CHECK_EQ(xxh64(buffer.data(), 14, 0), 0x8282dcc4994e35c8ull);
  CHECK_EQ(xxh64(buffer.data(), 14, kPrime32), 0xc3bd6bf63deb6df0ull);
  CHECK_EQ(xxh64(buffer.data(), 222, 0), 0xb641ae8cb691c174ull);
  CHECK_EQ(xxh64(buffer.data(), 222, kPrime32), 0x20cb8ab7ae10c14aull);
  CHECK_EQ(of("abc"), 0x44bc2cf5ad770999ull);
  CHECK_EQ(of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1ull);
}

TEST(values_lie_by_offsets_or_side_by_side) {
  std::string_view text = "abcabcNobody inspects the spammish repetition";
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  std::vector<int64_t> offsets{0, 3, 3, 6, 45}, out(4);
  hash_ids(bytes, offsets.data(), 8, 4, 0, out.data());
  CHECK_EQ(static_cast<uint64_t>(out[0]), of("abc"));
  CHECK_EQ(static_cast<uint64_t>(out[1]), of(""));
  CHECK_EQ(out[2], out[0]);
  CHECK_EQ(static_cast<uint64_t>(out[3]), 0xfbcea83c8a378bf1ull);
  hash_ids(bytes, nullptr, 3, 2, 7, out.data());
  CHECK_EQ(static_cast<uint64_t>(out[0]), of("abc", 7));
  CHECK_EQ(out[1], out[0]);
}
