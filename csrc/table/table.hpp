// A table as the core sees it: planes over slots and, where ids are open-ended, an index.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/plane.hpp"
#include "index/key_index.hpp"
#include "rules/initial.hpp"
#include "table/memory_budget.hpp"
#include "table/row_lock.hpp"
#include "tiers/record_layout.hpp"
#include "tiers/row_changes.hpp"
#include "tiers/space_table.hpp"
#include "tiers/top_uses.hpp"

namespace hotbed {

// An optimizer state: elements of the table's compute type (double for f64 rows, else float).
struct State {
  std::string name;
  double initial;  // of a row that no step has touched
  Plane plane;
};

class RowSpace;
class Table;

// Brings rows that an optimizer leaves alone while no batch touches them to where a dense optimizer
// would have moved them (untouched="exact"). The optimizer owns one a table and keeps its history.
class CatchUp {
 public:
  virtual ~CatchUp() = default;
  // In place, weights and states, up to the current step. Slots are unique.
  virtual void write(Table& table, const int64_t* slots, int64_t n) = 0;
  // The same for rows by id, wherever they lie (tiered tables).
  virtual void settle(Table& table, const int64_t* ids, int64_t n) = 0;
  // Every row that exists. Throws TierError; rows that were not reached are as they were.
  virtual void settle_all(Table& table) = 0;
  // What settle() would make of the weights, into n x dim rows of the table's dtype; ids may name
  // rows that do not exist yet. Changes nothing.
  virtual void read(const Table& table, const int64_t* ids, int64_t n, void* rows) const = 0;
  // How many were taken, and whether they have moved rows that no batch ever touched.
  virtual int64_t steps() const = 0;
  virtual bool moves_untouched() const = 0;
  // In place, copies of rows by id: what settle() would make of them, last steps included.
  virtual void advance(const Table& table, const int64_t* ids, int64_t n, void* weights,
                       void* const* states, int64_t* last) const = 0;
};

// Copies rows of a table before they change, while a snapshot of it is read; see Snapshot.
class RowKeeper {
 public:
  virtual ~RowKeeper() = default;
  // Rows in these slots are about to change, none where one is below 0; null: all.
  virtual void keep(const int64_t* slots, int64_t n) = 0;
  // Waits until there is room for what a change will keep; for a change of all rows, until all are
  // copied; and no longer than so. Whether it is so.
  virtual bool wait(bool all, std::chrono::milliseconds most) = 0;
  // All rows are about to change, and nobody has waited.
  virtual void lose() = 0;
  // While it lives nobody copies rows: planes may move.
  virtual std::unique_lock<std::mutex> pause() const = 0;
};

// Threading: reading (find, read) is safe among readers; everything else wants the table alone. Who
// calls takes a Hold.
class Table final : public SpaceTable {
 public:
  // rows < 0 makes the table dynamic. A static table gets all its rows and their first values now.
  // Throws OutOfMemory.
  // `tiered`: its rows lie in tiers, see below. `released`: as after release_rows(). `budget`: what
  // planes and index of a table that is neither are taken from; wherever OutOfMemory is named
  // below, it is TierError where the budget has no more.
  Table(std::string name, int64_t rows, int64_t dim, DType dtype, const InitialSpec& initial,
        bool tiered = false, bool released = false, std::shared_ptr<MemoryBudget> budget = nullptr);

  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  // All idle blocks, as its batches may have used them, go back to the system, too.
  ~Table();

  const std::string& name() const { return name_; }
  void rename(const std::string& name);
  bool dynamic() const override { return dynamic_; }
  int64_t size() const override;  // rows that exist
  // Slots lie below it.
  int64_t slot_limit() const;
  int64_t dim() const { return dim_; }
  DType dtype() const { return dtype_; }
  size_t compute_size() const { return hotbed::compute_size(dtype_); }
  const InitialSpec& initial() const { return initial_; }

  // The slot whose row stands for padding: never in a bag, never given a gradient. INT64_MIN: there
  // is none. A lookup never stores padding in a dynamic table; only assigning it does.
  int64_t padding_slot() const;

