#include "rules/history.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace hotbed {

namespace {

double keep_of(const RuleOptions& options, const Hyperparameters& h) {
  return options.decoupled_weight_decay ? 1 - h.lr * h.weight_decay : 1;
}

bool divides_by_largest(const RuleOptions& options) {
  return kind_of(options.rule).missed == Missed::replays_largest;
}

Transition one_step(const RuleOptions& options, const Hyperparameters& h, int64_t step) {
  const RuleKind& kind = kind_of(options.rule);
  Transition t;
  double keep = keep_of(options, h);
  t.ww = keep;
  if (kind.second) t.second = h.*kind.second;
  if (replays(kind)) t.bb = h.beta1;
  if (kind.missed != Missed::linear) return t;
  double l2 = kind.follows_l2 && !options.decoupled_weight_decay ? h.weight_decay : 0;
  if (!options.momentum) {
    t.ww = keep - h.lr * l2;
    return t;
  }
  // The buffer: b' = momentum b + share l2 w; torch's first step takes the whole gradient.
  double share = step == 1 ? 1 : 1 - h.dampening;
  t.bb = h.momentum;
  t.bw = share * l2;
  // The step is b', or l2 w + momentum b' with Nesterov.
  double direct = options.nesterov ? l2 : 0, through = options.nesterov ? h.momentum : 1;
  t.ww = keep - h.lr * (direct + through * t.bw);
  t.wb = -h.lr * through * t.bb;
  return t;
}

Transition power(Transition base, int64_t n) {
  Transition result;
  for (; n > 0; n >>= 1) {
    if (n & 1) result = compose(result, base);
    base = compose(base, base);
  }
  return result;
}

}  // namespace

bool replays(const RuleKind& kind) {
  return kind.missed == Missed::replays || kind.missed == Missed::replays_largest;
}

Transition compose(const Transition& a, const Transition& b) {
  return {b.ww * a.ww + b.wb * a.bw, b.ww * a.wb + b.wb * a.bb, b.bw * a.ww + b.bb * a.bw,
          b.bw * a.wb + b.bb * a.bb, b.second * a.second};
}

double decay_ratio(const RuleOptions& options, const Hyperparameters& h) {
  if (divides_by_largest(options)) return h.beta1 / h.beta2;
  if (options.amsgrad) return h.beta1;
  return h.beta1 / std::sqrt(h.beta2);
}

double moment_bound(const RuleOptions& options, const Hyperparameters& h) {
  // By Cauchy-Schwarz over the gradients that both moments are made of.
  if (divides_by_largest(options)) return (1 - h.beta1) / (1 - h.beta1 / h.beta2);
  double ratio = h.beta1 * h.beta1 / h.beta2;
  return (1 - h.beta1) / std::sqrt((1 - h.beta2) * (1 - ratio));
}

std::string why_not_exact(const RuleOptions& options, const Hyperparameters& h) {
  bool coupled = h.weight_decay != 0 && !options.decoupled_weight_decay;
  const RuleKind& kind = kind_of(options.rule);
  if (kind.missed == Missed::unknown) {
    return std::string(
               "nobody has worked out what steps without a gradient do to rows of the rule ") +
           kind.name + "; use untouched=\"lazy\"";
  }
  if (coupled && !kind.follows_l2) {
    return "weight_decay that is added to the gradient makes every row's steps depend on the row "
           "itself, so missed steps cannot be made up for at once; use decoupled_weight_decay=True";
  }
  if (h.l2_shrinkage != 0) {
    return "l2_shrinkage makes every row's steps depend on the row itself, so missed steps cannot "
           "be made up for at once; use l2";
  }
  if (!replays(kind)) return "";
  if (divides_by_largest(options)) {
    if (h.beta1 < h.beta2) return "";
    return "with betas[0] >= betas[1] the steps of an untouched row do not fade, so replaying them "
           "has no bound";
  }
  if (h.beta1 * h.beta1 < h.beta2) return "";
  return "with betas[0]**2 >= betas[1] the steps of an untouched row do not fade, so replaying "
         "them "
         "has no bound";
}

