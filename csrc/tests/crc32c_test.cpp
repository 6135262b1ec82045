#include "base/crc32c.hpp"

#include <random>

#include "check.hpp"

using hotbed::crc32c;
using hotbed::crc32c_software;

TEST(agrees_with_the_standard) {
  // RFC 3720 B.4, and the usual check value.
  CHECK_EQ(crc32c("123456789", 9), 0xe3069283u);
  std::vector<uint8_t> bytes(32, 0);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x62a8ab43u);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x46dd794eu);
  CHECK_EQ(crc32c(nullptr, 0), 0u);
}

TEST(instruction_and_tables_agree_at_any_length_and_alignment) {
  std::mt19937_64 random(1);
  std::vector<uint8_t> bytes(20000);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (int i = 0; i < 400; ++i) {
    size_t begin = random() % 100;
    size_t length = i < 100 ? i : random() % (bytes.size() - begin);
    CHECK_EQ(crc32c(&bytes[begin], length), crc32c_software(&bytes[begin], length));
  }
  for (size_t length : {4092, 4079, 4080, 4081, 8188, 16380}) {
    CHECK_EQ(crc32c(bytes.data(), length), crc32c_software(bytes.data(), length));
  }
}

TEST(bytes_in_pieces_have_the_checksum_of_the_whole) {
  std::mt19937_64 random(2);
  std::vector<uint8_t> bytes(20000);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (size_t cut : {0, 1, 7, 4080, 12345, 20000}) {
    uint32_t first = crc32c(bytes.data(), cut);
    CHECK_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, first), whole);
    CHECK_EQ(crc32c_software(bytes.data() + cut, bytes.size() - cut, first), whole);
  }
}

TEST(every_flipped_bit_of_a_block_shows) {
  std::vector<uint8_t> block(4092, 0x5a);
  uint32_t whole = crc32c(block.data(), block.size());
  for (size_t bit = 0; bit < block.size() * 8; ++bit) {
    block[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    CHECK(crc32c(block.data(), block.size()) != whole);
    block[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
}
