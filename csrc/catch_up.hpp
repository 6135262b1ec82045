// Catching up (untouched="exact"): rows that batches left alone are brought to where the dense
// optimizer, stepping them with zero gradients, would have them. docs/optimizers.md has the maths.
#pragma once

#include <cstdint>

#include "history.hpp"
#include "rules.hpp"

namespace hotbed {

// What one row has to make up for; every row with the same last step shares it.
struct MissedSteps {
  Transition across;     // all missed steps
  Hyperparameters last;  // of the last of them
  // Replay: for missed step k = 0 .. replayed - 1 the weight changes by
  // -m change[k] / denominator(x, k), m being the first moment and x the (root of the) second one
  // before the gap: x scale[k] + floor[k] for the Adam rules, max(x scale[k], floor[k]) for Adamax.
  // `change` includes the decay of m until then and of the weight afterwards.
  int64_t replayed = 0;
  const double* change = nullptr;
  const double* scale = nullptr;
  const double* floor = nullptr;
};

// Brings rows to step history.steps(). Of `rows` are used: options, weights, dtype, dim, states,
// slots (nullptr: 0 .. count - 1), count, ids, table_key and last_step, which is read and, where
// it was behind, written. Parallel over rows; a row's result depends on that row alone, so bits do
// not depend on the thread count. Different rows may be caught up by different threads at once.
void catch_up(const RowUpdate& rows, const History& history);

// The smallest entry above zero, or `none` if there is none.
int64_t oldest_step(const int64_t* last_step, int64_t rows, int64_t none);

}  // namespace hotbed
