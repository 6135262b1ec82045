// Catching up (untouched="exact"): rows that batches left alone are brought to where the dense
// optimizer, stepping them with zero gradients, would have them. docs/optimizers.md has the maths.
#pragma once

#include <cstdint>

#include "kernels/rule.hpp"
#include "rules/history.hpp"

namespace hotbed {

// Brings rows to step history.steps(). Of `rows` are used: options, weights, dtype, dim, states,
// slots (nullptr: 0 .. count - 1), count, ids, table_key and last_step, which is read and, where
// it was behind, written. Parallel over rows; a row's result depends on that row alone, so bits do
// not depend on the thread count. Different rows may be caught up by different threads at once.
void catch_up(const RowUpdate& rows, const History& history);

// The smallest entry above zero, or `none` if there is none.
int64_t oldest_step(const int64_t* last_step, int64_t rows, int64_t none);

}  // namespace hotbed
