// Sums over columns. Element j goes to running sum j % 16, and the sixteen are added pairwise in a
// fixed tree, so a sum has the same bits whether a vector holds 1, 4, 8 or 16 of them.
#pragma once

namespace hotbed::HOTBED_ISA {

constexpr int kLanes = 16;

template <class C, int n>
using Lanes __attribute__((vector_size(n * sizeof(C)))) = C;

template <class C, int n>
static HOTBED_INLINE C sum_of_lanes(const Lanes<C, n>& lane) {
  if constexpr (n == 2) {
    return lane[0] + lane[1];
  } else {
    Lanes<C, n / 2> low, high;
    __builtin_memcpy(&low, &lane, sizeof low);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&lane) + sizeof low, sizeof high);
    return sum_of_lanes<C, n / 2>(low + high);
  }
}

template <class C>
static HOTBED_INLINE Lanes<C, kLanes> load_lanes(const C* from, int64_t count) {
  Lanes<C, kLanes> lane = {};
  if (count >= kLanes) {
    __builtin_memcpy(&lane, from, sizeof lane);
  } else {
    for (int l = 0; l < count; ++l) lane[l] = from[l];
  }
  return lane;
}

// The sum of term(a, b) over the columns of two rows; of zeros it is 0, and it is never -0.
template <class C, class Term>
static HOTBED_INLINE C sum_over_columns(const C* a, const C* b, int64_t count, Term term) {
  Lanes<C, kLanes> lane = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    lane += term(load_lanes(a + j, kLanes), load_lanes(b + j, kLanes));
  }
  if (j < count) lane += term(load_lanes(a + j, count - j), load_lanes(b + j, count - j));
  return sum_of_lanes<C, kLanes>(lane);
}

}  // namespace hotbed::HOTBED_ISA
