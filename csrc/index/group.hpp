// Ids of a batch, each once.
#pragma once

#include <cstdint>

namespace hotbed {

// distinct receives each of n ids once, in the order of their first appearance, and inverse[i] the
// position of ids[i] in it. distinct and inverse have room for n; no two arrays overlap. Returns
// how many are distinct. Throws std::bad_alloc.
int64_t group_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* inverse);

// Which of several ranks keeps a row: id % ranks, from 0 on; or by a hash, as
// hotbed.sharding.keepers defines both.
enum class Dealing { modulo, hash };

// Orders n ids by their keepers, those of one as they come: ordered receives them, place[i] where
// ids[i] went, and sizes[r] how many rank r keeps. No two arrays overlap.
void order_by_keeper(const int64_t* ids, int64_t n, int64_t ranks, Dealing dealing,
                     int64_t* ordered, int64_t* place, int64_t* sizes);

}  // namespace hotbed
