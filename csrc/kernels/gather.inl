// Gather and pool: one feature, bags [begin, end).

namespace hotbed::HOTBED_ISA {

template <class T>
static inline const T* row_of(const GatherTask& task, int64_t slot) {
  return slot >= 0 ? reinterpret_cast<const T*>(task.rows) + slot * task.dim
                   : reinterpret_cast<const T*>(task.scratch) + (-1 - slot) * task.dim;
}

template <class T>
static HOTBED_INLINE void prefetch_slot(const GatherTask& task, int64_t slot) {
  if (slot != INT64_MIN) {
    prefetch(row_of<T>(task, slot), task.dim * static_cast<int64_t>(sizeof(T)));
  }
}

// The rows of positions [first, last) that no earlier position fetches.
template <class T>
static HOTBED_INLINE void prefetch_first(const GatherTask& task, int64_t first, int64_t last) {
  int64_t early = first + rows_ahead(task.dim * static_cast<int64_t>(sizeof(T)));
  for (int64_t p = first; p < early && p < last; ++p) prefetch_slot<T>(task, task.slots[p]);
}

// Copies n floats past the caches: an output larger than they are is not read from them anyway, and
// a plain store would first fetch the line it overwrites. `out` is aligned to 64 bytes.
static inline void stream_row(const float* row, int64_t n, float* out) {
  int64_t j = 0;
#if defined(__AVX512F__)
  for (; j + 16 <= n; j += 16) _mm512_stream_ps(out + j, _mm512_loadu_ps(row + j));
#elif defined(__SSE2__)
  for (; j + 4 <= n; j += 4) _mm_stream_ps(out + j, _mm_loadu_ps(row + j));
#endif
  for (; j < n; ++j) out[j] = row[j];
}

static void gather_stream(const GatherTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim, ahead = rows_ahead(dim * static_cast<int64_t>(sizeof(float)));
  prefetch_first<float>(task, begin, end);
  for (int64_t b = begin; b < end; ++b) {
    if (b + ahead < end) prefetch_slot<float>(task, task.slots[b + ahead]);
    stream_row(row_of<float>(task, task.slots[b]), dim,
               static_cast<float*>(task.out) + b * task.out_stride);
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// One id a bag and nothing to weigh: a copy.
template <class T, class C>
static void gather_copy(const GatherTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim, ahead = rows_ahead(dim * static_cast<int64_t>(sizeof(T)));
  prefetch_first<T>(task, begin, end);
  for (int64_t b = begin; b < end; ++b) {
    if (b + ahead < end) prefetch_slot<T>(task, task.slots[b + ahead]);
    C* out = static_cast<C*>(task.out) + b * task.out_stride;
    int64_t slot = task.slots[b];
    if (slot == INT64_MIN) {
      for (int64_t j = 0; j < dim; ++j) out[j] = 0;
      continue;
    }
    const T* row = row_of<T>(task, slot);
    for (int64_t j = 0; j < dim; ++j) out[j] = decode(row[j]);
  }
}

// Columns that are summed in registers at a time.
constexpr int64_t kSummed = 64;

// Columns [column, column + width) of one bag, positions in their order; width <= W. `lead` fetches
// ahead what later positions need.
template <class T, class C, int W, bool weighted>
static HOTBED_INLINE void sum_columns(const GatherTask& task, int64_t first, int64_t stop,
                                      int64_t last, int64_t column, int64_t width, bool lead,
                                      C* out) {
  const C* weights = static_cast<const C*>(task.weights);
  const int64_t ahead = rows_ahead(task.dim * static_cast<int64_t>(sizeof(T)));
  C sums[W] = {};
  for (int64_t p = first; p < stop; ++p) {
    if (lead && p + ahead < last) prefetch_slot<T>(task, task.slots[p + ahead]);
    int64_t slot = task.slots[p];
    if (slot == task.padding_slot || slot == INT64_MIN) continue;
    const T* row = row_of<T>(task, slot) + column;
    for (int64_t j = 0; j < width; ++j) {
      C value = static_cast<C>(decode(row[j]));
      sums[j] += weighted ? weights[p] * value : value;
    }
  }
  for (int64_t j = 0; j < width; ++j) out[column + j] = sums[j];
}

template <class T, class C, bool weighted>
static void sum_bag(const GatherTask& task, int64_t first, int64_t stop, int64_t last, C* out) {
  int64_t column = 0;
  for (; column + kSummed <= task.dim; column += kSummed) {
    sum_columns<T, C, kSummed, weighted>(task, first, stop, last, column, kSummed, column == 0,
                                         out);
  }
  for (; column + 16 <= task.dim; column += 16) {
    sum_columns<T, C, 16, weighted>(task, first, stop, last, column, 16, column == 0, out);
  }
  if (column < task.dim) {
    sum_columns<T, C, 16, weighted>(task, first, stop, last, column, task.dim - column, column == 0,
                                    out);
  }
}

// What the sum of a bag is divided by.
template <class C>
static C divisor_of(const GatherTask& task, int64_t first, int64_t stop) {
  const C* weights = static_cast<const C*>(task.weights);
  C total = 0;  // ids, or their weights
  C squares = 0;
  for (int64_t p = first; p < stop; ++p) {
    int64_t slot = task.slots[p];
    if (slot == task.padding_slot || slot == INT64_MIN) continue;
    C weight = weights ? weights[p] : C(1);
    total += weight;
    squares += weight * weight;
  }
  return task.combiner == Combiner::mean ? total : static_cast<C>(__builtin_sqrt(squares));
}

template <class T, class C>
static void gather_bags(const GatherTask& task, int64_t begin, int64_t end) {
  int64_t last = task.offsets ? task.offsets[end] : end * task.fixed;
  prefetch_first<T>(task, task.offsets ? task.offsets[begin] : begin * task.fixed, last);
  for (int64_t b = begin; b < end; ++b) {
    int64_t first = task.offsets ? task.offsets[b] : b * task.fixed;
    int64_t stop = task.offsets ? task.offsets[b + 1] : first + task.fixed;
    C* out = static_cast<C*>(task.out) + b * task.out_stride;
    if (task.weights) {
      sum_bag<T, C, true>(task, first, stop, last, out);
    } else {
      sum_bag<T, C, false>(task, first, stop, last, out);
    }
    if (task.combiner == Combiner::sum) continue;
    C divisor = divisor_of<C>(task, first, stop);
    bool empty = divisor == 0;
    for (int64_t j = 0; j < task.dim; ++j) out[j] = empty ? C(0) : out[j] / divisor;
    if (task.inverse) static_cast<C*>(task.inverse)[b] = empty ? 0 : 1 / divisor;
  }
}

template <class T, class C>
static void gather_max(const GatherTask& task, int64_t begin, int64_t end) {
  int64_t dim = task.dim;
  for (int64_t b = begin; b < end; ++b) {
    int64_t first = task.offsets ? task.offsets[b] : b * task.fixed;
    int64_t stop = task.offsets ? task.offsets[b + 1] : first + task.fixed;
    C* out = static_cast<C*>(task.out) + b * task.out_stride;
    int32_t* chosen = task.argmax + b * dim;
    bool none = true;
    for (int64_t j = 0; j < dim; ++j) {
      out[j] = 0;
      chosen[j] = -1;
    }
    for (int64_t p = first; p < stop; ++p) {
      int64_t slot = task.slots[p];
      if (slot == task.padding_slot || slot == INT64_MIN) continue;
      const T* row = row_of<T>(task, slot);
      auto position = static_cast<int32_t>(task.base + p);
      for (int64_t j = 0; j < dim; ++j) {
        C value = decode(row[j]);
        bool larger = none || value > out[j] || value != value;
        out[j] = larger ? value : out[j];
        chosen[j] = larger ? position : chosen[j];
      }
      none = false;
    }
  }
}

template <class T, class C>
static void gather_typed(const GatherTask& task, int64_t begin, int64_t end) {
  bool single = !task.offsets && task.fixed == 1 && !task.weights;
  if (task.combiner == Combiner::max) {
    gather_max<T, C>(task, begin, end);
  } else if (task.combiner == Combiner::none || (single && !task.may_skip)) {
    bool aligned = reinterpret_cast<uintptr_t>(task.out) % 64 == 0 && task.out_stride % 16 == 0 &&
                   task.dim % 16 == 0;
    if (task.stream && aligned && !task.may_skip && task.dtype == DType::f32) {
      gather_stream(task, begin, end);
    } else {
      gather_copy<T, C>(task, begin, end);
    }
  } else {
    gather_bags<T, C>(task, begin, end);
  }
}

template <class T, class C>
static void read_typed(const uint8_t* rows, const uint8_t* scratch, int64_t dim, int64_t slot,
                       void* out) {
  const T* row = slot >= 0 ? reinterpret_cast<const T*>(rows) + slot * dim
                           : reinterpret_cast<const T*>(scratch) + (-1 - slot) * dim;
  for (int64_t j = 0; j < dim; ++j) static_cast<C*>(out)[j] = decode(row[j]);
}

static void read_row(const uint8_t* rows, const uint8_t* scratch, DType dtype, int64_t dim,
                     int64_t slot, void* out) {
  switch (dtype) {
    case DType::f32: return read_typed<float, float>(rows, scratch, dim, slot, out);
    case DType::f64: return read_typed<double, double>(rows, scratch, dim, slot, out);
    case DType::f16: return read_typed<f16, float>(rows, scratch, dim, slot, out);
    case DType::bf16: return read_typed<bf16, float>(rows, scratch, dim, slot, out);
  }
}

static void gather(const GatherTask& task, int64_t begin, int64_t end) {
  switch (task.dtype) {
    case DType::f32: return gather_typed<float, float>(task, begin, end);
    case DType::f64: return gather_typed<double, double>(task, begin, end);
    case DType::f16: return gather_typed<f16, float>(task, begin, end);
    case DType::bf16: return gather_typed<bf16, float>(task, begin, end);
  }
}

}  // namespace hotbed::HOTBED_ISA
