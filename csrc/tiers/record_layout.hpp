// What a record is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.hpp"

namespace hotbed {

// How a row with its states and metadata lies in a record: one part after the other, as planes have
// them.
struct RecordLayout {
  DType dtype = DType::f32;
  int64_t dim = 0;
  std::vector<int64_t> state_widths;
  bool steps = false;  // the step up to which the row is current

  bool operator==(const RecordLayout&) const = default;
  int64_t weight_bytes() const { return dim * static_cast<int64_t>(size_of(dtype)); }
  int64_t state_bytes(size_t k) const {
    return state_widths[k] * static_cast<int64_t>(compute_size(dtype));
  }
  int64_t bytes() const {
    int64_t total = weight_bytes() + (steps ? 8 : 0);
    for (size_t k = 0; k < state_widths.size(); ++k) total += state_bytes(k);
    return total;
  }
};

}  // namespace hotbed
