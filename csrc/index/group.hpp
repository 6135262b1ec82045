// Ids of a batch, each once.
#pragma once

#include <cstdint>

namespace hotbed {

// distinct receives each of n ids once, in the order of their first appearance, and inverse[i] the
// position of ids[i] in it. distinct and inverse have room for n; no two arrays overlap. Returns
// how many are distinct. Throws std::bad_alloc.
int64_t group_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* inverse);

// Which of several ranks keeps a row: id % ranks, from 0 on; or ((h >> 32) * ranks) >> 32, h being
// the finalizer of MurmurHash3 (Austin Appleby, public domain) of the id's bits. An index hashes
// ids by another function, or else all ids of a rank would share leading bits there.
// given: whoever has ids ordered says the owner of each.
enum class OwnerRule { modulo, hash, given };

// Writes the owner of each of n ids. Throws std::invalid_argument where there is no rank.
void find_owners(const int64_t* ids, int64_t n, int64_t ranks, OwnerRule owner_rule,
                 int64_t* owners);

// Orders n ids by their owners, those of one as they come: ordered receives them, place[i] where
// ids[i] went, and sizes[r] how many rank r keeps. No two arrays overlap. Throws
// as find_owners.
void order_by_owner(const int64_t* ids, int64_t n, int64_t ranks, OwnerRule owner_rule,
                    int64_t* ordered, int64_t* place, int64_t* sizes);

// The same by owners that place has until then. Throws std::invalid_argument where one is no rank.
void order_by_given_owner(const int64_t* ids, int64_t n, int64_t ranks, int64_t* ordered,
                          int64_t* place, int64_t* sizes);

}  // namespace hotbed
