#include "batch/device_batch.hpp"

#include <algorithm>
#include <vector>

namespace hotbed {

namespace {

// Where the positions of each feature begin among all.
std::vector<int64_t> bases_of(const Batch& batch) {
  std::vector<int64_t> bases;
  int64_t total = 0;
  for (const FeatureBatch& feature : batch.features) {
    bases.push_back(total);
    total += feature.input.count;
  }
  return bases;
}

// Whether the rows of a table have slots for the backward.
bool brought_up(const TableBatch& part) { return part.grouped && !part.frozen; }

}  // namespace

void write_slots(const Batch& batch, int64_t* out) {
  for (const FeatureBatch& feature : batch.features) {
    const FeatureInput& input = feature.input;
    int64_t end = feature.base + input.count;
    bool pooled = input.combiner != Combiner::none;
    batch.parts[input.table].write_slots(feature.base, end, pooled, out);
    out += input.count;
  }
}

std::pair<int64_t, int64_t> write_index(Batch& batch, int64_t* out) {
  std::vector<int64_t> bases = bases_of(batch);
  int64_t used = 0, taken = 0;
  for (TableBatch& part : batch.parts) {
    if (!brought_up(part)) continue;
    part.transpose();
    for (int32_t u = 0; u < part.unique; ++u) {
      if (part.unique_slots[u] < 0) continue;
      ++used;
      taken += part.starts[u + 1] - part.starts[u];
    }
  }
  int64_t *slots = out, *starts = slots + used, *order = starts + used + 1;
  int64_t *tables = order + taken, *ids = tables + batch.parts.size() + 1;
  int64_t at = 0, first = 0;
  for (const TableBatch& part : batch.parts) {
    *tables++ = at;
    for (int32_t u = 0; brought_up(part) && u < part.unique; ++u) {
      if (part.unique_slots[u] < 0) continue;
      slots[at] = part.unique_slots[u];
      ids[at] = part.unique_ids[u];
      starts[at++] = first;
      for (int32_t k = part.starts[u]; k < part.starts[u + 1]; ++k) {
        int32_t position = part.order[k];
        size_t own = part.features.size() > 1 ? part.feature_of[position] : 0;
        int f = part.features[own];
        order[first++] = bases[f] + position - batch.features[f].base;
      }
    }
  }
  *tables = at;
  starts[at] = first;
  return {used, taken};
}

}  // namespace hotbed
