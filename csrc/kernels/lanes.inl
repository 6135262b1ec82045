// Sums over columns. Element j goes to running sum j % 16, and the sixteen are added pairwise in a
// fixed tree, so a sum has the same bits whether a vector holds 1, 4, 8 or 16 of them.
#pragma once

namespace hotbed::HOTBED_ISA {

constexpr int kLanes = 16;

// The sum of term(0) .. term(count - 1).
template <class C, class Term>
static inline __attribute__((always_inline)) C sum_over_columns(int64_t count, Term term) {
  C lane[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += term(j + l);
  }
  for (int l = 0; j + l < count; ++l) lane[l] += term(j + l);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

}  // namespace hotbed::HOTBED_ISA
