// Walks over the rows of an update, for any rule: fetches them ahead, decodes and rounds those of
// 16 bits.
#pragma once

#include <cmath>

#include "base/prefetch.hpp"
#include "base/random.hpp"
#include "kernels/codec.hpp"
#include "kernels/lanes.inl"
#include "kernels/rule.hpp"

namespace hotbed::HOTBED_ISA {
namespace rules {

// Runs a row rule over rows [begin, end) of a task whose rows hold C; `whole`: a multiple of 16.
template <class C, class Row, bool whole>
static void update_full(const RowUpdate& u, int64_t begin, int64_t end) {
  const Row row(u);
  const int64_t dim = whole ? u.dim & ~int64_t{15} : u.dim;
  const int64_t* slots = u.slots;
  C* weights = static_cast<C*>(u.weights);
  const C* grads = static_cast<const C*>(u.grads);
  C* states[kMaxStates] = {};
  int64_t width[kMaxStates] = {};
  for (int k = 0; k < Row::kStates; ++k) {
    states[k] = static_cast<C*>(u.states[k]);
    width[k] = Row::width(k, dim);
  }
  auto ahead = [&](int64_t i) __attribute__((always_inline)) {
    prefetch<Use::write>(weights + slots[i] * dim, dim * static_cast<int64_t>(sizeof(C)));
    for (int k = 0; k < Row::kStates; ++k) {
      prefetch<Use::write>(states[k] + slots[i] * width[k],
                           width[k] * static_cast<int64_t>(sizeof(C)));
    }
    if (u.last_step) __builtin_prefetch(u.last_step + slots[i], 1, 3);
  };
  const int64_t early = rows_ahead(dim * static_cast<int64_t>(sizeof(C)));
  // Calls pass(row's number, weights, states, gradient).
  auto each = [&](int64_t first, int64_t last, auto pass) __attribute__((always_inline)) {
    for (int64_t i = first; i < last; ++i) {
      C* at[kMaxStates] = {};
      for (int k = 0; k < Row::kStates; ++k) at[k] = states[k] + slots[i] * width[k];
      pass(i, weights + slots[i] * dim, at, grads + i * dim);
    }
  };
  for (int64_t i = begin; i < begin + early && i < end; ++i) ahead(i);
  if constexpr (Row::kOneRate) {
    constexpr int64_t kRows = 16;
    const int64_t at_once = dim <= 256 ? kRows : 1;  // rows that stay in the first cache
    for (int64_t i = begin; i < end; i += at_once) {
      int64_t last = i + at_once < end ? i + at_once : end;
      C rates[kRows] = {};
      each(i, last, [&](int64_t r, C* w, C* const* at, const C* g) __attribute__((always_inline)) {
        if (r + early < end) ahead(r + early);
        rates[r - i] = row.square(w, at, g, dim);
      });
      for (C& rate : rates) rate = row.rate(rate);
      each(i, last, [&](int64_t r, C* w, C* const* at, const C* g) __attribute__((always_inline)) {
        row(w, at, g, dim, rates[r - i]);
      });
    }
  } else {
    each(begin, end, [&](int64_t i, C* w, C* const* at, const C* g) __attribute__((always_inline)) {
      if (i + early < end) ahead(i + early);
      row(w, at, g, dim);
    });
  }
  if (u.last_step) {
    for (int64_t i = begin; i < end; ++i) u.last_step[slots[i]] = u.step;
  }
}

// Writes a row back with stochastic rounding; the low 32 bits of each column's stream are used.
template <class H>
static HOTBED_INLINE void round_row(const float* from, uint64_t stream, H* to, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) {
    uint64_t bits = column_bits(stream, static_cast<uint64_t>(j));
    to[j] = encode_stochastic<H>(from[j], static_cast<uint32_t>(bits));
  }
}

// The same for rows of 16 bits: through `scratch`, which holds dim floats.
template <class Row, class H>
static void update_half(const RowUpdate& u, int64_t begin, int64_t end, float* scratch) {
  const Row row(u);
  const int64_t dim = u.dim;
  H* weights = static_cast<H*>(u.weights);
  const float* grads = static_cast<const float*>(u.grads);
  auto state = [&](int k, int64_t i) {
    return static_cast<float*>(u.states[k]) + u.slots[i] * Row::width(k, dim);
  };
  auto ahead = [&](int64_t i) __attribute__((always_inline)) {
    prefetch<Use::write>(weights + u.slots[i] * dim, dim * 2);
    for (int k = 0; k < Row::kStates; ++k)
      prefetch<Use::write>(state(k, i), Row::width(k, dim) * 4);
  };
  const int64_t early = rows_ahead(dim * 2);
  for (int64_t i = begin; i < begin + early && i < end; ++i) ahead(i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + early < end) ahead(i + early);
    int64_t slot = u.slots[i];
    H* at = weights + slot * dim;
    for (int64_t j = 0; j < dim; ++j) scratch[j] = decode(at[j]);
    float* states[kMaxStates] = {};
    for (int k = 0; k < Row::kStates; ++k) states[k] = state(k, i);
    if constexpr (Row::kOneRate) {
      row(scratch, states, grads + i * dim, dim,
          row.rate(row.square(scratch, states, grads + i * dim, dim)));
    } else {
      row(scratch, states, grads + i * dim, dim);
    }
    int64_t id = u.ids ? u.ids[slot] : slot;
    uint64_t purpose = static_cast<uint64_t>(u.step) + 1;
    round_row(scratch, row_stream(u.table_key, u.origin, id, purpose), at, dim);
    if (u.last_step) u.last_step[slot] = u.step;
  }
}

struct Range {
  int64_t begin, end;
  void* scratch;
};

// From options to template arguments. `Row<C>` is a row rule over C.
template <template <class> class Row>
static void run(const RowUpdate& u, const Range& range) {
  switch (u.dtype) {
    case DType::f32:
      return u.dim % 16 ? update_full<float, Row<float>, false>(u, range.begin, range.end)
                        : update_full<float, Row<float>, true>(u, range.begin, range.end);
    case DType::f64: return update_full<double, Row<double>, false>(u, range.begin, range.end);
    case DType::f16:
      return update_half<Row<float>, f16>(u, range.begin, range.end,
                                          static_cast<float*>(range.scratch));
    case DType::bf16:
      return update_half<Row<float>, bf16>(u, range.begin, range.end,
                                           static_cast<float*>(range.scratch));
  }
}

}  // namespace rules

// The first element of values[0 .. count) that is infinite or NaN, or -1.
template <class C, class Bits>
static int64_t first_non_finite_of(const C* values, int64_t count, Bits exponent) {
  constexpr int64_t kBlock = 4096;
  const Bits* bits = reinterpret_cast<const Bits*>(values);
  for (int64_t start = 0; start < count; start += kBlock) {
    int64_t end = start + kBlock < count ? start + kBlock : count;
    Bits found = 0;
    for (int64_t j = start; j < end; ++j)
      found |= (bits[j] & exponent) == exponent ? Bits(1) : Bits(0);
    if (!found) continue;
    for (int64_t j = start; j < end; ++j) {
      if ((bits[j] & exponent) == exponent) return j;
    }
  }
  return -1;
}

static int64_t first_non_finite(const void* values, bool is_double, int64_t count) {
  if (is_double) {
    return first_non_finite_of(static_cast<const double*>(values), count,
                               uint64_t{0x7ff0000000000000});
  }
  return first_non_finite_of(static_cast<const float*>(values), count, uint32_t{0x7f800000});
}

}  // namespace hotbed::HOTBED_ISA
