// Rows of files: decode and pool in one pass.
#pragma once

#include "kernels/stored_rows.hpp"
#include "kernels/vectors.inl"

namespace hotbed::HOTBED_ISA {
namespace stored {

// Bytes of sixteen columns.
constexpr int64_t bytes_of_16(StoredAs how) {
  return how == StoredAs::f32 ? 64 : how == StoredAs::f16 ? 32 : how == StoredAs::int8 ? 16 : 8;
}

template <StoredAs how>
static HOTBED_INLINE const uint8_t* numbers_of(const StoredRows& file, int64_t row,
                                               int64_t column) {
  return file.rows + row * file.row_bytes + column / 16 * bytes_of_16(how);
}

// A row from a column on, of which load(k) gives the k-th sixteen columns. A `tail` of fewer is
// read by itself: behind the last row of a file there is nothing to read.
template <StoredAs how>
struct Row;

template <>
struct Row<StoredAs::f32> {
  const uint8_t* numbers;
  HOTBED_INLINE Row(const StoredRows& file, int64_t row, int64_t column)
      : numbers(numbers_of<StoredAs::f32>(file, row, column)) {}
  HOTBED_INLINE explicit Row(const float* from) : numbers(reinterpret_cast<const uint8_t*>(from)) {}
  HOTBED_INLINE Floats16 load(int k) const { return of_floats(numbers + 64 * k); }
  HOTBED_INLINE Floats16 tail(int64_t count) const {
#if defined(__AVX512F__)
    auto mask = static_cast<__mmask16>((1u << count) - 1);
    return {_mm512_maskz_loadu_ps(mask, numbers)};
#else
    float some[16] = {};
    std::memcpy(some, numbers, count * 4);
    return of_floats(some);
#endif
  }
};

template <>
struct Row<StoredAs::f16> {
  const uint8_t* numbers;
  HOTBED_INLINE Row(const StoredRows& file, int64_t row, int64_t column)
      : numbers(numbers_of<StoredAs::f16>(file, row, column)) {}
  HOTBED_INLINE Floats16 load(int k) const { return of_halves(numbers + 32 * k); }
  HOTBED_INLINE Floats16 tail(int64_t count) const {
#if defined(__AVX512F__)
    auto mask = static_cast<__mmask16>((1u << count) - 1);
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, numbers))};
#else
    uint16_t some[16] = {};
    std::memcpy(some, numbers, count * 2);
    return of_halves(some);
#endif
  }
};

template <>
struct Row<StoredAs::int8> {
  const uint8_t* numbers;
  Floats16 scale, offset;
  HOTBED_INLINE Row(const StoredRows& file, int64_t row, int64_t column)
      : numbers(numbers_of<StoredAs::int8>(file, row, column)) {
    float both[2];
    std::memcpy(both, file.scales + row * 8, sizeof both);
    scale = splat(both[0]);
    offset = splat(both[1]);
  }
  HOTBED_INLINE Floats16 load(int k) const { return of_bytes(numbers + 16 * k) * scale + offset; }
  HOTBED_INLINE Floats16 tail(int64_t count) const {
#if defined(__AVX512F__)
    auto mask = static_cast<__mmask16>((1u << count) - 1);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, numbers));
    return Floats16{_mm512_cvtepi32_ps(wide)} * scale + offset;
#else
    uint8_t some[16] = {};
    std::memcpy(some, numbers, count);
    return of_bytes(some) * scale + offset;
#endif
  }
};

static HOTBED_INLINE float half_at(const uint8_t* at) {
  f16 half;
  std::memcpy(&half, at, sizeof half);
  return decode(half);
}

