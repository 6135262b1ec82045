// Which rank keeps which part of which table, as messages between ranks are laid out by it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "index/group.hpp"

namespace hotbed {

struct ExchangedTable {
  std::string name;
  int64_t dim;
  DType dtype;
  std::optional<OwnerRule> owner_rule;  // the owner of a row; none: rows are not split
  std::optional<int64_t> padding;       // the id that stands for it
};

struct ExchangedShard {
  int table;
  int rank;
  bool replica;
  int64_t first;  // id i of the shard is the table's first + stride * i
  int64_t stride;
  int64_t column;  // the first
  int64_t width;
  int owner;  // where rows are split: whose they are; shards of one owner have other columns each
};

// Writes n ids of a table as one of its shards calls them.
void own_ids(const ExchangedShard& shard, const int64_t* ids, int64_t n, int64_t* out);

// The shards of some tables, the same on all ranks. Immutable.
class ExchangeLayout {
 public:
  // `shards`: of the first table, then of the next; owners of a table are numbered from 0 on, and
  // with OwnerRule::given by their ranks. `trainers`: how many ranks have batches, over which
  // gradients are averaged.
  ExchangeLayout(int rank, int ranks, std::vector<ExchangedTable> tables,
                 std::vector<ExchangedShard> shards, int trainers);

  // Orders ids by their owners. `counts`: ids of each table, which lie in `ids` one table after the
  // other. `ordered` gets them in order, `new_positions` the position in its table that each went
  // to, and `numbers` what the other ranks must know: of a table whose rows are split how many
  // each owner keeps, of another one how many there are. Of tables with OwnerRule::given, whose
  // owners are all ranks, `new_positions` has the owner of each id until then.
  void order_by_owner(const int64_t* ids, const std::vector<int64_t>& counts, int64_t* ordered,
                      int64_t* new_positions, int64_t* numbers) const;

  const int rank;
  const int ranks;
  const int trainers;
  const std::vector<ExchangedTable> tables;
  std::vector<ExchangedShard> shards;
  std::vector<int> owners;                // of each table, among how many its rows are split
  std::vector<std::vector<int>> kept_by;  // positions of the shards of each rank
  std::vector<int64_t> number_of;         // of each table, its first number; last: how many
};

// Bytes to, and from, each rank, itself included.
using MessageSizes = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
using Messages = std::vector<void*>;  // one a rank

}  // namespace hotbed
