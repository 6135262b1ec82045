#include "batch/pool.hpp"

#include <omp.h>

#include <algorithm>
#include <exception>

namespace hotbed {

namespace {

// Bytes of rows a task should move: long enough to be worth scheduling, short enough to balance.
constexpr int64_t kTaskBytes = 256 << 10;
// Less work than this is left to the calling thread.
constexpr int64_t kSerialElements = 32 << 10;

// Outputs beyond this do not stay in the last cache until the model reads them.
constexpr int64_t kCacheBytes = 16 << 20;

// Unique rows of a table up to this size are worth copying together before they are pooled.
constexpr int64_t kStagedBytes = 2 << 20;

// Bags [begin, end) of the feature `index`, or all features of the table `index` by way of staging.
struct Piece {
  int index;
  int64_t begin;
  int64_t end;
  bool staged;
};

int64_t positions_of(const FeatureInput& input) { return std::max<int64_t>(1, input.count); }

// Whether rows that the batch asks for often enough should be fetched once and then copied from the
// cache. Only where whole tables are share enough for the threads.
bool staged(const TableBatch& part, int64_t total_work) {
  if (!part.grouped || part.table->initial().has_padding) return false;
  int64_t dim = part.table->dim();
  return part.count * dim * omp_get_max_threads() <= total_work &&
         part.unique * 5 <= part.count * 4 &&
         part.unique * dim * static_cast<int64_t>(part.table->compute_size()) <= kStagedBytes;
}

std::vector<Piece> pieces_of(const Batch& batch, const std::vector<Vectors>& out,
                             const std::vector<GatherTask>& tasks) {
  int64_t total_work = 0;
  for (const TableBatch& part : batch.parts) total_work += part.count * part.table->dim();
  std::vector<Piece> pieces;
  for (size_t t = 0; t < batch.parts.size(); ++t) {
    const TableBatch& part = batch.parts[t];
    if (part.features.empty()) continue;
    bool pooled = true;
    for (int f : part.features) {
      pooled = pooled && out[f].data && tasks[f].combiner != Combiner::max;
    }
    if (pooled && staged(part, total_work)) {
      pieces.push_back({static_cast<int>(t), 0, 0, true});
      continue;
    }
    for (int f : part.features) {
      const FeatureInput& input = batch.features[f].input;
      if (!out[f].data || input.bags == 0) continue;
      int64_t bytes = positions_of(input) * part.table->weight_plane().row_bytes();
      int64_t count = std::clamp<int64_t>(bytes / kTaskBytes, 1, input.bags);
      for (int64_t i = 0; i < count; ++i) {
        pieces.push_back({f, input.bags * i / count, input.bags * (i + 1) / count, false});
      }
    }
  }
  return pieces;
}

void gather_staged(const Kernels& kernel, const Batch& batch, const TableBatch& part,
                   const std::vector<GatherTask>& tasks) {
  static thread_local Buffer<uint8_t> rows;
  static thread_local Buffer<int64_t> slots;
  const Table& table = *part.table;
  GatherTask fetch = tasks[part.features[0]];
  rows.resize(part.unique * table.dim() * table.compute_size());
  fetch.slots = part.unique_slots.data();
  fetch.offsets = nullptr;
  fetch.fixed = 1;
  fetch.weights = nullptr;
  fetch.combiner = Combiner::none;
  fetch.stream = false;
  fetch.out = rows.data();
  fetch.out_stride = table.dim();
  kernel.gather(fetch, 0, part.unique);
  slots.resize(part.count);
  for (int64_t p = 0; p < part.count; ++p) slots[p] = part.groups[p];
  for (int f : part.features) {
    GatherTask task = tasks[f];
    task.rows = rows.data();
    task.dtype = table.dtype() == DType::f64 ? DType::f64 : DType::f32;
    task.slots = slots.data() + batch.features[f].base;
    kernel.gather(task, 0, batch.features[f].input.bags);
  }
}

// Bags [begin, end) of a feature, whose slots may have to be found: those of a piece stay in the
// cache until they are read.
void gather(const Kernels& kernel, const FeatureBatch& feature, const TableBatch& part,
            GatherTask task, int64_t begin, int64_t end) {
  if (!part.slots) {
    static thread_local Buffer<int64_t> slots;
    int64_t first = task.offsets ? task.offsets[begin] : begin * task.fixed;
    int64_t last = task.offsets ? task.offsets[end] : end * task.fixed;
    slots.resize(last - first);
    bool pooled = task.combiner != Combiner::none;
    part.write_slots(feature.base + first, feature.base + last, pooled, slots.data());
    task.slots = slots.data() - first;
  }
  kernel.gather(task, begin, end);
}

template <class C>
void weight_gradients_of(const FeatureBatch& feature, const TableBatch& part, const Vectors& grads,
                         const Vectors& outputs, void* result) {
  const FeatureInput& input = feature.input;
  const Table& table = *part.table;
  int64_t dim = table.dim();
  auto* out = static_cast<C*>(result);
  auto* weights = static_cast<const C*>(input.weights);
  std::vector<C> row(dim);
  std::vector<int64_t> slots;
  int64_t padding = table.padding_slot();
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
    slots.resize(end - begin);
    part.write_slots(feature.base + begin, feature.base + end, true, slots.data());
    for (int64_t p = begin; p < end; ++p) {
      int64_t slot = slots[p - begin];
      if (slot == padding || slot == INT64_MIN) {
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

void pool(Batch& batch, const std::vector<Vectors>& wanted) {
  std::vector<Vectors> out = wanted;
  std::vector<Buffer<uint8_t>> unread;
  std::vector<GatherTask> tasks(batch.features.size());
  int64_t output_bytes = 0;
  int64_t gathered_elements = 0;
  for (const FeatureBatch& feature : batch.features) {
    const Table& table = *batch.parts[feature.input.table].table;
    gathered_elements += feature.input.count * table.dim();
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
    bool is_max = input.combiner == Combiner::max;
    if (is_max) feature.argmax.resize(input.bags * table.dim());
    if (!out[f].data && (feature.scaled || is_max)) {
      unread.emplace_back().resize(input.bags * table.dim() * table.compute_size());
      out[f] = {unread.back().data(), table.dim()};
    }
    tasks[f] = GatherTask{table.weights(),
                          part.scratch.data(),
                          table.dtype(),
                          table.dim(),
                          part.slots ? part.slots + feature.base : nullptr,
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
  const Kernels& kernel = kernels();
  std::vector<Piece> pieces = pieces_of(batch, out, tasks);
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1 && \
                                                   gathered_elements > kSerialElements)
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    try {
      if (piece.staged) {
        gather_staged(kernel, batch, batch.parts[piece.index], tasks);
      } else {
        const FeatureBatch& feature = batch.features[piece.index];
        const TableBatch& part = batch.parts[feature.input.table];
        gather(kernel, feature, part, tasks[piece.index], piece.begin, piece.end);
      }
    } catch (...) {
#pragma omp critical(hotbed_batch_pool)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
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
