// Reduce: the gradients of pooled vectors → one gradient a unique slot (the transpose of pool).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "batch/batch.hpp"
#include "batch/pool.hpp"

namespace hotbed {

// For each table, values[t] (unique x dim of compute type, or nullptr: leave the table out) becomes
// the sum over the positions of each unique slot, in the order of the batch. Answers for each table
// whether all of them are finite.
std::vector<bool> reduce(Batch& batch, const std::vector<Vectors>& grads,
                         const std::vector<void*>& values);

// What to do with the gradient of one table: its rows (unique x dim of compute type, gone after the
// call) and whether all of them are finite. May be called by several threads, each with another
// table.
using TakeGradient = std::function<void(int table, const void* rows, bool finite)>;

// The same for `tables`, but each table's gradient is handed to `take` as soon as it is summed,
// while the cache holds it, and kept nowhere.
void reduce_each(Batch& batch, const std::vector<Vectors>& grads, const std::vector<int>& tables,
                 const TakeGradient& take);

}  // namespace hotbed
