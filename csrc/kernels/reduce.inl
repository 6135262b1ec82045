// Segment sum: gradients of bags → gradients of unique slots, slots [begin, end) of one table.

namespace hotbed::HOTBED_ISA {

template <class C>
static void reduce_plain(const ReduceTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim, row_bytes = dim * static_cast<int64_t>(sizeof(C)),
          early = rows_ahead(row_bytes);
  const GradientSource& source = task.sources[0];
  const C* grads = static_cast<const C*>(source.data);
  int64_t stride = source.stride;
  const int32_t* order = task.order;
  int64_t last = task.starts[end];
  auto bag_of = [&](int64_t at) -> int64_t {
    return task.bag_of ? task.bag_of[order[at]] : order[at];
  };
  for (int64_t u = begin; u < end; ++u) {
    C* out = static_cast<C*>(task.values) + u * dim;
    int64_t first = task.starts[u];
    int64_t stop = task.starts[u + 1];
    for (int64_t at = first; at < stop; ++at) {
      if (at + early < last) {
        prefetch(grads + bag_of(at + early) * stride, row_bytes);
      }
      const C* grad = grads + bag_of(at) * stride;
      if (at == first) {
        for (int64_t j = 0; j < dim; ++j) out[j] = grad[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) out[j] += grad[j];
      }
    }
  }
}

// The gradient of one position, added to the row of its slot.
template <class C>
static inline void add_position(const ReduceTask& task, int64_t p, C* out) {
  int64_t dim = task.dim;
  const GradientSource& source = task.sources[task.feature_of ? task.feature_of[p] : 0];
  if (!source.data) return;
  int64_t bag = task.bag_of ? task.bag_of[p] : p;
  const C* grad = static_cast<const C*>(source.data) + bag * source.stride;
  if (source.argmax) {
    const int32_t* chosen = source.argmax + bag * dim;
    for (int64_t j = 0; j < dim; ++j) out[j] += chosen[j] == p ? grad[j] : C(0);
    return;
  }
  C scale = source.weights ? static_cast<const C*>(source.weights)[p - source.base] : C(1);
  if (source.inverse) scale *= static_cast<const C*>(source.inverse)[bag];
  for (int64_t j = 0; j < dim; ++j) out[j] += scale * grad[j];
}

template <class C>
static void reduce_general(const ReduceTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim;
  for (int64_t u = begin; u < end; ++u) {
    C* out = static_cast<C*>(task.values) + u * dim;
    for (int64_t j = 0; j < dim; ++j) out[j] = 0;
    for (int64_t at = task.starts[u]; at < task.starts[u + 1]; ++at) {
      add_position(task, task.order[at], out);
    }
  }
}

// Gradients are read in the order they lie in, and the rows they are added to stay in the cache.
// Slots are numbered by first appearance, so a slot is new just when it is the next one.
template <class C>
static void reduce_in_order_typed(const ReduceTask& task, int64_t positions) {
  int64_t dim = task.dim, row_bytes = dim * static_cast<int64_t>(sizeof(C)),
          early = rows_ahead(row_bytes);
  const int32_t* groups = task.groups;
  C* values = static_cast<C*>(task.values);
  const GradientSource& source = task.sources[0];
  const C* grads = static_cast<const C*>(source.data);
  int64_t seen = 0;
  for (int64_t p = 0; p < positions; ++p) {
    if (p + early < positions) {
      int64_t next = groups[p + early];
      if (next >= 0) {
        prefetch<Use::write>(values + next * dim, row_bytes);
      }
      if (task.plain) {
        int64_t bag = task.bag_of ? task.bag_of[p + early] : p + early;
        prefetch(grads + bag * source.stride, row_bytes);
      }
    }
    int64_t u = groups[p];
    if (u < 0) continue;
    C* out = values + u * dim;
    bool fresh = u == seen;
    seen += fresh;
    if (task.plain) {
      const C* grad = grads + (task.bag_of ? task.bag_of[p] : p) * source.stride;
      if (fresh) {
        for (int64_t j = 0; j < dim; ++j) out[j] = grad[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) out[j] += grad[j];
      }
    } else {
      if (fresh) {
        for (int64_t j = 0; j < dim; ++j) out[j] = 0;
      }
      add_position(task, p, out);
    }
  }
}

static void reduce_in_order(const ReduceTask& task, int64_t positions) {
  task.wide ? reduce_in_order_typed<double>(task, positions)
            : reduce_in_order_typed<float>(task, positions);
}

static void reduce_rows(const ReduceTask& task, int64_t begin, int64_t end) {
  if (task.wide) {
    task.plain ? reduce_plain<double>(task, begin, end) : reduce_general<double>(task, begin, end);
  } else {
    task.plain ? reduce_plain<float>(task, begin, end) : reduce_general<float>(task, begin, end);
  }
}

}  // namespace hotbed::HOTBED_ISA
