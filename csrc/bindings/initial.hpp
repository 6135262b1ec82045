// First values as the Python side describes them.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "rules/initial.hpp"

namespace hotbed {

// (column before which it ends, kind, a, b, c, d) of consecutive bands of columns.
using Bands = std::vector<std::tuple<int64_t, int, double, double, double, double>>;

InitialSpec initial_of(const Bands& bands, uint64_t key, std::optional<int64_t> padding);

}  // namespace hotbed