bool untouched_rows_stay(const RuleOptions& options, const Hyperparameters& h) {
  const RuleKind& kind = kind_of(options.rule);
  return kind.missed == Missed::linear && !kind.second && !options.momentum && h.weight_decay == 0;
}

void History::restart(int64_t steps, const Transition& base, const Hyperparameters& last) {
  steps_ = steps;
  base_ = base;
  last_ = last;
  runs_.clear();
  levels_.clear();
  largest_ratio_ = largest_size_ = 0;
}

History::Kept History::kept() const {
  Kept kept{steps_, base_, largest_ratio_, largest_size_, last_, {}};
  for (const Run& run : runs_) {
    kept.forgotten -= run.count;
    kept.runs.emplace_back(run.count, run.hyper);
  }
  return kept;
}

void History::restore(const Kept& kept) {
  restart(kept.forgotten, kept.base, kept.last);
  for (const auto& [count, hyper] : kept.runs) {
    record(hyper);
    runs_.back().count += count - 1;
    steps_ += count - 1;
  }
  largest_ratio_ = kept.largest_ratio;
  largest_size_ = kept.largest_size;
}

void History::record(const Hyperparameters& hyper) {
  ++steps_;
  last_ = hyper;
  Transition one = one_step(options_, hyper, steps_);
  if (!runs_.empty() && runs_.back().hyper == hyper && runs_.back().one == one) {
    ++runs_.back().count;
    return;
  }
  if (replays(kind_of(options_.rule))) {
    largest_ratio_ = std::max(largest_ratio_, decay_ratio(options_, hyper));
    largest_size_ = std::max(largest_size_, moment_bound(options_, hyper));
  }
  if (!runs_.empty()) push_level(runs_.size() - 1);
  runs_.push_back({steps_, 1, hyper, one});
}

void History::push_level(size_t index) {
  if (levels_.empty()) levels_.emplace_back();
  levels_[0].push_back(power(runs_[index].one, runs_[index].count));
  for (size_t k = 0; levels_[k].size() % 2 == 0; ++k) {
    const auto& fine = levels_[k];
    Transition pair = compose(fine[fine.size() - 2], fine[fine.size() - 1]);
    if (levels_.size() == k + 1) levels_.emplace_back();
    levels_[k + 1].push_back(pair);
  }
}

void History::forget(int64_t step) {
  size_t gone = 0;
  while (gone + 1 < runs_.size() && runs_[gone + 1].first_step <= step + 1) {
    base_ = compose(base_, power(runs_[gone].one, runs_[gone].count));
    ++gone;
  }
  if (!gone) return;
  runs_.erase(runs_.begin(), runs_.begin() + static_cast<int64_t>(gone));
  levels_.clear();
  for (size_t r = 0; r + 1 < runs_.size(); ++r) push_level(r);
}

size_t History::run_of(int64_t step) const {
  auto after = std::upper_bound(runs_.begin(), runs_.end(), step,
                                [](int64_t s, const Run& run) { return s < run.first_step; });
  if (after == runs_.begin()) {
    throw std::logic_error("step " + std::to_string(step) + " of the history was forgotten");
  }
  return static_cast<size_t>(after - runs_.begin()) - 1;
}

Transition History::since(int64_t from) const {
  if (from >= steps_) return {};
  size_t at = 0;
  Transition result;
  if (from == 0) {
    result = base_;
    if (runs_.empty()) return result;
  } else {
    at = run_of(from + 1);
    const Run& head = runs_[at];
    result = power(head.one, head.first_step + head.count - 1 - from);
    if (++at == runs_.size()) return result;
  }
  size_t closed = runs_.size() - 1;
  while (at < closed) {
    size_t k = 0;
    while (k + 1 < levels_.size() && at % (size_t{2} << k) == 0 &&
           at + (size_t{2} << k) <= closed) {
      ++k;
    }
    result = compose(result, levels_[k][at >> k]);
    at += size_t{1} << k;
  }
  return compose(result, power(runs_.back().one, runs_.back().count));
}

}  // namespace hotbed
