// What the rows of a table start as.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.hpp"

namespace hotbed {

enum class Initial : int { constant = 0, uniform = 1, normal = 2, truncated_normal = 3 };

// What the rows of a table start as. Built by initial_spec or initial_columns, which check it and
// fill the derived part. Any number of threads may read it.
struct InitialSpec {
  Initial kind = Initial::constant;
  // constant: a. uniform: from a to b. normal: mean a, standard deviation b.
  // truncated_normal: the same, kept within [c, d].
  double a = 0, b = 0, c = 0, d = 0;
  uint64_t table_key = 0;
  // The row of this id is zeros.
  int64_t padding_id = 0;
  bool has_padding = false;
  Origin origin;  // of the table; padding and ids are its own

  // Truncated normal only: the interval of probabilities that is drawn from. An interval above
  // the mean is drawn as its mirror image below, where probabilities keep their precision.
  double probability_low = 0, probability_high = 0;
  bool mirrored = false;

  // Not empty where columns start as different things, which stand here: consecutive bands, each up
  // to before its `end_column`, counted in the table of `origin`.
  std::vector<InitialSpec> bands;
  int64_t end_column = 0;
};

}  // namespace hotbed
