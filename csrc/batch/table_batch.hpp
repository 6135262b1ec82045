// What a batch asks of one table.
#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.hpp"
#include "table/table.hpp"

namespace hotbed {

// The positions of one table: those of its features, one feature after the other.
struct TableBatch {
  Table* table = nullptr;
  bool frozen = false;  // takes no new rows
  int64_t count = 0;
  int64_t added = 0;  // rows that resolve() inserted
  // count; negative -1-k: row k of scratch; INT64_MIN: padding. Null: those of the groups.
  const int64_t* slots = nullptr;
  Buffer<int64_t> owned_slots;
  Buffer<uint8_t> scratch;  // rows of ids that are not stored (reading only)

  // Which positions share a slot; made when a gradient will come.
  bool grouped = false;
  bool reading = false;  // took no new rows; see Batch::find_slots()
  bool has_slots = false;
  int64_t unique = 0;
  Buffer<int64_t> unique_slots;  // in order of first appearance; -1: has no row and gets none
  Buffer<int64_t> unique_ids;    // of tables that count uses, and where reading
  Buffer<int32_t> groups;        // per position, its index among the unique slots; -1: padding
  Buffer<int32_t> counts;        // positions of each group; spent by transpose()
  // Writes the slots of positions [begin, end). `pooled`: as their feature is.
  void write_slots(int64_t begin, int64_t end, bool pooled, int64_t* out) const;
  // The same the other way round, where transpose() was called: group u holds the positions
  // order[starts[u] .. starts[u + 1]), rising.
  void transpose();
  Buffer<int32_t> starts;
  Buffer<int32_t> order;
  // Which feature and bag a position belongs to; empty where it is plain (one feature, one id
  // each).
  std::vector<int> features;  // indices into Batch::features
  Buffer<int32_t> bag_of;
  Buffer<uint16_t> feature_of;
};

}  // namespace hotbed
