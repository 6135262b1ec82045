#include "step/table_rule.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "base/integers.hpp"
#include "batch/reduce.hpp"
#include "rules/state_planes.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

namespace {

// Beyond this many runs of different hyperparameters the rows that need the oldest are caught up,
// so that a schedule that changes every step does not make the history grow without end.
constexpr int64_t kMaxRuns = 8192;

std::atomic<uint64_t> next_token{1};

int64_t state_row_bytes(const Table& table, size_t k) {
  return table.states()[k].plane.row_bytes();
}

}  // namespace

// What the table asks when it hands rows out.
class TableRule::Follower : public CatchUp {
 public:
  explicit Follower(const RuleOptions& options) : options(options), history(options) {}

  void write(Table& table, const int64_t* slots, int64_t n) override {
    hotbed::catch_up(planes_of(table, options, slots, n), history);
  }

  void settle(Table& table, const int64_t* ids, int64_t n) override {
    size_t states = table.states().size();
    Buffer<uint8_t> weights(static_cast<uint64_t>(n * table.weight_plane().row_bytes()));
    Buffer<uint8_t> own[kMaxStates];
    void* out[kMaxStates] = {};
    for (size_t k = 0; k < states; ++k) {
      own[k].resize(static_cast<uint64_t>(n * state_row_bytes(table, k)));
      out[k] = own[k].data();
    }
    read_states(table, ids, n, weights.data(), out);
    std::vector<int64_t> last(static_cast<size_t>(n), history.steps());
    table.space()->write(table.number(), ids, n, weights.data(), out, last.data());
  }

  void settle_all(Table& table) override {
    if (table.released()) return;
    int64_t row_bytes = table.weight_plane().row_bytes();
    for (size_t k = 0; k < table.states().size(); ++k) row_bytes += state_row_bytes(table, k);
    int64_t at_once = rows_at_once(1 << 16, row_bytes);
    std::vector<int64_t> stored;
    // Rows that are stored nowhere have moved too, if steps move rows without states.
    bool all = !table.tiered() || (!table.dynamic() && moves_untouched());
    if (!all) stored = table.stored_ids();
    int64_t count = all ? table.size() : static_cast<int64_t>(stored.size());
    std::vector<int64_t> some;
    for (int64_t begin = 0; begin < count; begin += at_once) {
      some.resize(static_cast<size_t>(std::min(at_once, count - begin)));
      if (all) {
        std::iota(some.begin(), some.end(), begin);
      } else {
        std::copy_n(stored.begin() + begin, some.size(), some.begin());
      }
      auto n = static_cast<int64_t>(some.size());
      if (table.tiered()) {
        settle(table, some.data(), n);
      } else {
        write(table, some.data(), n);
      }
    }
  }

  void read(const Table& table, const int64_t* ids, int64_t n, void* rows) const override {
    read_states(table, ids, n, rows, nullptr);
  }

  int64_t steps() const override { return history.steps(); }

  bool moves_untouched() const override { return history.since(0).ww != 1; }

  // The same with the states, where wanted.
  void read_states(const Table& table, const int64_t* ids, int64_t n, void* weights,
                   void* const* out) const {
    Buffer<uint8_t> own_states[kMaxStates];
    void* states[kMaxStates] = {};
    for (size_t k = 0; k < table.states().size(); ++k) {
      if (!out) own_states[k].resize(static_cast<uint64_t>(n * state_row_bytes(table, k)));
      states[k] = out ? out[k] : own_states[k].data();
    }
    Buffer<int64_t> last(static_cast<uint64_t>(n));
    table.copy_rows(ids, n, weights, states, last.data());
    advance(table, ids, n, weights, states, last.data());
  }

  void advance(const Table& table, const int64_t* ids, int64_t n, void* weights,
               void* const* states, int64_t* last) const override {
    RowUpdate copies = planes(table, options);
    copies.weights = weights;
    for (size_t k = 0; k < table.states().size(); ++k) copies.states[k] = states[k];
    copies.slots = nullptr;
    copies.count = n;
    copies.ids = ids;
    copies.last_step = last;
    copies.changed = nullptr;
    hotbed::catch_up(copies, history);
  }

  // Of rows that are about to change.
  static RowUpdate planes_of(const Table& table, const RuleOptions& options, const int64_t* slots,
                             int64_t n) {
    table.keep(slots, n);
    RowUpdate rows = planes(table, options);
    rows.slots = slots;
    rows.count = n;
    return rows;
  }

  static RowUpdate planes(const Table& table, const RuleOptions& options) {
    RowUpdate rows;
    rows.options = options;
    rows.weights = table.weights();
    rows.dtype = table.dtype();
    rows.dim = table.dim();
    for (size_t k = 0; k < table.states().size(); ++k) {
      rows.states[k] = table.states()[k].plane.data();
    }
    rows.ids = table.ids();
    rows.table_key = table.initial().table_key;
    rows.origin = table.initial().origin;
    rows.last_step = table.last_step();
    if (const RowChanges* changes = table.changes()) {
      rows.changed = changes->data();
      rows.epoch = changes->epoch();
    }
    return rows;
  }

