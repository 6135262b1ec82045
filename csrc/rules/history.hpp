// What the steps of a table did to rows that no batch touched, as long as a row may need to know.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/missed_steps.hpp"
#include "kernels/rule.hpp"

namespace hotbed {

// First `first`, then `later`.
Transition compose(const Transition& first, const Transition& later);

// Whether a first moment goes on moving untouched rows, so that missed steps are replayed.
bool replays(const RuleKind& kind);

// Why a rule with these numbers has no bounded way to make up for missed steps; empty if it has.
// See docs/optimizers.md.
std::string why_not_exact(const RuleOptions& options, const Hyperparameters& hyper);

// Whether a step without a gradient leaves weights and states as they are, so that nothing has to
// be made up for.
bool untouched_rows_stay(const RuleOptions& options, const Hyperparameters& hyper);

// The hyperparameters of the steps of one table, as runs of equal ones, and the products of their
// transitions. Reading is safe among readers; record() and forget() want it alone.
class History {
 public:
  struct Run {
    int64_t first_step;
    int64_t count;
    Hyperparameters hyper;
    Transition one;  // of each of its steps
  };

  explicit History(const RuleOptions& options) : options_(options) {}

  // Starts over after `steps` steps whose whole effect on an untouched row was `base`.
  void restart(int64_t steps, const Transition& base, const Hyperparameters& last);

  // Step steps() + 1 took place with these numbers.
  void record(const Hyperparameters& hyper);

  // All that it knows, to be kept elsewhere: the runs follow the `forgotten` steps.
  struct Kept {
    int64_t forgotten = 0;
    Transition base;
    double largest_ratio = 0, largest_size = 0;
    Hyperparameters last;
    std::vector<std::pair<int64_t, Hyperparameters>> runs;  // steps, and the numbers of each
  };
  Kept kept() const;
  void restore(const Kept& kept);

  // No row needs the steps up to and including `step` any more, except rows that were never
  // touched.
  void forget(int64_t step);

  int64_t steps() const { return steps_; }
  int64_t run_count() const { return static_cast<int64_t>(runs_.size()); }

  // The effect of steps from + 1 .. steps(). `from` is 0 or not yet forgotten.
  Transition since(int64_t from) const;

  // The run that holds a step, by index; run(i + 1) continues it.
  size_t run_of(int64_t step) const;
  const std::vector<Run>& runs() const { return runs_; }

  // The numbers of the last step.
  const Hyperparameters& last() const { return last_; }

  // Extremes over all steps recorded, for the bound on replay.
  double largest_ratio() const { return largest_ratio_; }
  double largest_size() const { return largest_size_; }

 private:
  void push_level(size_t index);

  RuleOptions options_;
  int64_t steps_ = 0;
  Transition base_;  // of steps 1 .. the last forgotten
  std::vector<Run> runs_;
  // levels_[k][j] is the product over runs j 2^k .. (j + 1) 2^k - 1; the last run, still growing,
  // is in none.
  std::vector<std::vector<Transition>> levels_;
  Hyperparameters last_;
  double largest_ratio_ = 0;
  double largest_size_ = 0;
};

// The largest share of its predecessor that the change by a zero-gradient step can be (per step,
// once bias corrections have settled), and the largest |first moment| / root of second moment.
double decay_ratio(const RuleOptions& options, const Hyperparameters& hyper);
double moment_bound(const RuleOptions& options, const Hyperparameters& hyper);

}  // namespace hotbed
