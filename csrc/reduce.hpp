// Reduce: the gradients of pooled vectors → one gradient a unique slot (the transpose of pool).
#pragma once

#include <cstdint>
#include <vector>

#include "batch.hpp"
#include "pool.hpp"

namespace hotbed {

// For each table, values[t] (unique x dim of compute type, or nullptr: leave the table out) becomes
// the sum over the positions of each unique slot, in the order of the batch.
void reduce(Batch& batch, const std::vector<Vectors>& grads, const std::vector<void*>& values);

}  // namespace hotbed
