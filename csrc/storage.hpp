// The tiers of one collection: which tables share a row space, how the budgets are divided, and
// what lies below.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "host_tier.hpp"
#include "row_space.hpp"

namespace hotbed {

struct StorageBudgets {
  uint64_t compute = 0;  // of the tier that computes, in bytes
  uint64_t host = 0;     // of the tier between it and the SSD; 0: there is none
};

// Tables of equal records; a table's number in keys is its place.
struct RecordGroup {
  int64_t record_bytes;
  std::vector<Table*> tables;
};

// Makes the lowest tier of each group; null where there is no SSD. Called for each layout, while
// the tiers of the layout before still hold rows if `rows_wait`.
using MakeLowest = std::function<std::vector<std::shared_ptr<Tier>>(
    const std::vector<RecordGroup>& groups, bool rows_wait)>;

// Tables of equal records.
struct TableGroup {
  RecordLayout layout;
  std::vector<Table*> tables;
  std::vector<int64_t> rows;  // by table; -1: dynamic

  int64_t most_rows() const;  // that there may be at all
};

// Threads: lay_out() wants all tables alone; the rest is as RowSpace.
class Storage {
 public:
  Storage(StorageBudgets budgets, MakeLowest make_lowest);

  // Gives every homeless table a row space, moving rows that lie in spaces of another layout.
  // Throws BudgetTooSmall, OutOfMemory, TierError with tables as they were.
  void lay_out(const std::vector<std::shared_ptr<Table>>& tables);

  // The least budget for the tier that computes with which every need is met.
  uint64_t compute_budget_for(const std::vector<OverBudget::Need>& needs) const;

  const std::vector<std::shared_ptr<RowSpace>>& spaces() const { return spaces_; }

  // Writes every row that the lowest tier lacks.
  void flush();
  uint64_t memory_bytes() const;

 private:
  bool release_empty(const std::vector<std::shared_ptr<Table>>& tables);

  StorageBudgets budgets_;
  MakeLowest make_lowest_;
  std::vector<TableGroup> groups_;  // of spaces_, one each
  uint64_t lowest_bytes_ = 0;
  std::vector<std::shared_ptr<RowSpace>> spaces_;
  std::vector<std::shared_ptr<HostTier>> hosts_;
};

// A budget cannot hold even one row of each kind.
struct BudgetTooSmall : std::runtime_error {
  BudgetTooSmall(bool of_host, uint64_t needed_bytes, uint64_t budget_bytes);
  bool host;
  uint64_t needed;
};

}  // namespace hotbed
