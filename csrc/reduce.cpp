#include "reduce.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>

namespace hotbed {

namespace {

constexpr int64_t kTaskBytes = 256 << 10;
// Less work than this is left to the calling thread.
constexpr int64_t kSerialElements = 32 << 10;

struct Piece {
  int table;
  int64_t begin;
  int64_t end;
};

std::vector<GradientSource> sources_of(const Batch& batch, const TableBatch& part,
                                       const std::vector<Vectors>& grads) {
  std::vector<GradientSource> sources;
  for (int f : part.features) {
    const FeatureBatch& feature = batch.features[f];
    sources.push_back({grads[f].data, grads[f].stride, feature.input.weights,
                       feature.scaled ? feature.inverse.data() : nullptr,
                       feature.argmax.size() ? feature.argmax.data() : nullptr, feature.base});
  }
  return sources;
}

// Unique slots of one table in pieces of about as many positions: one id may hold a tenth of the
// batch.
void split(int table, const TableBatch& part, std::vector<Piece>& pieces) {
  int64_t total = part.order.size();
  int64_t row_bytes = part.table->dim() * part.table->compute_size();
  int64_t wanted =
      std::clamp<int64_t>(total * row_bytes / kTaskBytes, 1, std::max<int64_t>(1, part.unique));
  const int32_t* starts = part.starts.data();
  int64_t begin = 0;
  for (int64_t i = 1; i <= wanted && begin < part.unique; ++i) {
    int64_t end = part.unique;
    if (i < wanted) {
      auto target = static_cast<int32_t>(total * i / wanted);
      end = std::lower_bound(starts + begin + 1, starts + part.unique, target) - starts;
    }
    if (end > begin) pieces.push_back({table, begin, end});
    begin = end;
  }
}

}  // namespace

void reduce(Batch& batch, const std::vector<Vectors>& grads, const std::vector<void*>& values) {
  size_t count = batch.parts.size();
  std::vector<int> taking_part;
  int64_t total = 0;
  int64_t largest = 0;
  for (size_t t = 0; t < count; ++t) {
    const TableBatch& part = batch.parts[t];
    if (!values[t] || !part.grouped) continue;
    int64_t work = part.count * part.table->dim();
    taking_part.push_back(static_cast<int>(t));
    total += work;
    largest = std::max(largest, work);
  }
  // Whole tables in the order of the batch read every gradient once, in the order it lies in; that
  // needs tables enough to share among the threads. Otherwise a table's slots are shared. Each slot
  // is summed in the order of the batch either way, so the bits are the same.
  bool in_order = largest * omp_get_max_threads() <= total + total / 8;

  std::vector<ReduceTask> tasks(count);
  std::vector<std::vector<GradientSource>> sources(count);
  std::vector<Piece> pieces;
  for (int t : taking_part) {
    TableBatch& part = batch.parts[t];
    if (!in_order) part.transpose();
    sources[t] = sources_of(batch, part, grads);
    const GradientSource& first = sources[t][0];
    ReduceTask& task = tasks[t];
    task.wide = part.table->dtype() == DType::f64;
    task.dim = part.table->dim();
    task.groups = part.groups.data();
    task.starts = part.starts.data();
    task.order = part.order.data();
    task.bag_of = part.bag_of.size() ? part.bag_of.data() : nullptr;
    task.feature_of = part.feature_of.size() ? part.feature_of.data() : nullptr;
    task.sources = sources[t].data();
    task.plain =
        sources[t].size() == 1 && first.data && !first.weights && !first.inverse && !first.argmax;
    task.values = values[t];
    if (in_order) {
      pieces.push_back({t, 0, part.count});
    } else {
      split(t, part, pieces);
    }
  }
  const Kernels& kernel = kernels();
  std::vector<std::atomic<bool>> infinite(count);
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1 && total > kSerialElements)
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const ReduceTask& task = tasks[piece.table];
    int64_t begin = 0;
    int64_t end = batch.parts[piece.table].unique;
    if (in_order) {
      kernel.reduce_in_order(task, piece.end);
    } else {
      begin = piece.begin;
      end = piece.end;
      kernel.reduce(task, begin, end);
    }
    // Checked while it is in the cache, so that the optimizer need not read it once more.
    const auto* rows = static_cast<const uint8_t*>(task.values) +
                       begin * task.dim * (task.wide ? sizeof(double) : sizeof(float));
    if (kernel.first_non_finite(rows, task.wide, (end - begin) * task.dim) >= 0) {
      infinite[piece.table] = true;
    }
  }
  for (int t : taking_part) {
    const TableBatch& part = batch.parts[t];
    part.table->last_unique.assign(part.unique_slots.data(),
                                   part.unique_slots.data() + part.unique);
    part.table->finite_gradient = infinite[t] ? nullptr : values[t];
  }
}

}  // namespace hotbed
