// Segment sum: gradients of bags → gradients of unique slots, slots [begin, end) of one table.

namespace hotbed::HOTBED_ISA {

constexpr int64_t kReduceAhead = 12;

template <class C>
static void reduce_plain(const ReduceTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim;
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
      if (at + kReduceAhead < last) {
        prefetch_row(reinterpret_cast<const uint8_t*>(grads + bag_of(at + kReduceAhead) * stride),
                     dim * sizeof(C));
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

template <class C>
static void reduce_general(const ReduceTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim;
  for (int64_t u = begin; u < end; ++u) {
    C* out = static_cast<C*>(task.values) + u * dim;
    for (int64_t j = 0; j < dim; ++j) out[j] = 0;
    for (int64_t at = task.starts[u]; at < task.starts[u + 1]; ++at) {
      int64_t p = task.order[at];
      const GradientSource& source = task.sources[task.feature_of ? task.feature_of[p] : 0];
      if (!source.data) continue;
      int64_t bag = task.bag_of ? task.bag_of[p] : p;
      const C* grad = static_cast<const C*>(source.data) + bag * source.stride;
      if (source.argmax) {
        const int32_t* chosen = source.argmax + bag * dim;
        for (int64_t j = 0; j < dim; ++j) out[j] += chosen[j] == p ? grad[j] : C(0);
        continue;
      }
      C scale = source.weights ? static_cast<const C*>(source.weights)[p - source.base] : C(1);
      if (source.inverse) scale *= static_cast<const C*>(source.inverse)[bag];
      for (int64_t j = 0; j < dim; ++j) out[j] += scale * grad[j];
    }
  }
}

static void reduce_rows(const ReduceTask& task, int64_t begin, int64_t end) {
  if (task.wide) {
    task.plain ? reduce_plain<double>(task, begin, end) : reduce_general<double>(task, begin, end);
  } else {
    task.plain ? reduce_plain<float>(task, begin, end) : reduce_general<float>(task, begin, end);
  }
}

}  // namespace hotbed::HOTBED_ISA
