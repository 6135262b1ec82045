// What ranks that share tables send each other for one batch: ids to their owners, rows back, and
// gradients to the owners. It computes sizes and places, reads and writes messages, and sends
// nothing itself.
//
// A message to an owner has one piece for each shard that this owner keeps: of ids for all, of
// gradients for the tables that have some. So has a message of rows from it, but for replicas, of
// which each rank reads its own. Pieces begin at multiples of kWord bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/batch.hpp"
#include "batch/pool.hpp"
#include "exchange/layout.hpp"

namespace hotbed {

// Distinct ids of each table of a batch that was checked, as they first appear, one table after the
// other; and for each position of a table, feature after feature, which of its ids it has. Both
// have room for all positions. Returns how many are distinct in each table.
std::vector<int64_t> distinct_ids(const Batch& batch, int64_t* distinct, int64_t* inverse);

// Rows of a table, or their gradients: row i is that of the id number slots[i] - first of those
// asked for, each at most once, and ids without one get zeros. slots nullptr: every id has one, in
// their order. rows nullptr: zeros.
struct GivenRows {
  const int64_t* slots;
  const void* rows;
  int64_t count;
  int64_t first;
};

// One batch, once all ranks have told their numbers. Immutable.
class Exchange {
 public:
  // `numbers`: of each rank those that order_by_owner() writes. Throws std::invalid_argument where
  // they cannot be.
  Exchange(std::shared_ptr<const ExchangeLayout> layout, const int64_t* numbers);
  // The same for one rank, which knows its `own` numbers and how many ids are asked of its shards,
  // in the order of asked_here(). What ranks ask of others has no size.
  Exchange(std::shared_ptr<const ExchangeLayout> layout, const std::vector<int64_t>& own,
           const std::vector<int64_t>& asked_here);

  // How many ids a rank asks of a shard, and where they begin among those of the table.
  int64_t count(int rank, int shard) const { return ranges_[at(rank, shard)].count; }
  int64_t begin(int rank, int shard) const { return ranges_[at(rank, shard)].begin; }
  // How many ids of a table this rank asks for.
  int64_t asked(int table) const { return asked_at_[table + 1] - asked_at_[table]; }

  // -- ids to their owners ---------------------------------------------------------------------
  MessageSizes id_sizes() const;
  void write_ids(const int64_t* ordered, const Messages& messages) const;
  // How many are asked of the shards of this rank: of the first by each rank, then of the next.
  std::vector<int64_t> asked_here() const;
  // Those ids, as the shards call them. Of this rank itself they come from `ordered`.
  void read_ids(const int64_t* ordered, const Messages& messages, int64_t* ids) const;

  // -- rows back -------------------------------------------------------------------------------
  // A replica answers its own rank only.
  MessageSizes row_sizes() const;
  // Where rows go, in the order of asked_here(), in the compute type. Rows that are stored in
  // another go to `wide`, of wide_bytes(), and from there to the messages by narrow().
  std::vector<Vectors> row_places(const Messages& messages, void* wide) const;
  int64_t wide_bytes() const;
  void narrow(const void* wide, const Messages& messages) const;
  // Writes the (asked, dim) rows of each table, as they are stored. `row_at`: for each id asked
  // for, the number of its row there; nullptr: they are in order.
  void read_rows(const Messages& messages, const std::vector<void*>& out,
                 const int64_t* row_at = nullptr) const;

  // -- rows, or their gradients, to the owners ---------------------------------------------------
  // `chosen`: for each table whether something travels. `stored`: as rows are, not gradients.
  MessageSizes given_sizes(const std::vector<bool>& chosen, bool stored) const;
  void write_given(const std::vector<bool>& chosen, bool stored,
                   const std::vector<GivenRows>& given, const Messages& messages) const;
  // Where they are, in the order of asked_here(). Of tables that are not chosen: nowhere.
  std::vector<Vectors> given_places(const std::vector<bool>& chosen, bool stored,
                                    const Messages& messages) const;

  const std::shared_ptr<const ExchangeLayout> layout;

 private:
  struct Range {
    int64_t begin;
    int64_t count;
  };
  size_t at(int rank, int shard) const { return rank * layout->shards.size() + shard; }
  // Whether the owner of a shard answers a rank.
  bool answers(int shard, int rank) const {
    return !layout->shards[shard].replica || layout->shards[shard].rank == rank;
  }
  int64_t row_bytes(int shard, bool stored) const;
  int64_t piece_bytes(int requester, int shard, bool stored) const;
  const std::vector<int>& mine() const { return layout->kept_by[layout->rank]; }

  std::vector<Range> ranges_;
  std::vector<int64_t> asked_at_;  // where the ids of each table begin in those of this rank
};

// Rows of some of the ids that a batch asks for: `row_at` are their positions among those of each
// table.
struct PartOfRows {
  const Exchange& exchange;
  const int64_t* row_at;
  Messages messages;
};

// Rows that came for one batch, in tables that a Batch can read.
class FetchedRows {
 public:
  explicit FetchedRows(std::shared_ptr<const ExchangeLayout> layout)
      : layout_(std::move(layout)), tables_(layout_->tables.size()) {}

  // `ordered`: the ids of this rank. Throws OutOfMemory.
  void read(const Exchange& exchange, const int64_t* ordered, const Messages& messages);
  // Rows that came in parts, which together have each of the exchange's ids once.
  void read(const Exchange& exchange, const int64_t* ordered, const std::vector<PartOfRows>& parts);
  // `given` over these rows: `inverse` and `new_positions` are of distinct_ids() and
  // order_by_owner(), and `inverse` becomes the positions of its ids in these tables, which the
  // batch goes on reading.
  std::shared_ptr<Batch> batch(const Batch& given, const std::vector<int64_t>& counts,
                               const int64_t* new_positions, int64_t* inverse) const;

 private:
  std::vector<void*> room_for(const Exchange& exchange, const int64_t* ordered);

  std::shared_ptr<const ExchangeLayout> layout_;
  std::vector<std::shared_ptr<Table>> tables_;
};

}  // namespace hotbed
