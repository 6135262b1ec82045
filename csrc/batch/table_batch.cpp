#include "batch/table_batch.hpp"

#include <algorithm>

namespace hotbed {

void TableBatch::write_slots(int64_t begin, int64_t end, bool pooled, int64_t* out) const {
  if (slots) {
    std::copy(slots + begin, slots + end, out);
    return;
  }
  // Padding of tiered tables is in no slot: where it is not pooled it is the first row of scratch.
  int64_t padding = pooled || !table->tiered() ? table->padding_slot() : -1;
  for (int64_t p = begin; p < end; ++p) {
    *out++ = groups[p] < 0 ? padding : unique_slots[groups[p]];
  }
}

void TableBatch::transpose() {
  if (starts.size()) return;
  starts.resize(unique + 1);
  int32_t total = 0;
  for (int64_t g = 0; g < unique; ++g) {
    starts[g] = total;
    total += counts[g];
    counts[g] = starts[g];
  }
  starts[unique] = total;
  order.resize(total);
  for (int64_t p = 0; p < count; ++p) {
    if (groups[p] >= 0) order[counts[groups[p]]++] = static_cast<int32_t>(p);
  }
}

}  // namespace hotbed
