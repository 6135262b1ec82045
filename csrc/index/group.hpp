// Ids of a batch, each once.
#pragma once

#include <cstdint>

namespace hotbed {

// distinct receives each of n ids once, in the order of their first appearance, and inverse[i] the
// position of ids[i] in it. distinct and inverse have room for n; no two arrays overlap. Returns
// how many are distinct. Throws std::bad_alloc.
int64_t group_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* inverse);

}  // namespace hotbed
