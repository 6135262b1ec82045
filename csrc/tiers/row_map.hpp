// (table, id) -> number, for several tables: where a pool keeps the rows that it holds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "index/key_index.hpp"

namespace hotbed {

// A static table that is small enough has an array of 4 bytes an id, any other table a KeyIndex.
//
// Threads: const members may run concurrently with each other; every other member needs the map
// for itself.
class RowMap {
 public:
  // Numbers lie in [0, kLimit).
  static constexpr int64_t kLimit = KeyIndex::kSlotLimit;

  // table_rows[t] < 0: table t is dynamic. Static tables get arrays, the smallest first, as long as
  // all of these together take at most `most_array_bytes`. Arrays have no memory before place().
  RowMap(std::vector<int64_t> table_rows, uint64_t most_array_bytes);

  // Bytes of all arrays.
  uint64_t array_bytes() const { return array_ids_ * sizeof(uint32_t); }
  // Gives the arrays their memory: array_bytes() of zeros, to be kept by the caller.
  void place(uint32_t* arrays) { arrays_ = arrays; }

  int64_t tables() const { return static_cast<int64_t>(spaces_.size()); }
  // -1 for dynamic tables.
  int64_t rows(int32_t table) const { return spaces_[table].rows; }
  // Position of the first of n ids that the table cannot have, or n.
  int64_t first_outside(int32_t table, const int64_t* ids, int64_t n) const;

  // numbers[i] becomes the number of ids[i], or -1. The arrays may be the same.
  void find(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers) const;

  // As find, but absent ids get numbers from `fresh` in the order of their first appearance. The
  // ids must be possible ones. Returns how many were new. Throws OutOfMemory or std::length_error;
  // the map is then as before.
  int64_t find_or_insert(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers,
                         const FreshSlots& fresh);

  // Ids that are there get other numbers.
  void update(int32_t table, const int64_t* ids, int64_t n, const int64_t* numbers);

  // Forgets ids; absent ones are passed over. `numbers`: scratch for n.
  void erase(int32_t table, const int64_t* ids, int64_t n, int64_t* numbers);

  // Forgets everything but the arrays, which the caller zeroes or replaces.
  void clear();

  // Of the indices; arrays are the caller's memory.
  uint64_t index_bytes() const;

 private:
  struct Space {
    int64_t rows;
    int64_t array = -1;               // first place in arrays_, or -1
    std::unique_ptr<KeyIndex> index;  // null where there is an array
  };

  std::vector<Space> spaces_;
  uint64_t array_ids_ = 0;
  uint32_t* arrays_ = nullptr;  // number + 1; 0: absent
};

}  // namespace hotbed
