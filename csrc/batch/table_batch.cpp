#include "batch/table_batch.hpp"

namespace hotbed {

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
