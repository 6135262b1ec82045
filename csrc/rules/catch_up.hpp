// Catching up (untouched="exact"): rows that batches left alone are brought to where the dense
// optimizer, stepping them with zero gradients, would have them. docs/optimizers.md has the maths.
#pragma once

#include <cstdint>

#include "kernels/rule.hpp"
#include "rules/history.hpp"

namespace hotbed {

// Missed steps of Adam whose changes to a weight are taken together. With z = x center / (x center
// + floor) the steps of a segment change the weight by
//     -m (term[0] + term[1] z + term[2] z^2 + ...) / (x center + floor),
// the geometric series of their denominators x s + floor around x center + floor. Every s of a
// segment lies within a tenth of its center, so kTerms terms leave out 1e-10 of the sum.
struct ReplaySegment {
  static constexpr int kTerms = 10;
  double center, floor;
  double term[kTerms];
};

// What one row has to make up for; every row with the same last step shares it. m is the first
// moment before the gap, and x the second one of Adamax or the root of the second one of Adam.
struct MissedSteps {
  Transition across;     // all missed steps
  Hyperparameters last;  // of the last of them
  // Steps one by one: step k changes the weight by -m change[k] / denominator, which is
  // x scale[k] + floor[k] for Adam and max(x scale[k], floor[k]) for Adamax. `change` includes the
  // decay of m until then and of the weight afterwards.
  int64_t replayed = 0;
  const double* change = nullptr;
  const double* scale = nullptr;
  const double* floor = nullptr;
  // Or many steps at once.
  int64_t segment_count = 0;
  const ReplaySegment* segments = nullptr;
};

// Brings rows to step history.steps(). Of `rows` are used: options, weights, dtype, dim, states,
// slots (nullptr: 0 .. count - 1), count, ids, table_key and last_step, which is read and, where
// it was behind, written. Parallel over rows; a row's result depends on that row alone, so bits do
// not depend on the thread count. Different rows may be caught up by different threads at once.
void catch_up(const RowUpdate& rows, const History& history);

// The smallest entry above zero, or `none` if there is none.
int64_t oldest_step(const int64_t* last_step, int64_t rows, int64_t none);

}  // namespace hotbed
