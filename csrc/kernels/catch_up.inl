// The effect of missed zero-gradient steps on one row, by rule.
#pragma once

#include <cmath>

#include "kernels/missed_steps.hpp"
#include "kernels/rules.inl"

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

// Rules whose first moment goes on moving the weight. `largest`: Adamax.
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

// A weight of FTRL is a function of its states and the numbers of the last step.
template <class C>
static void ftrl(const Hyperparameters& h, int64_t dim, C* w, const C* sum, const C* z) {
  const C l1 = static_cast<C>(h.l1), inverse_lr = static_cast<C>(1 / h.lr);
  const C ridge = static_cast<C>(2 * h.l2 + h.beta / h.lr);
  for (int64_t j = 0; j < dim; ++j) {
    C root = h.lr_power == -0.5
                 ? std::sqrt(sum[j])
                 : static_cast<C>(power_of(static_cast<double>(sum[j]), -h.lr_power));
    w[j] = rules::ftrl_weight(z[j], l1, root * inverse_lr + ridge);
  }
}

template <class C>
static void row(const RuleOptions& o, const MissedSteps& missed, int64_t dim, C* w,
                void* const* states) {
  C* s[kMaxStates];
  for (int k = 0; k < kMaxStates; ++k) s[k] = static_cast<C*>(states[k]);
  const Transition& t = missed.across;
  switch (o.rule) {
    case Rule::sgd:
      if (o.momentum) {
        linear(t, dim, w, s[0]);
      } else {
        scale_by(w, dim, t.ww);
      }
      break;
    case Rule::adagrad:
    case Rule::rowwise_adagrad: scale_by(w, dim, t.ww); break;
    case Rule::adam:
      replay_columns<C, false>(missed, dim, w, s[0], o.amsgrad ? s[2] : s[1]);
      scale_by(s[1], dim, t.second);
      break;
    case Rule::rowwise_adam:
      replay_row<C>(missed, dim, w, s[0], o.amsgrad ? s[2][0] : s[1][0]);
      scale_by(s[1], 1, t.second);
      break;
    case Rule::adamax: {
      replay_columns<C, true>(missed, dim, w, s[0], s[1]);
      C decay = static_cast<C>(t.second), eps = static_cast<C>(missed.last.eps);
      for (int64_t j = 0; j < dim; ++j) {
        C decayed = s[1][j] * decay;
        s[1][j] = decayed > eps ? decayed : eps;
      }
      break;
    }
    case Rule::adadelta:
      scale_by(w, dim, t.ww);
      scale_by(s[0], dim, t.second);
      scale_by(s[1], dim, t.second);
      break;
    case Rule::rmsprop:
      if (o.momentum) {
        linear(t, dim, w, s[o.centered ? 2 : 1]);
      } else {
        scale_by(w, dim, t.ww);
      }
      scale_by(s[0], dim, t.second);
      if (o.centered) scale_by(s[1], dim, t.second);
      break;
    case Rule::ftrl: ftrl(missed.last, dim, w, s[0], s[1]); break;
  }
}

template <class H>
static void half_row(const RuleOptions& o, const MissedSteps& missed, int64_t dim, H* w,
                     void* const* states, uint64_t stream, float* scratch) {
  for (int64_t j = 0; j < dim; ++j) scratch[j] = decode(w[j]);
  row<float>(o, missed, dim, scratch, states);
  rules::round_row(scratch, stream, w, dim);
}

}  // namespace catching_up

// Catches one row up. `stream` is of the rounding, for 16-bit rows; scratch holds dim floats.
static void catch_up_row(const RuleOptions& options, const MissedSteps& missed, DType dtype,
                         int64_t dim, void* weights, void* const* states, uint64_t stream,
                         void* scratch) {
  switch (dtype) {
    case DType::f32:
      return catching_up::row(options, missed, dim, static_cast<float*>(weights), states);
    case DType::f64:
      return catching_up::row(options, missed, dim, static_cast<double*>(weights), states);
    case DType::f16:
      return catching_up::half_row(options, missed, dim, static_cast<f16*>(weights), states, stream,
                                   static_cast<float*>(scratch));
    case DType::bf16:
      return catching_up::half_row(options, missed, dim, static_cast<bf16*>(weights), states,
                                   stream, static_cast<float*>(scratch));
  }
}

}  // namespace hotbed::HOTBED_ISA
