#include "base/plane.hpp"

namespace hotbed {

void Plane::populate(int64_t first, int64_t count) const {
  constexpr uint64_t kPage = Mapping::kPage, kWorthACall = 16 * kPage;
  uint64_t begin = round_up(bytes(first), kPage), end = bytes(first + count);
  if (end < begin + kWorthACall) return;
  hotbed::populate(data() + begin, (end - begin) / kPage * kPage);
}

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
