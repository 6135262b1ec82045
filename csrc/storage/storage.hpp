// The tiers of one collection: which tables share a row space, how the budgets are divided, and
// what lies below.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "table/table.hpp"
#include "tiers/host_tier.hpp"
#include "tiers/row_space.hpp"

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
// the tiers of the layout before are still there if they hold rows.
using MakeLowest =
    std::function<std::vector<std::shared_ptr<Tier>>(const std::vector<RecordGroup>& groups)>;

// Makes room for rows outside of the core's memory.
using MakePlanes = std::function<std::shared_ptr<RowPlanes>(const RecordLayout&, int64_t capacity)>;

// Tables of equal records.
struct TableGroup {
  RecordLayout layout;
  std::vector<Table*> tables;
  std::vector<int64_t> rows;  // by table; -1: dynamic

  int64_t most_rows() const;  // that there may be at all
};

// What a budget is spent on, in bytes.
struct BudgetParts {
  uint64_t rows = 0;         // that a batch, and those that are held beside it, need
  uint64_t other_rows = 0;   // tables with other records get theirs beside them
  uint64_t bookkeeping = 0;  // of slots
  uint64_t moving = 0;       // records on their way
  uint64_t buffers = 0;      // of the lowest tiers: queues, blocks that are being written
  uint64_t index = 0;        // by which the lowest tiers find rows
  uint64_t announced = 0;  // ids that look-ahead knows, and what an index grows by until it is seen

  uint64_t total() const {
    return rows + other_rows + bookkeeping + moving + buffers + index + announced;
  }
};

// How many rows of each group a budget holds, while the indices of the lowest tiers grow with their
// rows.
//
// Threads: any number.
class Allowance {
 public:
  // `row_bytes` tells what a row of a group takes, beside its bookkeeping; `lowest` may hold nulls.
  Allowance(std::vector<TableGroup> groups, uint64_t (*row_bytes)(const TableGroup&),
            uint64_t budget, const std::vector<std::shared_ptr<Tier>>& lowest);

  // As of now, and never more than before; 0: not one row of each group fits. `bookkeeping`: what
  // the group's residency and what comes with it take by now, of which rows in slots are no part.
  int64_t rows(size_t group, uint64_t bookkeeping = 0);
  // The least budget with which every group would get the rows that it wants, or all it may have.
  BudgetParts least_budget(const std::vector<int64_t>& wanted) const;
  // The same where what the lowest tiers find rows by may grow to as much as all the rest, or to
  // twice what it is.
  BudgetParts roomy_budget(const std::vector<int64_t>& wanted) const;

 private:
  uint64_t index_bytes() const;
  uint64_t buffers(uint64_t budget) const;
  uint64_t beside_rows(uint64_t budget) const;
  uint64_t more() const;
  BudgetParts least_with(uint64_t index, const std::vector<int64_t>& wanted, bool stream) const;

  std::vector<TableGroup> groups_;
  uint64_t (*row_bytes_)(const TableGroup&);
  uint64_t budget_;
  std::vector<std::shared_ptr<Tier>> lowest_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> more_;  // by group: bookkeeping beyond what was reckoned
  uint64_t seen_ = 0;           // of indices and more_, for which rows_ holds
  std::vector<int64_t> rows_;
};

// Threads: lay_out() wants all tables alone; the rest is as RowSpace.
class Storage {
 public:
  Storage(StorageBudgets budgets, MakeLowest make_lowest);

  // Gives every unallocated table a row space, moving rows that lie in spaces of another layout;
  // with `again` all tables, states and all. Throws BudgetTooSmall, OutOfMemory, TierError with
  // tables as they were.
  void lay_out(const std::vector<std::shared_ptr<Table>>& tables, bool again = false);

  // Where rows that compute lie from the next layout on; null: in the core's memory.
  void set_planes(MakePlanes make) { make_planes_ = std::move(make); }

  // The least budget for the tier that computes with which every need is met.
  BudgetParts compute_budget_for(const std::vector<OverBudget::Need>& needs) const;
  // The same with room for a stream of batches like those of so far that looks `ahead` batches
  // ahead; see RowSpace::slots_for_stream and Allowance::roomy_budget.
  BudgetParts compute_budget_for_stream(std::vector<OverBudget::Need> needs, int64_t ahead) const;

  const std::vector<std::shared_ptr<RowSpace>>& spaces() const { return spaces_; }

  // Writes every row that the lowest tier lacks, and to the disk.
  void flush();
  // As flush(), and has the lowest tiers link what they hold into a folder. False where there is no
  // SSD. Throws TierError.
  bool link(const std::string& folder);
  // Rows become those of such a folder, those that were here being first values. False where that
  // cannot be. Throws TierError; no row is here then.
  bool adopt(const std::string& folder);
  // Of one of its tables: the number of its store among those of the lowest tiers.
  size_t store_of(const Table& table) const;
  int64_t rows_below(const Table& table) const;  // of it, that a lowest tier has
  uint64_t memory_bytes() const;
  // The part of it of one of its tables, by the bytes of their rows wherever they lie.
  uint64_t memory_bytes(const Table& table) const;
  // Since the last layout.
  TierTraffic host_traffic() const;  // of the tier between the one that computes and the SSD
  TierTraffic lowest_traffic() const;

 private:
  std::vector<int64_t> wanted_by(const std::vector<OverBudget::Need>& needs) const;
  BudgetParts beyond(BudgetParts parts) const;
  void release_empty(const std::vector<std::shared_ptr<Table>>& tables);

  StorageBudgets budgets_;
  MakeLowest make_lowest_;
  MakePlanes make_planes_;
  std::vector<TableGroup> groups_;        // of spaces_, one each
  std::shared_ptr<Allowance> allowance_;  // of the tier that computes
  std::vector<std::shared_ptr<RowSpace>> spaces_;
  std::vector<std::shared_ptr<HostTier>> hosts_;
  std::vector<std::shared_ptr<Tier>> lowest_;  // may be null
};

// The least budget with which the tier that computes holds so many batches at once, of so many rows
// of each table, as tables are now, wherever they lie. `ssd`: a log is within the budget.
BudgetParts required_budget(const std::vector<std::shared_ptr<Table>>& tables,
                            const std::vector<int64_t>& rows, int64_t batches, bool ssd);

// A budget cannot hold even one row of each kind.
struct BudgetTooSmall : std::runtime_error {
  BudgetTooSmall(bool of_host, const BudgetParts& needed, uint64_t budget_bytes);
  bool host;
  BudgetParts needed;
};

}  // namespace hotbed