  RuleOptions options;
  History history;
};

void TableRule::check_memory(const std::vector<std::shared_ptr<Table>>& tables,
                             const RuleOptions& options, bool exact) {
  std::vector<BudgetShare::Growth> growths;
  for (const auto& table : tables) {
    std::vector<int64_t> row_bytes;
    for (const StatePlane& plane : state_planes(options, 0)) {
      int64_t width = plane.one_per_row ? 1 : table->dim();
      row_bytes.push_back(width * static_cast<int64_t>(table->compute_size()));
    }
    if (exact) row_bytes.push_back(sizeof(int64_t));
    growths.push_back(table->growth_with_states(row_bytes));
  }
  BudgetShare::check(growths);
}

TableRule::TableRule(std::shared_ptr<Table> table, const RuleOptions& options,
                     double initial_accumulator_value, bool exact)
    : table_(std::move(table)),
      options_(options),
      initial_accumulator_value_(initial_accumulator_value),
      token_(next_token++) {
  // Rows go on from where the rule before has them. (No step was taken while unallocated.)
  if (table_->catch_up && !table_->unallocated()) table_->catch_up->settle_all(*table_);
  table_->clear_states();
  table_->rule_token = 0;
  try {
    for (const StatePlane& plane : state_planes(options, initial_accumulator_value)) {
      table_->add_state(plane.name, plane.one_per_row ? 1 : table_->dim(), plane.first_value);
    }
    if (exact) table_->track_steps(0);
  } catch (...) {
    table_->clear_states();
    throw;
  }
  if (exact) {
    follower_ = std::make_shared<Follower>(options);
    table_->catch_up = follower_;
  }
  table_->rule_token = token_;
}

RowUpdate TableRule::planes(const int64_t* slots, int64_t n) const {
  return Follower::planes_of(*table_, options_, slots, n);
}

void TableRule::catch_up_rows(const int64_t* slots, int64_t n) {
  if (follower_) follower_->write(*table_, slots, n);
}

void TableRule::restart(int64_t steps, const Transition& base, const Hyperparameters& last) {
  steps_ = steps;
  if (!follower_) return;
  follower_->history.restart(steps, base, last);
  table_->track_steps(0);
  // Rows that are there were loaded with the states, or will be. (Of tiered tables what is written
  // tells which.)
  if (table_->has_rows()) std::fill_n(table_->last_step(), table_->size(), steps);
}

History::Kept TableRule::history() const {
  return follower_ ? follower_->history.kept() : History::Kept{};
}

void TableRule::restore(const History::Kept& history) {
  if (!follower_) throw std::logic_error("only a rule that is exact has a history");
  restart(history.forgotten, history.base, history.last);
  follower_->history.restore(history);
  steps_ = follower_->history.steps();
  // Rows that are not written are first values, and behind by all of it.
  if (table_->has_rows()) std::fill_n(table_->last_step(), table_->size(), int64_t{0});
}

Transition TableRule::base() const {
  return follower_ ? follower_->history.since(0) : Transition{};
}

bool TableRule::has_moved_untouched() const {
  if (!follower_ || steps_ == 0) return false;
  return base().ww != 1 || kind_of(options_.rule).missed == Missed::last_step;
}

Hyperparameters TableRule::last() const {
  return follower_ ? follower_->history.last() : Hyperparameters{};
}

int64_t TableRule::history_runs() const { return follower_ ? follower_->history.run_count() : 0; }

void TableRule::finish_step(const Hyperparameters& hyper) {
  ++steps_;
  if (!follower_) return;
  History& history = follower_->history;
  history.record(hyper);
  // Which rows in the tiers below are behind by how much is not known: they may need it all.
  if (history.run_count() < kMaxRuns || table_->tiered()) return;
  if (!table_->has_rows()) return history.forget(steps_);
  const int64_t* last = table_->last_step();
  history.forget(oldest_step(last, table_->size(), steps_));
  if (history.run_count() < kMaxRuns / 2) return;
  std::vector<int64_t> behind;  // rows never touched need the product of all steps only
  for (int64_t slot = 0; slot < table_->size(); ++slot) {
    if (last[slot] > 0 && last[slot] < steps_) behind.push_back(slot);
  }
  follower_->write(*table_, behind.data(), static_cast<int64_t>(behind.size()));
  history.forget(steps_);
}