  uint8_t* weights() const { return weights_.data(); }
  const Plane& weight_plane() const { return weights_; }
  std::vector<State>& states() { return states_; }
  const std::vector<State>& states() const { return states_; }
  // slot -> id; nullptr for a static table in one tier, where they are the same number.
  const int64_t* ids() const {
    return dynamic_ || tiered_ ? reinterpret_cast<const int64_t*>(ids_.data()) : nullptr;
  }
  // slot -> the step up to which the row is current; nullptr unless track_steps() was called.
  // Of no use where the table has no rows.
  int64_t* last_step() const {
    return steps_ ? reinterpret_cast<int64_t*>(steps_->data()) : nullptr;
  }
  bool tracks_steps() const { return steps_ != nullptr; }
  // The last step of rows that no step has touched.
  int64_t first_step() const override { return first_step_; }

  double first_state(size_t k) const override { return states_[k].initial; }

  // A tiered table has planes, and rows, once it lives in a row space: `number` is its number
  // there. The records of the space must be laid out as this table's are; adding or removing
  // states, or steps, makes it unallocated again.
  bool tiered() const { return tiered_; }
  void live_in(std::shared_ptr<RowSpace> space, int32_t number);
  void leave();
  bool unallocated() const { return tiered_ && !allocated_; }
  // Where it lives, or lived before its layout changed; may be null.
  const std::shared_ptr<RowSpace>& space() const { return space_; }
  int32_t number() const { return number_; }

  // Adds a state plane for all rows that exist and all to come. Throws OutOfMemory.
  void add_state(const std::string& name, int64_t width, double initial);
  void clear_states();
  // Adds a plane of last steps; rows that exist, and rows to come, start at `step`.
  void track_steps(int64_t step);

  // slots[i] = slot of ids[i], or -1. A static table answers ids outside [0, rows) with -1.
  void find(const int64_t* ids, int64_t n, int64_t* slots) const;

  // Dynamic tables: the same, but absent ids get rows with their first values in every plane, but
  // for `weights` or `states` that the caller is to write. Returns how many rows are new. On
  // OutOfMemory nothing has changed.
  int64_t find_or_insert(const int64_t* ids, int64_t n, int64_t* slots, bool weights = true,
                         bool states = true);

  // Copies rows as they are stored; absent ones as they would start. `weights` (n x dim of
  // dtype()), `states` (one array each) and `last` may be null.
  void copy_rows(const int64_t* ids, int64_t n, void* weights, void* const* states,
                 int64_t* last) const;
  // Overwrites of rows what is given: weights (n x dim of dtype()), states (one array each), last
  // steps; each may be null, and stays then. Absent ids of a dynamic table get a row. Of duplicates
  // the last wins. Weights alone count as of the last step, as do rows that are written without
  // last steps. On OutOfMemory nothing has changed; of a tiered table, on TierError, some rows may
  // be written, each of them whole.
  void write(const int64_t* ids, int64_t n, const void* weights, const void* const* states,
             const int64_t* last);

  // found[i] says whether there is a row of ids[i]; a static table has those of all ids in
  // [0, rows).
  void contains(const int64_t* ids, int64_t n, bool* found) const;

  // Rows of a dynamic table are no more; absent ids are passed over. Others may get other slots.
  // Those of a static table, ids distinct, are as if no batch had had them. Returns how many went.
  int64_t erase(const int64_t* ids, int64_t n);

  // Static tables in one tier: gives the memory of all planes back, as their rows are kept
  // elsewhere from now on. What the table hands out until take_rows_back() are first values, and
  // what it is given is lost.
  void release_rows();
  // Room for all rows again, with undefined contents. Throws OutOfMemory with the table as it was.
  void take_rows_back();
  bool released() const { return released_; }
  // Whether the planes hold its rows: not tiers, nor others elsewhere.
  bool has_rows() const { return !tiered_ && !released_; }

  // Takes the newest `count` rows of a dynamic table back.
  void forget_last(int64_t count);
  // Room for `rows` rows in every plane. Throws OutOfMemory with the table as it was.
  void reserve(int64_t rows);
  // Forgets every row of a dynamic table.
  void clear();
  // Static tables: every row back to its first value; states stay.
  void write_first_values();
  // Changes the key that first values come from; rows that exist keep theirs.
  void set_key(uint64_t key) { initial_.table_key = key; }
  // Changes which id stands for padding; the row stays.
  void set_padding(std::optional<int64_t> id) {
    initial_.has_padding = id.has_value();
    initial_.padding_id = id.value_or(0);
  }

  // The row of padding as it was assigned, or zeros; of tiered tables, where batches never store
  // it.
  void copy_padding(void* row) const;

