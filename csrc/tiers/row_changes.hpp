// Which rows of a table have changed since which save: a byte a slot, and the ids that went.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/plane.hpp"

namespace hotbed {

// Time is cut into epochs by marks. A slot's byte is the epoch in which its row changed last, 0 for
// a row that has not since all this began; so a row has changed since a mark if its byte is above
// the epoch that the mark has ended. Marks stay good until forget(), also where others come behind.
class RowChanges {
 public:
  // As in Plane.
  RowChanges(std::string what_for, std::string remedy)
      : epochs_(std::move(what_for), 1, 1, std::move(remedy)) {}

  Plane& plane() { return epochs_; }
  const Plane& plane() const { return epochs_; }
  uint8_t* data() const { return epochs_.data(); }
  uint8_t epoch() const { return epoch_; }

  // Slots below 0 are passed over.
  void touch(const int64_t* slots, int64_t n);
  void touch_range(int64_t first, int64_t count);
  void note_erased(int64_t id) { erased_.push_back({epoch_, id}); }
  int64_t erased() const { return static_cast<int64_t>(erased_.size()); }

  // Ends an epoch of a table of so many rows. Where no number is left for another one, all earlier
  // marks are forgotten; or it is 0, while somebody reads what has changed since one.
  uint64_t mark(int64_t rows);
  void begin_reading() const { ++readers_; }
  void end_reading() const { --readers_; }
  bool is_read() const { return readers_ > 0; }
  // The same where somebody else has made the mark and keeps the epochs.
  void adopt(uint64_t mark);
  bool knows(uint64_t mark) const {
    return mark >> 8 == generation_ && static_cast<uint8_t>(mark) >= oldest_;
  }
  // No earlier mark is good any more.
  void forget(int64_t rows);
  // Ids that went before this mark are of use to nobody.
  void forget_before(uint64_t mark);

  // Whether the row in a slot has changed since a mark that is known.
  bool changed(int64_t slot, uint64_t mark) const {
    return epochs_.data()[slot] > static_cast<uint8_t>(mark);
  }
  // Ids that went since then, rising; some may be there again.
  std::vector<int64_t> erased_since(uint64_t mark) const;

  // A number that no mark had so far in its upper 56 bits.
  static uint64_t next_generation();

  uint64_t memory_bytes() const { return erased_.capacity() * sizeof(Erased); }

 private:
  struct Erased {
    uint8_t epoch;
    int64_t id;
  };

  Plane epochs_;
  std::atomic<uint64_t> generation_ =
      next_generation();  // no two have one in common, nor has one twice
  uint8_t epoch_ = 1;
  uint8_t oldest_ = 0;  // marks of earlier epochs are not good
  std::vector<Erased> erased_;
  mutable std::atomic<int> readers_{0};
};

}  // namespace hotbed