template <>
struct Row<StoredAs::int4> {
  const uint8_t* numbers;
#if defined(__AVX512F__)
  __m512 values;  // what the numbers from 0 to 15 stand for
  HOTBED_INLINE Row(const StoredRows& file, int64_t row, int64_t column)
      : numbers(numbers_of<StoredAs::int4>(file, row, column)) {
    int32_t both;
    std::memcpy(&both, file.scales + row * 4, sizeof both);
    __m128 floats = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
    __m512 scale = _mm512_broadcastss_ps(floats);
    __m512 offset = _mm512_broadcastss_ps(_mm_movehdup_ps(floats));
    const __m512 every = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    values = _mm512_add_ps(_mm512_mul_ps(every, scale), offset);
  }
  HOTBED_INLINE Floats16 of_eight(const void* bytes) const {
    return {_mm512_permutexvar_ps(nibbles(bytes), values)};
  }
#else
  Floats16 scale, offset;
  HOTBED_INLINE Row(const StoredRows& file, int64_t row, int64_t column)
      : numbers(numbers_of<StoredAs::int4>(file, row, column)),
        scale(splat(half_at(file.scales + row * 4))),
        offset(splat(half_at(file.scales + row * 4 + 2))) {}
  HOTBED_INLINE Floats16 of_eight(const void* bytes) const {
    return of_nibbles(bytes) * scale + offset;
  }
#endif
  HOTBED_INLINE Floats16 load(int k) const { return of_eight(numbers + 8 * k); }
  HOTBED_INLINE Floats16 tail(int64_t count) const {
    uint64_t some = 0;
    std::memcpy(&some, numbers, (count + 1) / 2);
    return of_eight(&some);
  }
};

// The file of a position that has a row, and which row of it that is. `plain`: as of StoredTask.
template <bool plain>
static HOTBED_INLINE const StoredRows& file_of(const StoredTask& task, int64_t row) {
  return task.layers[plain ? 0 : row >> kLayerBit];
}
template <bool plain>
static HOTBED_INLINE int64_t row_in_file(int64_t row) {
  return plain ? row : row & kRowMask;
}

// Rows that are fetched ahead: fewer of long ones, as more would not be on their way at once.
static HOTBED_INLINE int64_t rows_before(int64_t row_bytes) { return row_bytes <= 256 ? 64 : 32; }

// Fetches 16 n columns, with the first of them the scale. `splits`: all bits where they may lie in
// one line more than they need, else 0. Where a task is plain there are no branches: with them, how
// often a loop runs is predicted worse.
template <StoredAs how, bool plain, int n>
static HOTBED_INLINE void prefetch_columns(const StoredTask& task, int64_t row, int64_t column,
                                           int64_t splits) {
  constexpr int64_t bytes = n * bytes_of_16(how);
  if (!plain && row < 0) return;
  const StoredRows& file = file_of<plain>(task, row);
  int64_t at = row_in_file<plain>(row);
  const uint8_t* start = numbers_of<how>(file, at, column);
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(start + line);
  __builtin_prefetch(start + ((bytes - 1) & splits));
  if (scale_bytes(how) && column == 0) __builtin_prefetch(file.scales + at * scale_bytes(how));
}

// What becomes of the rows of a bag.
enum class Pooling { copied, summed, largest };

struct Bag {
  int64_t first, stop;
  int64_t last;    // position up to which rows are fetched ahead
  int64_t splits;  // as of prefetch_columns()
};

template <Pooling pooling, class Row, int n>
static HOTBED_INLINE void take(const Row& row, int64_t tail, bool is_first, Floats16 (&sums)[n]) {
  for (int k = 0; k < n; ++k) {
    Floats16 x = tail ? row.tail(tail) : row.load(k);
    if (pooling == Pooling::copied || (pooling == Pooling::largest && is_first)) {
      sums[k] = x;
    } else if (pooling == Pooling::largest) {
      sums[k] = larger(sums[k], x);
    } else {
      sums[k] = sums[k] + x;
    }
  }
}

// Columns [column, column + 16 n) of one bag, or `tail` of them, positions in their order.
template <StoredAs how, Pooling pooling, bool plain, int n>
static HOTBED_INLINE void pool_columns(const StoredTask& task, const Bag& bag, int64_t column,
                                       int64_t tail, float* out) {
  const int64_t ahead = rows_before(task.layers->row_bytes);
  Floats16 sums[n];
  for (int k = 0; k < n; ++k) sums[k] = splat(0);
  int64_t count = 0;
  for (int64_t p = bag.first; p < bag.stop; ++p) {
    int64_t later = p + ahead < bag.last ? p + ahead : bag.last - 1;
    prefetch_columns<how, plain, n>(task, task.rows[later], column, bag.splits);
    int64_t row = task.rows[p];
    if (!plain && row == task.skipped) continue;
    if (plain || row >= 0) [[likely]] {
      Row<how> of_file(file_of<plain>(task, row), row_in_file<plain>(row), column);
      take<pooling>(of_file, tail, count == 0, sums);
    } else {
      take<pooling>(Row<StoredAs::f32>(task.missing + column), tail, count == 0, sums);
    }
    ++count;
  }
  if (count > 1 && (task.combiner == Combiner::mean || task.combiner == Combiner::sqrtn)) {
    auto rows = static_cast<float>(count);
    Floats16 divisor = splat(task.combiner == Combiner::mean ? rows : __builtin_sqrtf(rows));
    for (int k = 0; k < n; ++k) sums[k] = sums[k] / divisor;
  }
  if (tail) {
    float some[16];
    store(some, sums[0]);
    std::memcpy(out + column, some, tail * sizeof(float));
    return;
  }
  for (int k = 0; k < n; ++k) store(out + column + 16 * k, sums[k]);
}

