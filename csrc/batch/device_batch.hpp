// A resolved batch in the form that kernels on a device take.
#pragma once

#include <cstdint>
#include <utility>

#include "batch/batch.hpp"

namespace hotbed {

// The slots of all positions, one feature after the other.
void write_slots(const Batch& batch, int64_t* out);

// The transposed index of the tables whose rows the batch brought up, as hotbed.ops.gpu.transpose
// wants it, each array behind the one before: slots in use (`used` of them, those of table 0
// first), starts (used + 1), order (`taken` positions, counted through all features), where each
// table's slots begin and the last ones end (tables + 1); and the ids of the slots (used).
// Slots below 0 are left out. `out` has room for 4 x positions + tables + 2. Returns (used, taken).
std::pair<int64_t, int64_t> write_index(Batch& batch, int64_t* out);

}  // namespace hotbed
