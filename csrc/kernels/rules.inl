// Every optimizer rule, written once over the compute type C: double for f64 rows, float for all
// others. Formulas follow torch.optim (docs/optimizers.md); the options are template arguments, so
// that the loops over columns have no branches.
#pragma once

#include <cmath>

#include "kernels/catch_up.inl"
#include "kernels/lanes.inl"
#include "kernels/power.inl"
#include "kernels/rows.inl"

namespace hotbed::HOTBED_ISA {
namespace rules {

// The gradient as the rule sees it, and the row after decoupled decay. `coupled` adds L2.
template <class C, bool coupled>
struct Decay {
  C sign, l2, keep;
  explicit Decay(const RowUpdate& u)
      : sign(u.options.maximize ? C(-1) : C(1)),
        l2(static_cast<C>(u.hyper.weight_decay)),
        keep(static_cast<C>(u.options.decoupled_weight_decay ? 1 - u.hyper.lr * u.hyper.weight_decay
                                                             : 1.0)) {}
  template <class Value>  // one column, or lanes of them
  HOTBED_INLINE Value gradient(const Value& w, const Value& g) const {
    if constexpr (coupled) {
      return sign * g + l2 * w;
    } else {
      return sign * g;
    }
  }
  HOTBED_INLINE C weight(C w) const { return keep * w; }
};

// Columns rules: `kStates` states of dim values, and the new weight from (weight, gradient,
// states).

enum class Momentum { none, heavy_ball, nesterov };

template <class C, Momentum kind>
struct Sgd {
  static constexpr int kStates = kind == Momentum::none ? 0 : 1;
  C lr, momentum, share;
  explicit Sgd(const RowUpdate& u)
      : lr(static_cast<C>(u.hyper.lr)),
        momentum(static_cast<C>(u.hyper.momentum)),
        // torch's first step puts the whole gradient into the buffer
        share(static_cast<C>(u.step <= 1 ? 1.0 : 1 - u.hyper.dampening)) {}
  HOTBED_INLINE C operator()(C w, C g, C& buffer, C&, C&) const {
    if constexpr (kind == Momentum::none) return w - lr * g;
    buffer = momentum * buffer + share * g;
    return w - lr * (kind == Momentum::nesterov ? g + momentum * buffer : buffer);
  }
};

template <class C>
struct Adagrad {
  static constexpr int kStates = 1;
  C lr, eps;
  explicit Adagrad(const RowUpdate& u)
      : lr(static_cast<C>(u.hyper.lr / (1 + static_cast<double>(u.step - 1) * u.hyper.lr_decay))),
        eps(static_cast<C>(u.hyper.eps)) {}
  HOTBED_INLINE C operator()(C w, C g, C& sum, C&, C&) const {
    sum += g * g;
    return w - lr * g / (std::sqrt(sum) + eps);
  }
};

// from + share * (to - from), in the form that is exact at share 1 when share is large.
template <class C>
struct Blend {
  C share, rest;
  bool near;
  explicit Blend(double rest_)
      : share(static_cast<C>(1 - rest_)), rest(static_cast<C>(rest_)), near(rest_ > 0.5) {}
  HOTBED_INLINE C operator()(C from, C to) const {
    C difference = to - from;
    return near ? from + share * difference : to - rest * difference;
  }
};

// Adam's constants of one step; the bias corrections are taken in double.
template <class C>
struct AdamStep {
  Blend<C> first;
  C beta2, share2, step_size, second_scale, eps;
  explicit AdamStep(const RowUpdate& u)
      : first(u.hyper.beta1),
        beta2(static_cast<C>(u.hyper.beta2)),
        share2(static_cast<C>(1 - u.hyper.beta2)),
        step_size(static_cast<C>(u.hyper.lr / one_minus_power(u.hyper.beta1, u.step))),
        second_scale(static_cast<C>(1 / std::sqrt(one_minus_power(u.hyper.beta2, u.step)))),
        eps(static_cast<C>(u.options.plain_eps
                               ? u.hyper.eps / std::sqrt(one_minus_power(u.hyper.beta2, u.step))
                               : u.hyper.eps)) {}
};

template <class C, bool amsgrad>
struct Adam : AdamStep<C> {
  static constexpr int kStates = amsgrad ? 3 : 2;
  using AdamStep<C>::AdamStep;
  HOTBED_INLINE C operator()(C w, C g, C& mean, C& square, C& largest) const {
    mean = this->first(mean, g);
    square = square * this->beta2 + this->share2 * g * g;
    C second = square;
    if constexpr (amsgrad) second = largest = largest > square ? largest : square;
    return w - this->step_size * mean / (std::sqrt(second) * this->second_scale + this->eps);
  }
};

template <class C>
struct Adamax {
  static constexpr int kStates = 2;
  Blend<C> first;
  C beta2, step_size, eps;
  explicit Adamax(const RowUpdate& u)
      : first(u.hyper.beta1),
        beta2(static_cast<C>(u.hyper.beta2)),
        step_size(static_cast<C>(u.hyper.lr / one_minus_power(u.hyper.beta1, u.step))),
        eps(static_cast<C>(u.hyper.eps)) {}
  HOTBED_INLINE C operator()(C w, C g, C& mean, C& largest, C&) const {
    mean = first(mean, g);
    C decayed = largest * beta2, now = std::fabs(g) + eps;
    largest = decayed > now ? decayed : now;
    return w - step_size * mean / largest;
  }
};

template <class C>
struct Adadelta {
  static constexpr int kStates = 2;
  C lr, rho, share, eps;
  explicit Adadelta(const RowUpdate& u)
      : lr(static_cast<C>(u.hyper.lr)),
        rho(static_cast<C>(u.hyper.alpha)),
        share(static_cast<C>(1 - u.hyper.alpha)),
        eps(static_cast<C>(u.hyper.eps)) {}
  HOTBED_INLINE C operator()(C w, C g, C& square, C& delta_square, C&) const {
    square = square * rho + share * g * g;
    C delta = std::sqrt(delta_square + eps) / std::sqrt(square + eps) * g;
    delta_square = delta_square * rho + share * delta * delta;
    return w - lr * delta;
  }
};

// States: the mean square, then the mean gradient if centered, then the momentum buffer.
template <class C, bool centered, bool with_momentum>
struct RmsProp {
  static constexpr int kStates = 1 + centered + with_momentum;
  C lr, alpha, share, eps, momentum;
  Blend<C> mean;
  explicit RmsProp(const RowUpdate& u)
      : lr(static_cast<C>(u.hyper.lr)),
        alpha(static_cast<C>(u.hyper.alpha)),
        share(static_cast<C>(1 - u.hyper.alpha)),
        eps(static_cast<C>(u.hyper.eps)),
        momentum(static_cast<C>(u.hyper.momentum)),
        mean(u.hyper.alpha) {}
  HOTBED_INLINE C operator()(C w, C g, C& square, C& second, C& third) const {
    square = square * alpha + share * g * g;
    C variance = square;
    if constexpr (centered) {
      second = mean(second, g);
      variance = square - second * second;
    }
    C step = g / (std::sqrt(variance) + eps);
    if constexpr (with_momentum) {
      C& buffer = centered ? third : second;
      step = buffer = momentum * buffer + step;
    }
    return w - lr * step;
  }
};

// The minimum of z w + l1 |w| + curvature w^2 / 2.
template <class C>
static HOTBED_INLINE C ftrl_weight(C z, C l1, C curvature) {
  C clipped = z > l1 ? l1 : (z < -l1 ? -l1 : z);
  // No gradient ever and no regularisation: the minimum is not unique, and zero is one.
  return curvature > 0 ? (clipped - z) / curvature : C(0);
}

// McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1, with the
// options of Keras. The usual power -1/2 has a path without pow.
template <class C, bool square_root>
struct Ftrl {
  static constexpr int kStates = 2;
  C l1, shrinkage, inverse_lr, ridge;
  double power;
  explicit Ftrl(const RowUpdate& u)
      : l1(static_cast<C>(u.hyper.l1)),
        shrinkage(static_cast<C>(2 * u.hyper.l2_shrinkage)),
        inverse_lr(static_cast<C>(1 / u.hyper.lr)),
        ridge(static_cast<C>(2 * u.hyper.l2 + u.hyper.beta / u.hyper.lr)),
        power(-u.hyper.lr_power) {}
  HOTBED_INLINE C operator()(C w, C g, C& sum, C& linear, C&) const {
    C before = sum, square = g * g;
    sum = before + square;
    C root, rise;
    if constexpr (square_root) {
      // The difference of the roots, without cancellation.
      C old_root = std::sqrt(before);
      root = std::sqrt(sum);
      C both = root + old_root;
      rise = both > 0 ? square / both : C(0);
    } else {
      double old_power = power_of(static_cast<double>(before), power);
      double new_power = power_of(static_cast<double>(before) + static_cast<double>(square), power);
      root = static_cast<C>(new_power);
      rise = static_cast<C>(new_power - old_power);
    }
    linear += g + shrinkage * w - rise * inverse_lr * w;
    return ftrl_weight(linear, l1, root * inverse_lr + ridge);
  }
};

// Applies a column rule to one row.
template <class C, bool coupled, class Rule>
struct Columns {
  static constexpr bool kOneRate = false;
  static constexpr int kStates = Rule::kStates;
  static constexpr int64_t width(int, int64_t dim) { return dim; }
  Decay<C, coupled> decay;
  Rule rule;
  explicit Columns(const RowUpdate& u) : decay(u), rule(u) {}
  HOTBED_INLINE void operator()(C* weights, C* const* states, const C* grads, int64_t dim) const {
    const Decay<C, coupled> shrink = decay;
    const Rule apply = rule;
    C* __restrict w = weights;
    const C* __restrict g = grads;
    [[maybe_unused]] C* __restrict s0 = states[0];
    [[maybe_unused]] C* __restrict s1 = states[1];
    [[maybe_unused]] C* __restrict s2 = states[2];
#pragma GCC ivdep
    for (int64_t j = 0; j < dim; ++j) {
      C a{}, b{}, c{};
      if constexpr (kStates > 0) a = s0[j];
      if constexpr (kStates > 1) b = s1[j];
      if constexpr (kStates > 2) c = s2[j];
      w[j] = apply(shrink.weight(w[j]), shrink.gradient(w[j], g[j]), a, b, c);
      if constexpr (kStates > 0) s0[j] = a;
      if constexpr (kStates > 1) s1[j] = b;
      if constexpr (kStates > 2) s2[j] = c;
    }
  }
};

// Rules with one step size a row: `square` brings the row's state forward and returns what is under
// the root, `rate` makes the step size of that, and the row is updated by it. In three passes over
// some rows, as a row's sum, root and quotient are one long chain, and those of many rows are not.

template <class C, bool coupled>
static HOTBED_INLINE C mean_square(const Decay<C, coupled>& decay, const C* w, const C* g,
                                   int64_t dim) {
  C sum = sum_over_columns(
      w, g, dim, [&](const auto& weights, const auto& grads) __attribute__((always_inline)) {
        auto d = decay.gradient(weights, grads);
        return d * d;
      });
  return sum / static_cast<C>(dim);
}

// FBGEMM's EXACT_ROWWISE_ADAGRAD: one sum a row, of the mean of squares over the columns.
template <class C, bool coupled>
struct RowwiseAdagrad {
  static constexpr bool kOneRate = true;
  static constexpr int kStates = 1;
  static constexpr int64_t width(int, int64_t) { return 1; }
  Decay<C, coupled> decay;
  Adagrad<C> step;
  explicit RowwiseAdagrad(const RowUpdate& u) : decay(u), step(u) {}
  HOTBED_INLINE C square(const C* weights, C* const* states, const C* grads, int64_t dim) const {
    return states[0][0] += mean_square(decay, weights, grads, dim);
  }
  HOTBED_INLINE C rate(C square) const {
    // A row of zero gradients and eps 0 would give 0 / 0 in every column.
    C divisor = std::sqrt(square) + step.eps;
    return divisor > 0 ? step.lr / divisor : C(0);
  }
  HOTBED_INLINE void operator()(C* weights, C* const*, const C* grads, int64_t dim, C rate) const {
    const Decay<C, coupled> shrink = decay;
    C* __restrict w = weights;
    const C* __restrict g = grads;
#pragma GCC ivdep
    for (int64_t j = 0; j < dim; ++j) {
      w[j] = shrink.weight(w[j]) - rate * shrink.gradient(w[j], g[j]);
    }
  }
};

// Adam whose second moment is one value a row: of the mean of squares over the columns.
template <class C, bool coupled, bool amsgrad>
struct RowwiseAdam {
  static constexpr bool kOneRate = true;
  static constexpr int kStates = amsgrad ? 3 : 2;
  static constexpr int64_t width(int state, int64_t dim) { return state == 0 ? dim : 1; }
  Decay<C, coupled> decay;
  AdamStep<C> step;
  explicit RowwiseAdam(const RowUpdate& u) : decay(u), step(u) {}
  HOTBED_INLINE C square(const C* weights, C* const* states, const C* grads, int64_t dim) const {
    C square = states[1][0] * step.beta2 + step.share2 * mean_square(decay, weights, grads, dim);
    states[1][0] = square;
    if constexpr (amsgrad) square = states[2][0] = states[2][0] > square ? states[2][0] : square;
    return square;
  }
  HOTBED_INLINE C rate(C square) const {
    C divisor = std::sqrt(square) * step.second_scale + step.eps;
    return divisor > 0 ? step.step_size / divisor : C(0);
  }
  HOTBED_INLINE void operator()(C* weights, C* const* states, const C* grads, int64_t dim,
                                C rate) const {
    const Decay<C, coupled> shrink = decay;
    const Blend<C> first = step.first;
    C* __restrict w = weights;
    C* __restrict mean = states[0];
    const C* __restrict g = grads;
#pragma GCC ivdep
    for (int64_t j = 0; j < dim; ++j) {
      C m = first(mean[j], shrink.gradient(w[j], g[j]));
      mean[j] = m;
      w[j] = shrink.weight(w[j]) - rate * m;
    }
  }
};

// Binds the options of a rule, so that it is a template over C alone.
template <bool coupled, template <class> class Rule>
struct Bind {
  template <class C>
  using Row = Columns<C, coupled, Rule<C>>;
};
template <Momentum kind>
struct BindSgd {
  template <class C>
  using Rule = Sgd<C, kind>;
};
template <bool amsgrad>
struct BindAdam {
  template <class C>
  using Rule = Adam<C, amsgrad>;
};
template <bool centered, bool with_momentum>
struct BindRmsProp {
  template <class C>
  using Rule = RmsProp<C, centered, with_momentum>;
};
template <bool square_root>
struct BindFtrl {
  template <class C>
  using Rule = Ftrl<C, square_root>;
};
template <bool coupled>
struct BindRowwiseAdagrad {
  template <class C>
  using Row = RowwiseAdagrad<C, coupled>;
};
template <bool coupled, bool amsgrad>
struct BindRowwiseAdam {
  template <class C>
  using Row = RowwiseAdam<C, coupled, amsgrad>;
};

template <bool coupled>
static void run_rule(const RowUpdate& u, const Range& range) {
  const RuleOptions& o = u.options;
  switch (o.rule) {
    case Rule::sgd:
      if (!o.momentum)
        return run<Bind<coupled, BindSgd<Momentum::none>::Rule>::template Row>(u, range);
      if (!o.nesterov) {
        return run<Bind<coupled, BindSgd<Momentum::heavy_ball>::Rule>::template Row>(u, range);
      }
      return run<Bind<coupled, BindSgd<Momentum::nesterov>::Rule>::template Row>(u, range);
    case Rule::adagrad: return run<Bind<coupled, Adagrad>::template Row>(u, range);
    case Rule::rowwise_adagrad: return run<BindRowwiseAdagrad<coupled>::template Row>(u, range);
    case Rule::adam:
      if (o.amsgrad) return run<Bind<coupled, BindAdam<true>::Rule>::template Row>(u, range);
      return run<Bind<coupled, BindAdam<false>::Rule>::template Row>(u, range);
    case Rule::rowwise_adam:
      if (o.amsgrad) return run<BindRowwiseAdam<coupled, true>::template Row>(u, range);
      return run<BindRowwiseAdam<coupled, false>::template Row>(u, range);
    case Rule::adamax: return run<Bind<coupled, Adamax>::template Row>(u, range);
    case Rule::adadelta: return run<Bind<coupled, Adadelta>::template Row>(u, range);
    case Rule::rmsprop:
      if (o.centered && o.momentum) {
        return run<Bind<coupled, BindRmsProp<true, true>::Rule>::template Row>(u, range);
      }
      if (o.centered) {
        return run<Bind<coupled, BindRmsProp<true, false>::Rule>::template Row>(u, range);
      }
      if (o.momentum) {
        return run<Bind<coupled, BindRmsProp<false, true>::Rule>::template Row>(u, range);
      }
      return run<Bind<coupled, BindRmsProp<false, false>::Rule>::template Row>(u, range);
    case Rule::ftrl:
      if (u.hyper.lr_power == -0.5) {
        return run<Bind<coupled, BindFtrl<true>::Rule>::template Row>(u, range);
      }
      return run<Bind<coupled, BindFtrl<false>::Rule>::template Row>(u, range);
  }
}

}  // namespace rules

// Updates rows [begin, end) of the task; scratch holds dim floats. Threads may take disjoint
// ranges.
static void update_rows(const RowUpdate& u, int64_t begin, int64_t end, void* scratch) {
  rules::Range range{begin, end, scratch};
  bool coupled = u.hyper.weight_decay != 0 && !u.options.decoupled_weight_decay;
  if (coupled) {
    rules::run_rule<true>(u, range);
  } else {
    rules::run_rule<false>(u, range);
  }
}

namespace catching_up {

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
