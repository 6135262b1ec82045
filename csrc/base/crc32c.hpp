// CRC32C (the Castagnoli polynomial, RFC 3720 appendix B.4): the checksum of a block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbed {

// Of bytes that follow others whose checksum is `before`. By the processor's instruction where it
// has one. Thread-safe.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The same number without the instruction.
uint32_t crc32c_software(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace hotbed
