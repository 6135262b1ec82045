// The effect of missed zero-gradient steps on one row: what rules choose from, in
// kernels/rules.inl.
#pragma once

#include <cmath>

#include "base/prefetch.hpp"
#include "kernels/lanes.inl"
#include "kernels/missed_steps.hpp"

namespace hotbed::HOTBED_ISA {
namespace catching_up {

// Sum over the missed steps of change / denominator, for `count` <= kLanes columns at once. `x`
// holds kLanes values.
template <class C, bool largest>
static HOTBED_INLINE void replay(const MissedSteps& missed, const C* x, C* sum) {
  C base[kLanes], total[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) base[l] = x[l];
  for (int64_t k = 0; k < missed.replayed; ++k) {
    C change = static_cast<C>(missed.change[k]);
    C scale = static_cast<C>(missed.scale[k]), floor = static_cast<C>(missed.floor[k]);
    for (int l = 0; l < kLanes; ++l) {
      C scaled = base[l] * scale;
      C denominator = largest ? (scaled > floor ? scaled : floor) : scaled + floor;
      total[l] += change / denominator;
    }
  }
  if constexpr (!largest) {
    for (int64_t i = 0; i < missed.segment_count; ++i) {
      const ReplaySegment& segment = missed.segments[i];
      C center = static_cast<C>(segment.center), floor = static_cast<C>(segment.floor);
      C inverse[kLanes], z[kLanes], series[kLanes] = {};
      for (int l = 0; l < kLanes; ++l) {
        C scaled = base[l] * center;
        inverse[l] = 1 / (scaled + floor);
        z[l] = scaled * inverse[l];
      }
      for (int j = ReplaySegment::kTerms - 1; j >= 0; --j) {
        C term = static_cast<C>(segment.term[j]);
        for (int l = 0; l < kLanes; ++l) series[l] = series[l] * z[l] + term;
      }
      for (int l = 0; l < kLanes; ++l) total[l] += series[l] * inverse[l];
    }
  }
  for (int l = 0; l < kLanes; ++l) sum[l] = total[l];
}

static HOTBED_INLINE bool replays(const MissedSteps& missed) {
  return missed.replayed || missed.segment_count;
}

// Rules whose first moment goes on moving the weight. `largest`: Missed::replays_largest.
template <class C, bool largest>
static void replay_columns(const MissedSteps& missed, int64_t dim, C* w, C* first,
                           const C* second) {
  const C keep = static_cast<C>(missed.across.ww), decay = static_cast<C>(missed.across.bb);
  for (int64_t j = 0; j < dim; j += kLanes) {
    int count = static_cast<int>(dim - j < kLanes ? dim - j : kLanes);
    C x[kLanes], sum[kLanes];
    bool moves = false;
    for (int l = 0; l < kLanes; ++l) x[l] = 1;
    for (int l = 0; l < count; ++l) {
      x[l] = largest ? second[j + l] : std::sqrt(second[j + l]);
      moves |= first[j + l] != 0;
    }
    if (moves && replays(missed)) {
      replay<C, largest>(missed, x, sum);
      for (int l = 0; l < count; ++l) {
        C m = first[j + l];
        w[j + l] = keep * w[j + l] - (m != 0 ? m * sum[l] : C(0));
        first[j + l] = decay * m;
      }
    } else {
      for (int l = 0; l < count; ++l) {
        w[j + l] *= keep;
        first[j + l] *= decay;
      }
    }
  }
}

template <class C>
static void replay_row(const MissedSteps& missed, int64_t dim, C* w, C* first, C second) {
  C x[kLanes], sum[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) x[l] = std::sqrt(second);
  if (replays(missed) && second > 0) replay<C, false>(missed, x, sum);
  const C keep = static_cast<C>(missed.across.ww), decay = static_cast<C>(missed.across.bb);
  for (int64_t j = 0; j < dim; ++j) {
    w[j] = keep * w[j] - first[j] * sum[0];
    first[j] *= decay;
  }
}

template <class C>
static void scale_by(C* values, int64_t count, double factor) {
  C f = static_cast<C>(factor);
  for (int64_t j = 0; j < count; ++j) values[j] *= f;
}

template <class C>
static void linear(const Transition& t, int64_t dim, C* w, C* b) {
  C ww = static_cast<C>(t.ww), wb = static_cast<C>(t.wb);
  C bw = static_cast<C>(t.bw), bb = static_cast<C>(t.bb);
  for (int64_t j = 0; j < dim; ++j) {
    C weight = w[j], buffer = b[j];
    w[j] = ww * weight + wb * buffer;
    b[j] = bw * weight + bb * buffer;
  }
}

}  // namespace catching_up
}  // namespace hotbed::HOTBED_ISA
