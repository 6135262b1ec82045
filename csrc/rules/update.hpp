// Applying a rule to the touched rows of all tables at once, and what has to be known before: that
// the gradients are finite, and that every slot comes once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.hpp"
#include "kernels/rule.hpp"

namespace hotbed {

// One step over all tables, in one parallel region. Every row's result depends on that row alone,
// so neither the thread count nor the instruction set changes a bit of it.
// Called on the training thread only; nothing else may touch the planes meanwhile.
void update(std::span<const RowUpdate> tables);

// A gradient array to be checked.
struct GradientView {
  const void* values = nullptr;  // contiguous
  int64_t count = 0;             // elements
  bool is_double = false;
};

struct NonFinite {
  int64_t array = -1;  // which view; -1: all are finite
  int64_t element = -1;
};

// The first element, by array and then position, that is infinite or NaN.
NonFinite find_non_finite(std::span<const GradientView> arrays);

// Gradient rows whose slots repeat, summed so that each slot comes once. Slots stand in the order
// of their first appearance and the rows of a slot are added in the order given.
template <class C>
struct SummedRows {
  std::vector<int64_t> slots;
  Buffer<C> values;  // slots.size() x dim
};
template <class C>
SummedRows<C> sum_duplicates(const int64_t* slots, const C* values, int64_t count, int64_t dim);

// Whether any slot comes twice.
bool has_duplicates(const int64_t* slots, int64_t count);

}  // namespace hotbed
