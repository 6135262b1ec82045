// Where the newest record of each row of a store lies.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/memory.hpp"
#include "index/key_index.hpp"
#include "log/log_format.hpp"

namespace hotbed {

// Static tables take 4 bytes a row, whether it was written or not (unwritten pages of the array
// cost nothing); dynamic ones those of a KeyIndex.
//
// Threads: const members may run concurrently with each other; every other member needs the index
// for itself. Members that take keys throw std::invalid_argument for a table or an id that there is
// not, before anything is changed.
class LogIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  // Locations lie in [0, kLimit).
  static constexpr uint64_t kLimit = KeyIndex::kSlotLimit - 1;

  explicit LogIndex(const std::vector<LogTable>& tables);

  void check(std::span<const RowKey> keys) const;

  // locations[i] becomes the location of keys[i], or kNone.
  void find(std::span<const RowKey> keys, uint32_t* locations) const;

  // Gives every key an entry, so that replace() cannot fail for want of memory. Throws OutOfMemory
  // with the index as it was.
  void prepare(std::span<const RowKey> keys);

  // For prepared keys: locations[i] becomes the location of keys[i]; previous[i] what it was.
  void replace(std::span<const RowKey> keys, const uint32_t* locations, uint32_t* previous);

  void erase(std::span<const RowKey> keys, uint32_t* previous);

  int64_t rows(int32_t table) const;
  void ids(int32_t table, int64_t* out) const;
  uint64_t memory_bytes() const;
  // Of these, what takes memory by now.
  uint64_t resident_bytes() const;

  // Calls f(RowKey, location) once for each row.
  template <class F>
  void for_each(F f) const {
    for (const Table& table : tables_) {
      if (table.keys) {
        table.keys->for_each([&](int64_t id, int64_t slot) {
          if (slot != kUnplaced) f(RowKey{id, table.number}, static_cast<uint32_t>(slot));
        });
        continue;
      }
      const uint32_t* places = table.places;
      for (int64_t id = 0; id < table.limit; ++id) {
        if (places[id]) f(RowKey{id, table.number}, places[id] - 1);
      }
    }
  }

 private:
  static constexpr int64_t kUnplaced = KeyIndex::kSlotLimit - 1;

  struct Table {
    int32_t number;
    std::string name;
    int64_t limit;                   // ids of a static table, else -1
    uint32_t* places = nullptr;      // of a static table: location + 1, or 0
    std::unique_ptr<KeyIndex> keys;  // of a dynamic one
    int64_t rows = 0;
  };

  const Table& table(int32_t number) const;
  uint64_t dynamic_bytes() const;
  // Calls f(table, first, count) for runs of keys of one table.
  template <class Self, class F>
  static void by_runs(Self& self, std::span<const RowKey> keys, F f);

  Mapping static_;  // of all static tables: each alone would be rounded up to a huge page
  std::vector<Table> tables_;
  std::vector<int32_t> position_;  // in tables_ by number, or -1
};

}  // namespace hotbed
