// Steps that a row was left out of, as kernels make up for them (untouched="exact").
#pragma once

#include <cstdint>

#include "kernels/rule.hpp"

namespace hotbed {

// The effect of some zero-gradient steps on one column, as far as it is linear: of weight w and
// first moment (or momentum buffer) b, w' = ww w + wb b and b' = bw w + bb b; the second moments
// are multiplied by `second`.
struct Transition {
  double ww = 1, wb = 0, bw = 0, bb = 1, second = 1;
  bool operator==(const Transition&) const = default;
};

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

}  // namespace hotbed