StepFault Step::decide() {
  std::vector<GradientView> views;
  for (TableStep& t : tables_) {
    Table& table = t.rule->table();
    if (!t.rule->holds_table()) throw std::logic_error("the table has another rule's states");
    for (int64_t i = 0; i < t.count; ++i) {
      if (static_cast<uint64_t>(t.slots[i]) >= static_cast<uint64_t>(table.slot_limit())) {
        throw std::out_of_range(std::to_string(t.slots[i]));
      }
    }
    bool wide = table.dtype() == DType::f64;
    if (!t.distinct && has_duplicates(t.slots, t.count)) {
      auto summed = [&](auto& all, const auto* grads) {
        auto& rows = all.emplace_back(sum_duplicates(t.slots, grads, t.count, table.dim()));
        t.slots = rows.slots.data();
        t.grads = rows.values.data();
        t.count = static_cast<int64_t>(rows.slots.size());
      };
      if (wide) {
        summed(summed_wide_, static_cast<const double*>(t.grads));
      } else {
        summed(summed_, static_cast<const float*>(t.grads));
      }
    }
    t.distinct = true;
    views.push_back({t.grads, t.finite ? 0 : t.count * table.dim(), wide});
  }
  views.insert(views.end(), dense_.begin(), dense_.end());
  NonFinite bad = find_non_finite(views);
  if (bad.array < 0) return {};
  StepFault fault{bad.array, bad.element, -1};
  if (static_cast<size_t>(bad.array) < tables_.size()) {
    const TableStep& t = tables_[static_cast<size_t>(bad.array)];
    fault.slot = t.slots[bad.element / t.rule->table().dim()];
  }
  return fault;
}

void Step::apply() {
  std::vector<RowUpdate> updates;
  updates.reserve(tables_.size());
  for (const TableStep& t : tables_) {
    t.rule->catch_up_rows(t.slots, t.count);
    RowUpdate u = t.rule->planes(t.slots, t.count);
    u.hyper = t.hyper;
    u.grads = t.grads;
    u.step = t.rule->steps() + 1;
    updates.push_back(u);
  }
  update(updates);
  for (const TableStep& t : tables_) {
    if (t.rule->table().tiered()) t.rule->table().space()->mark_dirty(t.slots, t.count);
    t.rule->finish_step(t.hyper);
  }
}

StepFault step_fused(Batch& batch, const std::vector<Vectors>& grads,
                     std::span<const FusedStep> tables) {
  std::vector<RowUpdate> updates(tables.size());
  std::vector<int> wanted;
  for (size_t t = 0; t < tables.size(); ++t) {
    TableRule* rule = tables[t].rule;
    const TableBatch& part = batch.parts[t];
    if (!rule || !part.grouped) continue;
    if (!rule->holds_table()) throw std::logic_error("the table has another rule's states");
    rule->catch_up_rows(part.unique_slots.data(), part.unique);
    RowUpdate& u = updates[t];
    u = rule->planes(part.unique_slots.data(), part.unique);
    u.hyper = tables[t].hyper;
    u.step = rule->steps() + 1;
    wanted.push_back(static_cast<int>(t));
  }
  StepFault fault;
  std::mutex mutex;
  // Rows without a slot, of ids that evaluation met, are left out.
  std::vector<std::vector<int64_t>> stored_slots(tables.size());
  std::vector<Buffer<uint8_t>> stored_rows(tables.size());
  auto compact = [&](int t, const void* rows) {
    RowUpdate& u = updates[t];
    uint64_t bytes = static_cast<uint64_t>(u.dim) * (u.dtype == DType::f64 ? 8 : 4);
    stored_rows[t].resize(static_cast<uint64_t>(u.count) * bytes);
    for (int64_t i = 0; i < u.count; ++i) {
      if (u.slots[i] < 0) continue;
      std::memcpy(stored_rows[t].data() + stored_slots[t].size() * bytes,
                  static_cast<const uint8_t*>(rows) + static_cast<uint64_t>(i) * bytes, bytes);
      stored_slots[t].push_back(u.slots[i]);
    }
    u.slots = stored_slots[t].data();
    u.count = static_cast<int64_t>(stored_slots[t].size());
    u.grads = stored_rows[t].data();
  };
  reduce_each(batch, grads, wanted, [&](int t, const void* rows, bool finite) {
    RowUpdate& u = updates[t];
    u.grads = rows;
    if (batch.parts[t].reading) compact(t, rows);
    if (finite) return update({&u, 1});
    GradientView view{rows, u.count * u.dim, u.dtype == DType::f64};
    int64_t element = find_non_finite({&view, 1}).element;
    if (element < 0) return update({&u, 1});  // it was in a row that is left out
    std::lock_guard lock(mutex);
    if (fault.array < 0 || t < fault.array) fault = {t, element, u.slots[element / u.dim]};
    u.count = -1;
  });
  for (int t : wanted) {
    if (updates[t].count < 0) continue;
    const Table& table = tables[t].rule->table();
    if (table.tiered()) table.space()->mark_dirty(updates[t].slots, updates[t].count);
    tables[t].rule->finish_step(tables[t].hyper);
  }
  return fault;
}

}  // namespace hotbed
