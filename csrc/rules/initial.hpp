// First values of rows: a pure function of (table key, id, column), so a row starts the same
// whenever, wherever and in whatever company it is first asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.hpp"
#include "kernels/initial_spec.hpp"

namespace hotbed {

// Throws std::invalid_argument naming the value where a parameter is not finite, a deviation is
// negative, a range is empty, or it holds no probability that a double can express.
InitialSpec initial_spec(Initial kind, double a, double b, double c, double d, uint64_t table_key);

// One spec of consecutive bands of columns, each made by initial_spec with its `end_column` set.
// Throws std::invalid_argument where these do not increase.
InitialSpec initial_columns(std::vector<InitialSpec> bands, uint64_t table_key);

// Writes the first values of n rows of `dim` columns, contiguous, on the threads of OpenMP.
// The ids are ids[0 .. n), or first_id .. first_id + n - 1 where `ids` is null.
void initial_rows(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t n,
                  int64_t dim, DType dtype, void* rows);

}  // namespace hotbed
