#include "base/plane.hpp"

namespace hotbed {

void Plane::grow(int64_t rows) {
  uint64_t needed = bytes(rows), generous = room(rows);
  try {
    mapping_->reserve(generous, what_for_, remedy_);
  } catch (const OutOfMemory&) {
    if (generous == needed) throw;
    mapping_->reserve(needed, what_for_, remedy_);
  }
}

}  // namespace hotbed
