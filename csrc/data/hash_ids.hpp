// XXH64, the hash behind hotbed.data.hash_ids (Yann Collet's specification, xxHash 0.1.1).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbed {

// The hash of `size` bytes, the same on every platform. Thread-safe.
uint64_t xxh64(const uint8_t* bytes, size_t size, uint64_t seed);

// out[i] = xxh64 of value i as a two's complement number. Value i is bytes[offsets[i]:offsets[i +
// 1]], or, without offsets, the i-th `width` bytes. One plain loop: DataLoader workers, which are
// forked, must not meet OpenMP.
void hash_ids(const uint8_t* bytes, const int64_t* offsets, size_t width, size_t count,
              uint64_t seed, int64_t* out);

}  // namespace hotbed
