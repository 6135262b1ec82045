// The index of a dynamic table: 64-bit id (the key) -> slot.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.hpp"

namespace hotbed {

// Where the slots of new keys come from: first those of `reused`, in order, then the consecutive
// numbers from `first_free` on. No key of the index may hold any of them.
struct FreshSlots {
  int64_t first_free = 0;
  const int64_t* reused = nullptr;
  int64_t reused_count = 0;

  int64_t operator()(int64_t inserted) const {
    return inserted < reused_count ? reused[inserted] : first_free + (inserted - reused_count);
  }
};

// Extendible hashing (Fagin et al., ACM TODS 1979) over segments of 4096 one-cache-line buckets.
// A full segment splits in two, so an insert moves at most one segment whatever the size of the
// table, but once all 16 of a small one to huge pages. Any int64 is a legal key. See key_index.cpp
// for the layout.
//
// Threads: const members may run concurrently with each other; every other member needs the index
// for itself. No member starts threads.
class KeyIndex {
 public:
  // Slots lie in [0, kSlotLimit): a bucket keeps them in 32 bits.
  static constexpr int64_t kSlotLimit = (int64_t{1} << 32) - 2;

  // `name` is what errors call this index.
  explicit KeyIndex(std::string name = "the key index");
  void rename(std::string name) { name_ = std::move(name); }
  KeyIndex(const KeyIndex&) = delete;
  KeyIndex& operator=(const KeyIndex&) = delete;

  // slots[i] becomes the slot of keys[i], or -1. The arrays may be the same.
  void find(const int64_t* keys, int64_t n, int64_t* slots) const;

  // As find, but absent keys get slots from `fresh` in the order of their first appearance; a key
  // that comes twice gets one slot. Returns how many keys were new; `new_positions` (n numbers, or
  // null) receives where each appeared first, rising. The arrays must not overlap.
  // Throws OutOfMemory, or std::length_error where a slot would reach kSlotLimit; the keys are then
  // those from before the call, and `slots` and `new_positions` are undefined.
  int64_t find_or_insert(const int64_t* keys, int64_t n, int64_t* slots, const FreshSlots& fresh,
                         int64_t* new_positions = nullptr);
  int64_t find_or_insert(const int64_t* keys, int64_t n, int64_t* slots, int64_t first_free,
                         int64_t* new_positions = nullptr) {
    return find_or_insert(keys, n, slots, FreshSlots{first_free}, new_positions);
  }

  // False, and no change, if the key is present. Throws as the batched insert.
  bool insert(int64_t key, int64_t slot);

  // Inserts n keys that are all absent and distinct. Throws OutOfMemory, std::length_error (a slot
  // outside [0, kSlotLimit)) or std::invalid_argument (a key present or given twice); the keys are
  // then those from before the call.
  void insert(const int64_t* keys, int64_t n, const int64_t* slots);

  // keys[i] gets slots[i] in place of the slot it has; absent keys are passed over. previous[i], if
  // given, becomes the slot that it had, or -1. The arrays must not overlap. Returns how many were
  // there. Throws std::length_error (a slot outside [0, kSlotLimit)), changing nothing.
  int64_t update(const int64_t* keys, int64_t n, const int64_t* slots, int64_t* previous = nullptr);

  // The slot that the key had, or -1.
  int64_t erase(int64_t key);

  // slots[i] becomes the slot that keys[i] had, or -1; a repeated key gives -1 the second time. The
  // arrays may be the same. Returns how many were erased. Memory stays for keys to come.
  int64_t erase(const int64_t* keys, int64_t n, int64_t* slots);

  // Sets aside the address space that `keys` keys usually take, so that running out of memory shows
  // now and not in the middle of a run. Throws OutOfMemory or std::length_error, changing nothing.
  void reserve(int64_t keys);

  int64_t size() const { return size_; }

  // Bytes in use: segments (free ones included) in whole pages, directory. Reserved address space
  // is not counted.
  uint64_t memory_bytes() const;

  // What so many keys take, if their hashes are spread as hashes are: memory_bytes() of an index
  // that grew to them is no more.
  static uint64_t bytes_for(int64_t keys);

  // Removes all keys and returns the memory to the system.
  void clear();

  // Calls f(int64_t key, int64_t slot) once for each key. The order depends on the history of the
  // index: sort where order matters. f must not change the index.
  template <class F>
  void for_each(F f) const {
    for (const Segment& segment : segments_) {
      for (uint64_t b = 0; b <= bucket_mask_; ++b) {
        const Bucket& bucket = segment.buckets[b];
        for (int e = 0; e < kEntries; ++e) {
          if (bucket.occupied >> e & 1) f(bucket.keys[e], static_cast<int64_t>(bucket.slots[e]));
        }
      }
    }
  }

 private:
  static constexpr int kEntries = 5;
  static constexpr unsigned kAllOccupied = (1u << kEntries) - 1;

  struct alignas(64) Bucket {
    int64_t keys[kEntries];
    uint32_t slots[kEntries];
    uint16_t overflow;  // keys that found this bucket full and live in a later one
    uint8_t beyond;     // bit f: such a key may have trace f; cleared when overflow returns to 0
    uint8_t occupied;   // bit e: entry e holds a key
  };
  static_assert(sizeof(Bucket) == 64);

  struct Segment {
    Bucket* buckets;
    uint32_t keys;
    uint32_t depth;  // leading hash bits that its keys share
  };

  struct Chunk {
    Mapping memory;
    uint64_t used = 0;  // segments handed out

    uint64_t room() const;
  };

  struct Free {
    void operator()(void* block) const { std::free(block); }
  };

  static Bucket empty_bucket_;

  void check_slot(int64_t key, int64_t slot) const;
  uint64_t prefix(uint64_t hash) const;
  const Bucket& home(uint64_t hash) const;
  const Bucket* find_bucket(int64_t key, uint64_t hash, int* entry) const;
  int64_t find_beyond(int64_t key, uint64_t hash) const;
  int64_t erase(int64_t key, uint64_t hash);
  static void place(Bucket* buckets, uint64_t mask, int64_t key, uint64_t hash, uint32_t slot);
  template <class Accept>
  void insert_batch(const int64_t* keys, int64_t n, Accept accept);

  static uint32_t keys_of(uint64_t buckets);  // of a segment of so many
  void grow(uint64_t hash);
  void enlarge_only_segment();
  void leave_small_chunks();
  void split(uint64_t place_in_directory);
  template <class PartOf>
  static void move_keys(const Segment& from, uint64_t buckets, Segment* parts, uint64_t mask,
                        PartOf part_of);
  void add_chunk(uint64_t segments);
  Bucket* take_segment();

  std::string name_;
  int64_t size_ = 0;
  uint32_t depth_ = 0;        // the directory has 2^depth_ entries
  uint64_t bucket_mask_ = 0;  // buckets of a segment, less one
  uint32_t full_ = 0;         // keys at which a segment must grow
  std::vector<uint32_t> directory_;
  std::vector<Segment> segments_;
  std::vector<Chunk> chunks_;
  std::vector<Bucket*> idle_segments_;
  uint64_t open_chunk_ = 0;                      // the first chunk that may have segments to give
  std::unique_ptr<Bucket, Free> small_segment_;  // while there are too few keys for a chunk
};

}  // namespace hotbed
