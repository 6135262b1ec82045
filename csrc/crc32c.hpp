// CRC32C (the Castagnoli polynomial, RFC 3720 appendix B.4): the checksum of a block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbed {

// By the processor's instruction where it has one. Thread-safe.
uint32_t crc32c(const void* data, size_t bytes);

// The same number without the instruction.
uint32_t crc32c_software(const void* data, size_t bytes);

}  // namespace hotbed
