#include "pool.hpp"

#include <algorithm>

namespace hotbed {

namespace {

// Bytes of rows a task should move: long enough to be worth scheduling, short enough to balance.
constexpr int64_t kTaskBytes = 256 << 10;

// Outputs beyond this do not stay in the last cache until the model reads them.
constexpr int64_t kCacheBytes = 16 << 20;

struct Piece {
  int feature;
  int64_t begin;
  int64_t end;
};

int64_t positions_of(const FeatureInput& input) { return std::max<int64_t>(1, input.count); }

std::vector<Piece> pieces_of(const Batch& batch, const std::vector<Vectors>& out) {
  std::vector<Piece> pieces;
  for (size_t f = 0; f < batch.features.size(); ++f) {
    const FeatureInput& input = batch.features[f].input;
    int64_t outputs = input.bags;
    if (!out[f].data || outputs == 0) continue;
    int64_t row_bytes = batch.parts[input.table].table->weight_plane().row_bytes();
    int64_t bytes = positions_of(input) * row_bytes;
    int64_t count = std::clamp<int64_t>(bytes / kTaskBytes, 1, outputs);
    for (int64_t i = 0; i < count; ++i) {
      pieces.push_back({static_cast<int>(f), outputs * i / count, outputs * (i + 1) / count});
    }
  }
  return pieces;
}

template <class C>
void weight_gradients_of(const FeatureBatch& feature, const TableBatch& part, const Vectors& grads,
                         const Vectors& outputs, void* result) {
  const FeatureInput& input = feature.input;
  const Table& table = *part.table;
  int64_t dim = table.dim();
  const int64_t* slots = part.slots + feature.base;
  auto* out = static_cast<C*>(result);
  auto* weights = static_cast<const C*>(input.weights);
  std::vector<C> row(dim);
  for (int64_t bag = 0; bag < input.bags; ++bag) {
    int64_t begin = input.offsets ? input.offsets[bag] : bag * input.fixed;
    int64_t end = input.offsets ? input.offsets[bag + 1] : begin + input.fixed;
    const C* grad = static_cast<const C*>(grads.data) + bag * grads.stride;
    const C* pooled = static_cast<const C*>(outputs.data) + bag * outputs.stride;
    C inverse = feature.scaled ? reinterpret_cast<const C*>(feature.inverse.data())[bag] : C(1);
    C pooled_part = 0;
    if (input.combiner != Combiner::sum) {
      for (int64_t j = 0; j < dim; ++j) pooled_part += grad[j] * pooled[j];
    }
    for (int64_t p = begin; p < end; ++p) {
      int64_t slot = slots[p];
      if (slot == table.padding_slot() || slot == INT64_MIN) {
        out[p] = 0;
        continue;
      }
      kernels().read_row(table.weights(), part.scratch.data(), table.dtype(), dim, slot,
                         row.data());
      C dot = 0;
      for (int64_t j = 0; j < dim; ++j) dot += grad[j] * row[j];
      switch (input.combiner) {
        case Combiner::mean: out[p] = (dot - pooled_part) * inverse; break;
        case Combiner::sqrtn:
          out[p] = dot * inverse - pooled_part * weights[p] * inverse * inverse;
          break;
        default: out[p] = dot;
      }
    }
  }
}

}  // namespace

void pool(Batch& batch, const std::vector<Vectors>& out) {
  std::vector<GatherTask> tasks(batch.features.size());
  int64_t output_bytes = 0;
  for (const FeatureBatch& feature : batch.features) {
    const Table& table = *batch.parts[feature.input.table].table;
    output_bytes += feature.input.bags * table.dim() * table.compute_size();
  }
  for (size_t f = 0; f < batch.features.size(); ++f) {
    FeatureBatch& feature = batch.features[f];
    const FeatureInput& input = feature.input;
    const TableBatch& part = batch.parts[input.table];
    const Table& table = *part.table;
    bool averaged = input.combiner == Combiner::mean || input.combiner == Combiner::sqrtn;
    bool single =
        !input.offsets && input.fixed == 1 && !input.weights && !table.initial().has_padding;
    feature.scaled = averaged && !single;
    if (feature.scaled) feature.inverse.resize(input.bags * table.compute_size());
    if (input.combiner == Combiner::max) feature.argmax.resize(input.bags * table.dim());
    tasks[f] = GatherTask{table.weights(),
                          part.scratch.data(),
                          table.dtype(),
                          table.dim(),
                          part.slots + feature.base,
                          input.offsets,
                          input.fixed,
                          input.weights,
                          input.combiner,
                          table.padding_slot(),
                          table.initial().has_padding,
                          output_bytes > kCacheBytes,
                          out[f].data,
                          out[f].stride,
                          feature.scaled ? feature.inverse.data() : nullptr,
                          feature.argmax.data(),
                          feature.base};
  }
  std::vector<Piece> pieces = pieces_of(batch, out);
  const Kernels& kernel = kernels();
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1)
  for (size_t i = 0; i < pieces.size(); ++i) {
    kernel.gather(tasks[pieces[i].feature], pieces[i].begin, pieces[i].end);
  }
}

void weight_gradients(const Batch& batch, const std::vector<Vectors>& grads,
                      const std::vector<Vectors>& outputs, const std::vector<void*>& grad_weights) {
#pragma omp parallel for schedule(dynamic)
  for (size_t f = 0; f < batch.features.size(); ++f) {
    if (!grad_weights[f]) continue;
    const FeatureBatch& feature = batch.features[f];
    const TableBatch& part = batch.parts[feature.input.table];
    if (part.table->dtype() == DType::f64) {
      weight_gradients_of<double>(feature, part, grads[f], outputs[f], grad_weights[f]);
    } else {
      weight_gradients_of<float>(feature, part, grads[f], outputs[f], grad_weights[f]);
    }
  }
}

}  // namespace hotbed
