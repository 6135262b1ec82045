#include "reduce.hpp"

#include <algorithm>

namespace hotbed {

namespace {

constexpr int64_t kTaskBytes = 256 << 10;

struct Piece {
  int table;
  int64_t begin;
  int64_t end;
};

}  // namespace

void reduce(Batch& batch, const std::vector<Vectors>& grads, const std::vector<void*>& values) {
  size_t count = batch.parts.size();
  std::vector<ReduceTask> tasks(count);
  std::vector<std::vector<GradientSource>> sources(count);
  std::vector<Piece> pieces;
  for (size_t t = 0; t < count; ++t) {
    TableBatch& part = batch.parts[t];
    if (!values[t] || !part.transposed) continue;
    for (int f : part.features) {
      const FeatureBatch& feature = batch.features[f];
      sources[t].push_back({grads[f].data, grads[f].stride, feature.input.weights,
                            feature.scaled ? feature.inverse.data() : nullptr,
                            feature.argmax.size() ? feature.argmax.data() : nullptr, feature.base});
    }
    const GradientSource& first = sources[t][0];
    bool plain =
        sources[t].size() == 1 && first.data && !first.weights && !first.inverse && !first.argmax;
    tasks[t] = ReduceTask{part.table->dtype() == DType::f64,
                          part.table->dim(),
                          part.starts.data(),
                          part.order.data(),
                          part.bag_of.size() ? part.bag_of.data() : nullptr,
                          part.feature_of.size() ? part.feature_of.data() : nullptr,
                          sources[t].data(),
                          plain,
                          values[t]};
    // Split by positions, not by slots: one id may hold a tenth of the batch.
    int64_t total = part.order.size();
    int64_t row_bytes = part.table->dim() * part.table->compute_size();
    int64_t wanted =
        std::clamp<int64_t>(total * row_bytes / kTaskBytes, 1, std::max<int64_t>(1, part.unique));
    int64_t begin = 0;
    for (int64_t i = 1; i <= wanted && begin < part.unique; ++i) {
      const int32_t* starts = part.starts.data();
      int64_t end = i == wanted ? part.unique
                                : std::lower_bound(starts + begin + 1, starts + part.unique,
                                                   static_cast<int32_t>(total * i / wanted)) -
                                      starts;
      if (end > begin) pieces.push_back({static_cast<int>(t), begin, end});
      begin = end;
    }
  }
  const Kernels& kernel = kernels();
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1)
  for (size_t i = 0; i < pieces.size(); ++i) {
    kernel.reduce(tasks[pieces[i].table], pieces[i].begin, pieces[i].end);
  }
  for (size_t t = 0; t < count; ++t) {
    TableBatch& part = batch.parts[t];
    if (!values[t] || !part.transposed) continue;
    part.table->last_unique.assign(part.unique_slots.data(),
                                   part.unique_slots.data() + part.unique);
  }
}

}  // namespace hotbed