  // First values, n x dim rows of dtype(), for ids that may or may not exist.
  void first_values(const int64_t* ids, int64_t n, void* rows) const override;

  // Which rows have changed since when. Of a table that has no rows, or no memory for it in its
  // budget, or whose tiers cannot tell, that is not known: then mark_changes() is 0, and no mark is
  // good.
  uint64_t mark_changes();
  bool knows_changes(uint64_t mark) const;
  // All rows may have changed, or will be others.
  void forget_changes();
  void forget_changes_before(uint64_t mark);
  const RowChanges* changes() const { return changes_.get(); }
  // Rows in these slots are about to change, or have just done so.
  void touch(const int64_t* slots, int64_t n) {
    if (changes_) changes_->touch(slots, n);
  }

  // Rows in these slots are about to change, and stay as they are in a snapshot; null: all rows.
  void keep(const int64_t* slots, int64_t n) const;
  void begin_snapshot(std::shared_ptr<RowKeeper> keeper);
  void end_snapshot(const RowKeeper* keeper);
  // Called before rows change, or `all` of them, by a thread for which nobody waits: waits until a
  // snapshot, if there is one, has room for what will be kept, or has copied all; no longer than
  // so. Whether it has.
  bool wait_for_snapshot(bool all, std::chrono::milliseconds most) const;
  bool in_snapshot() const { return keeper_ != nullptr; }

  // Set by an optimizer with untouched="exact"; nullptr otherwise.
  std::shared_ptr<CatchUp> catch_up;

  RowLock lock;

  // Of its ids in training batches, if it counts them: in tiers, and in memory within a budget.
  // What was forgotten counts no more.
  TopUses uses;
  uint64_t uses_bytes() const override { return uses.memory_bytes(); }
  bool counts_uses() const { return tiered_ || (in_budget_ && !released_); }
  // Of rows in memory: how many batches of training were there, with how many distinct rows.
  struct Trained {
    std::atomic<int64_t> batches{0}, rows{0}, created{0};
  } trained;

  // Which optimizer rule the states belong to; a rule whose number differs has lost the table.
  uint64_t rule_token = 0;

  // What it takes of its budget with fresh states of so many bytes a row each, last steps being one
  // of them; for BudgetShare::check().
  BudgetShare::Growth growth_with_states(std::span<const int64_t> row_bytes);

  // The same with so many more rows.
  BudgetShare::Growth growth_with_rows(int64_t more);

  uint64_t plane_bytes() const;  // of the rows that exist
  // What planes, in whole pages, index and counts of uses take now. Pages that nobody touched take
  // nothing.
  uint64_t resident_bytes() const;
  uint64_t index_bytes() const { return index_ ? index_->memory_bytes() : 0; }
  // Ids of rows that are stored, rising. A static table in one tier stores all.
  std::vector<int64_t> stored_ids() const;

 private:
  std::string what_for(const std::string& part) const;
  void fill_state(State& state, int64_t first, int64_t count);
  void write_tiered(const int64_t* ids, int64_t n, const uint8_t* weights,
                    const void* const* states, const int64_t* last);
  void move_row(int64_t from, int64_t to);
  void lose_snapshot();
  void ensure(int64_t rows);
  template <class Self, class F>
  static void for_planes(Self& self, F f);
  uint64_t state_bytes(int64_t rows) const;  // last steps and epochs of changes included
  uint64_t bytes_with(int64_t rows, uint64_t state_bytes) const;
  void take(int64_t rows, uint64_t state_bytes);
  void settle_share();
  void forget_erased();

  std::string name_;
  bool dynamic_;
  int64_t size_ = 0;
  int64_t written_ = 0;  // rows from here on have no pages
  int64_t dim_;
  DType dtype_;
  InitialSpec initial_;
  Plane weights_;
  Plane ids_;
  std::vector<State> states_;
  std::unique_ptr<Plane> steps_;
  int64_t first_step_ = 0;
  std::unique_ptr<RowChanges> changes_;
  std::shared_ptr<RowKeeper> keeper_;
  std::unique_ptr<KeyIndex> index_;
  bool in_budget_;
  BudgetShare share_;
  bool tiered_;
  bool released_;
  bool allocated_ = false;
  std::shared_ptr<RowSpace> space_;
  int32_t number_ = 0;
  std::vector<uint8_t> padding_row_;  // tiered: what was assigned
};

// How its rows lie in records.
RecordLayout layout_of(const Table& table);

}  // namespace hotbed
