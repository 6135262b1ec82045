#include "tiers/record_layout.hpp"

namespace hotbed {

int64_t RecordLayout::weight_bytes() const { return dim * static_cast<int64_t>(size_of(dtype)); }

int64_t RecordLayout::state_bytes(size_t k) const {
  return state_widths[k] * static_cast<int64_t>(compute_size(dtype));
}

int64_t RecordLayout::bytes() const {
  int64_t total = weight_bytes() + (steps ? 8 : 0);
  for (size_t k = 0; k < state_widths.size(); ++k) total += state_bytes(k);
  return total;
}

}  // namespace hotbed
