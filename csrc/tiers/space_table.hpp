// A table as the row space sees it that keeps its rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbed {

class SpaceTable {
 public:
  virtual bool dynamic() const = 0;
  virtual int64_t size() const = 0;  // rows of a static table

  // What a row is made of that nobody has touched: weights (n x dim of the table's dtype), all
  // elements of state k, and the last step.
  virtual void first_values(const int64_t* ids, int64_t n, void* rows) const = 0;
  virtual double first_state(size_t k) const = 0;
  virtual int64_t first_step() const = 0;

  // Memory in which uses of its ids are counted.
  virtual uint64_t uses_bytes() const = 0;

 protected:
  ~SpaceTable() = default;
};

}  // namespace hotbed
