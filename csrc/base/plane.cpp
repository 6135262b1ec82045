#include "base/plane.hpp"

#include <algorithm>

namespace hotbed {

uint64_t Plane::room(int64_t rows) const {
  uint64_t needed = bytes(rows), have = mapping_->bytes();
  return needed <= have ? have : std::max(needed, have + have / 2);
}

void Plane::ensure(int64_t rows) {
  uint64_t needed = bytes(rows), generous = room(rows);
  if (needed <= mapping_->bytes()) return;
  try {
    mapping_->reserve(generous, what_for_, remedy_);
  } catch (const OutOfMemory&) {
    if (generous == needed) throw;
    mapping_->reserve(needed, what_for_, remedy_);
  }
}

}  // namespace hotbed
