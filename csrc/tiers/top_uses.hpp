// The most used ids of a stream, in memory that does not grow.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace hotbed {

// Filtered space-saving (Homem and Carvalho, Information Sciences 2010): kIds ids have counters;
// the uses of all others are added up by hash in kCells cells, and an id whose cell passes the
// least counter takes its place, with what the cell holds for a first count. So an id's true uses
// are at most its count and at least its count less that first one; an id without a counter was
// used no more often than the least count; and the least count is at most all uses / kIds, in
// practice about those of ids without a counter / kCells.
//
// Threads: any number.
class TopUses {
 public:
  static constexpr uint32_t kIds = 256, kCells = 2048;

  // ids[i], distinct, was used counts[i] times.
  void add(const int64_t* ids, const int32_t* counts, int64_t n);
  // These ids begin anew.
  void forget(const int64_t* ids, int64_t n);
  void clear();

  struct Used {
    int64_t id;
    uint64_t uses;    // at most
    uint64_t excess;  // of it may be others'
  };
  // The most used, at most `count`, most used first; of equally used ones the lower id.
  std::vector<Used> top(int64_t count) const;

  uint64_t memory_bytes() const;

 private:
  static constexpr uint32_t kPlaces = 2 * kIds;  // of the hash table, by linear probing
  static constexpr uint16_t kNone = UINT16_MAX;

  uint32_t place_of(int64_t id) const;
  void forget(uint32_t place);
  void make_heap();
  void sink(uint32_t at);

  mutable std::mutex mutex_;
  std::vector<Used> used_;         // by number
  std::vector<uint16_t> numbers_;  // by place; kNone: free
  std::vector<uint64_t> cells_;
  // Once there are kIds: a heap of numbers with the least count first, and where a number is in it.
  std::vector<uint16_t> heap_, position_;
};

}  // namespace hotbed
