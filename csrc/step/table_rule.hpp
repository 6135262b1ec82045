// An optimizer's hold on one table: the states it keeps there, the steps taken, and for
// untouched="exact" what rows that no batch touches have missed.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "batch/batch.hpp"
#include "batch/pool.hpp"
#include "kernels/rule.hpp"
#include "rules/catch_up.hpp"
#include "rules/history.hpp"
#include "rules/update.hpp"
#include "table/table.hpp"

namespace hotbed {

class Step;
struct StepFault;
struct TableStep;
struct FusedStep;

// Reading is safe among readers; step() and restart() want the table alone.
class TableRule {
 public:
  // Replaces whatever states the table has by those of the rule, at their first values; weights are
  // brought up to date first. `exact`: rows that no batch touches follow the dense optimizer.
  // Throws OutOfMemory, the table then having no states, and TierError before anything was
  // replaced.
  TableRule(std::shared_ptr<Table> table, const RuleOptions& options,
            double initial_accumulator_value, bool exact);

  Table& table() const { return *table_; }
  const RuleOptions& options() const { return options_; }
  double initial_accumulator_value() const { return initial_accumulator_value_; }
  bool exact() const { return follower_ != nullptr; }
  int64_t steps() const { return steps_; }

  // False once another rule has taken the table over.
  bool holds_table() const { return table_->rule_token == token_; }

  // Brings rows to the last step (exact only).
  void catch_up_rows(const int64_t* slots, int64_t n);

  // Starts over after `steps` steps; `base` is what they did to rows that were never touched.
  void restart(int64_t steps, const Transition& base, const Hyperparameters& last);

  // What all steps so far did to a row that was never touched, and the numbers of the last step.
  Transition base() const;
  // Whether they changed its weight.
  bool has_moved_untouched() const;
  Hyperparameters last() const;
  int64_t history_runs() const;

  // What `restart` does not keep: what rows that are behind have missed (exact only).
  History::Kept history() const;
  // Starts over after its steps, of a table whose rows are first values; others are written with
  // their own steps afterwards.
  void restore(const History::Kept& history);

  // Throws TierError, with nothing changed, where the budgets of these tables have no room for the
  // states of such a rule in place of those that they have.
  static void check_memory(const std::vector<std::shared_ptr<Table>>& tables,
                           const RuleOptions& options, bool exact);

 private:
  friend class Step;
  friend StepFault step_fused(Batch& batch, const std::vector<Vectors>& grads,
                              std::span<const FusedStep> tables);
  class Follower;

  // Of rows that are about to change.
  RowUpdate planes(const int64_t* slots, int64_t n) const;
  void finish_step(const Hyperparameters& hyper);

  std::shared_ptr<Table> table_;
  RuleOptions options_;
  double initial_accumulator_value_;
  int64_t steps_ = 0;
  uint64_t token_;
  std::shared_ptr<Follower> follower_;
};

// One table's gradient: `count` rows of dim of the compute type, slots possibly repeating.
struct TableStep {
  TableRule* rule;
  const int64_t* slots;
  const void* grads;
  int64_t count;
  Hyperparameters hyper;
  // Nothing has changed what reduce() wrote: no slot repeats, and it found all rows finite.
  bool distinct;
  bool finite;
};

// What kept a step from being taken; array < 0: nothing did.
struct StepFault {
  int64_t array = -1;
  int64_t element = -1;
  int64_t slot = -1;
};

// One step over some tables, beside arrays of other gradients, which must live as long. For the
// thread that has the tables alone.
class Step {
 public:
  Step(std::vector<TableStep> tables, std::vector<GradientView> dense)
      : tables_(std::move(tables)), dense_(std::move(dense)) {}
  Step(const Step&) = delete;

  // Sums duplicates and checks that everything is finite; nothing changes. If something is not, the
  // answer says what: array t is table t for t < tables.size(), whose element counts within the
  // summed rows, and dense array t - tables.size() otherwise; for a table `slot` says which row.
  // Throws std::out_of_range if a slot is outside its table.
  StepFault decide();
  // Updates the rows. Once, where decide() found no fault.
  void apply();

 private:
  std::vector<TableStep> tables_;
  std::vector<GradientView> dense_;
  std::list<SummedRows<float>> summed_;  // whose places stay
  std::list<SummedRows<double>> summed_wide_;
};

// What to do with one table of a batch; no rule: nothing.
struct FusedStep {
  TableRule* rule = nullptr;
  Hyperparameters hyper;
};

// Reduce and step in one: tables[t] is for table t of the batch, and no gradient is kept. A table
// whose gradient is not finite stays as it was, others are stepped all the same; the fault names
// the first such table and a slot.
StepFault step_fused(Batch& batch, const std::vector<Vectors>& grads,
                     std::span<const FusedStep> tables);

}  // namespace hotbed
