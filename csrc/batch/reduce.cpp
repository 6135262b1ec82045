#include "batch/reduce.hpp"

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

// How the gradients of some tables are to be summed.
struct Plan {
  std::vector<int> tables;  // that take part
  bool in_order = false;
  bool parallel = false;
  std::vector<std::vector<GradientSource>> sources;  // by table
  std::vector<ReduceTask> tasks;                     // by table
  std::vector<Piece> pieces;

  Plan(Batch& batch, const std::vector<Vectors>& grads, std::vector<int> taking_part);
};

Plan::Plan(Batch& batch, const std::vector<Vectors>& grads, std::vector<int> taking_part)
    : tables(std::move(taking_part)), sources(batch.parts.size()), tasks(batch.parts.size()) {
  int64_t total = 0;
  int64_t largest = 0;
  for (int t : tables) {
    int64_t work = batch.parts[t].count * batch.parts[t].table->dim();
    total += work;
    largest = std::max(largest, work);
  }
  parallel = total > kSerialElements;
  // Whole tables in the order of the batch read every gradient once, in the order it lies in; that
  // needs tables enough to share among the threads. Otherwise a table's slots are shared. Each slot
  // is summed in the order of the batch either way, so the bits are the same.
  in_order = largest * omp_get_max_threads() <= total + total / 8;
  for (int t : tables) {
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
    task.values = nullptr;
    if (in_order) {
      pieces.push_back({t, 0, part.count});
    } else {
      split(t, part, pieces);
    }
  }
}

// Sums one piece into task.values. Whether the sums are finite is found while they are in the
// cache, so that the optimizer need not read them once more.
bool sum_piece(const Plan& plan, const ReduceTask& task, const Piece& piece, int64_t unique) {
  const Kernels& kernel = kernels();
  int64_t begin = 0;
  int64_t end = unique;
  if (plan.in_order) {
    kernel.reduce_in_order(task, piece.end);
  } else {
    begin = piece.begin;
    end = piece.end;
    kernel.reduce(task, begin, end);
  }
  const auto* rows = static_cast<const uint8_t*>(task.values) +
                     begin * task.dim * (task.wide ? sizeof(double) : sizeof(float));
  return kernel.first_non_finite(rows, task.wide, (end - begin) * task.dim) < 0;
}

}  // namespace

std::vector<bool> reduce(Batch& batch, const std::vector<Vectors>& grads,
                         const std::vector<void*>& values) {
  std::vector<int> taking_part;
  for (size_t t = 0; t < batch.parts.size(); ++t) {
    if (values[t] && batch.parts[t].grouped) taking_part.push_back(static_cast<int>(t));
  }
  Plan plan(batch, grads, std::move(taking_part));
  for (int t : plan.tables) plan.tasks[t].values = values[t];
  std::vector<std::atomic<bool>> infinite(batch.parts.size());
#pragma omp parallel for schedule(dynamic) if (plan.parallel && plan.pieces.size() > 1)
  for (size_t i = 0; i < plan.pieces.size(); ++i) {
    const Piece& piece = plan.pieces[i];
    if (!sum_piece(plan, plan.tasks[piece.table], piece, batch.parts[piece.table].unique)) {
      infinite[piece.table] = true;
    }
  }
  std::vector<bool> finite;
  for (const auto& found : infinite) finite.push_back(!found);
  return finite;
}

void reduce_each(Batch& batch, const std::vector<Vectors>& grads, const std::vector<int>& tables,
                 const TakeGradient& take) {
  std::vector<int> taking_part;
  for (int t : tables) {
    if (batch.parts[t].grouped) taking_part.push_back(t);
  }
  Plan plan(batch, grads, std::move(taking_part));
  auto bytes = [&](int t) {
    const ReduceTask& task = plan.tasks[t];
    return batch.parts[t].unique * task.dim * (task.wide ? sizeof(double) : sizeof(float));
  };
  if (plan.in_order) {
#pragma omp parallel for schedule(dynamic) if (plan.parallel && plan.pieces.size() > 1)
    for (size_t i = 0; i < plan.pieces.size(); ++i) {
      // One table's sums at a time: they are used up before they leave the cache.
      static thread_local Buffer<uint8_t> sums;
      const Piece& piece = plan.pieces[i];
      sums.resize(bytes(piece.table));
      ReduceTask task = plan.tasks[piece.table];
      task.values = sums.data();
      bool finite = sum_piece(plan, task, piece, batch.parts[piece.table].unique);
      take(piece.table, sums.data(), finite);
    }
    return;
  }
  size_t at = 0;
  for (int t : plan.tables) {
    Buffer<uint8_t> sums(bytes(t));
    ReduceTask task = plan.tasks[t];
    task.values = sums.data();
    size_t end = at;
    while (end < plan.pieces.size() && plan.pieces[end].table == t) ++end;
    bool finite = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : finite) if (plan.parallel)
    for (size_t i = at; i < end; ++i) {
      finite = sum_piece(plan, task, plan.pieces[i], batch.parts[t].unique) && finite;
    }
    at = end;
    take(t, sums.data(), finite);
  }
}

}  // namespace hotbed
