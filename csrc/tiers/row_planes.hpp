// Where the rows of a row space lie that are not in its own memory, and what moves them.
#pragma once

#include <cstdint>

namespace hotbed {

// Rows by slot, each as one record when it moves: weights, then states, one after the other.
//
// Threading: called by one thread at a time, which may be any. When a call returns, its arrays are
// free, and later calls find the planes as it left them.
class RowPlanes {
 public:
  virtual ~RowPlanes() = default;
  // records + i * record bytes becomes the record of slots[i].
  virtual void gather(const int64_t* slots, int64_t n, uint8_t* records) = 0;
  // The way back; slots are distinct.
  virtual void scatter(const uint8_t* records, const int64_t* slots, int64_t n) = 0;
};

}  // namespace hotbed
