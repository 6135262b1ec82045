// Ids of a batch, each once.
#pragma once

#include <cstdint>

namespace hotbed {

// distinct receives each of n ids once, in the order of their first appearance, and inverse[i] the
// position of ids[i] in it. distinct and inverse have room for n; no two arrays overlap. Returns
// how many are distinct. Throws std::bad_alloc.
int64_t group_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* inverse);

// Orders n ids by parts[i], of `count` parts, those of one part as they come: ordered receives
// them, place[i] where ids[i] went, and sizes[p] how many part p has. No two arrays overlap. Throws
// std::out_of_range for a part that there is not.
void order_by_part(const int64_t* ids, const int64_t* parts, int64_t n, int64_t count,
                   int64_t* ordered, int64_t* place, int64_t* sizes);

}  // namespace hotbed