// Columns that registers hold, in sixteens.
#if defined(__AVX512F__)
constexpr int kMost = 8;
#else
constexpr int kMost = 4;
#endif

// All bits if a row, or sixteen of its columns, may begin in the midst of a line and end in the
// next, else 0.
static int64_t splits_lines(const StoredTask& task) {
  const StoredRows& file = *task.layers;
  bool begins = reinterpret_cast<uintptr_t>(file.rows) % 64 == 0;
  bool fits = file.row_bytes % 64 == 0 || 64 % file.row_bytes == 0;
  return task.is_plain && begins && fits ? 0 : -1;
}

// Fetches the rows of bags that no earlier position fetches.
template <StoredAs how, bool plain>
static HOTBED_INLINE void prefetch_first(const StoredTask& task, int64_t first, const Bag& bag) {
  const int64_t early = first + rows_before(task.layers->row_bytes);
  for (int64_t p = first; p < early && p < bag.last; ++p) {
    for (int64_t column = 0; column < task.dim; column += 16) {
      prefetch_columns<how, plain, 1>(task, task.rows[p], column, bag.splits);
    }
  }
}

template <StoredAs how, Pooling pooling, bool plain>
static void pool_bags(const StoredTask& task, int64_t begin, int64_t end) {
  Bag bag{begin, end, end, splits_lines(task)};
  if (task.offsets) bag.last = task.offsets[end];
  prefetch_first<how, plain>(task, task.offsets ? task.offsets[begin] : begin, bag);
  for (int64_t b = begin; b < end; ++b) {
    bag.first = task.offsets ? task.offsets[b] : b;
    bag.stop = task.offsets ? task.offsets[b + 1] : b + 1;
    float* out = task.out + b * task.out_stride;
    int64_t column = 0;
    for (; column + 16 * kMost <= task.dim; column += 16 * kMost) {
      pool_columns<how, pooling, plain, kMost>(task, bag, column, 0, out);
    }
    if constexpr (kMost > 4) {
      if (column + 64 <= task.dim) {
        pool_columns<how, pooling, plain, 4>(task, bag, column, 0, out);
        column += 64;
      }
    }
    if (column + 32 <= task.dim) {
      pool_columns<how, pooling, plain, 2>(task, bag, column, 0, out);
      column += 32;
    }
    if (column + 16 <= task.dim) {
      pool_columns<how, pooling, plain, 1>(task, bag, column, 0, out);
      column += 16;
    }
    if (column < task.dim) {
      pool_columns<how, pooling, plain, 1>(task, bag, column, task.dim - column, out);
    }
  }
}

template <StoredAs how>
static void pool_stored_as(const StoredTask& task, int64_t begin, int64_t end) {
  bool plain = task.is_plain;
  switch (task.combiner) {
    case Combiner::none:
      return plain ? pool_bags<how, Pooling::copied, true>(task, begin, end)
                   : pool_bags<how, Pooling::copied, false>(task, begin, end);
    case Combiner::max: return pool_bags<how, Pooling::largest, false>(task, begin, end);
    default:
      return plain ? pool_bags<how, Pooling::summed, true>(task, begin, end)
                   : pool_bags<how, Pooling::summed, false>(task, begin, end);
  }
}

}  // namespace stored

static void pool_stored(const StoredTask& task, int64_t begin, int64_t end) {
  switch (task.layers->stored_as) {
    case StoredAs::f32: return stored::pool_stored_as<StoredAs::f32>(task, begin, end);
    case StoredAs::f16: return stored::pool_stored_as<StoredAs::f16>(task, begin, end);
    case StoredAs::int8: return stored::pool_stored_as<StoredAs::int8>(task, begin, end);
    case StoredAs::int4: return stored::pool_stored_as<StoredAs::int4>(task, begin, end);
  }
}

}  // namespace hotbed::HOTBED_ISA
