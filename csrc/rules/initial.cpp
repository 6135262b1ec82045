#include "rules/initial.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/inverse_normal.inl"
#include "kernels/kernels.hpp"

namespace hotbed {

namespace {

// Fewer values than this are not worth waking another thread for.
constexpr int64_t kValuesPerTask = 1 << 15;

std::string text(double value) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.17g", value);
  return digits;
}

double point_of(double probability) {
  return probability < base::kFarTail ? base::inverse_normal_far(probability)
                                      : base::inverse_normal(probability, 0.5 - probability);
}

// The distribution function at x <= 0: the probability whose point is x, by bisection of the
// inverse over the doubles in between (their bit patterns are in the same order). Not libm's erfc,
// whose last bits depend on its version.
double probability_below(double x) {
  uint64_t low = std::bit_cast<uint64_t>(0x1p-1022);
  uint64_t high = std::bit_cast<uint64_t>(0.5);
  if (point_of(0x1p-1022) >= x) return 0.0;
  while (high - low > 1) {
    uint64_t middle = low + (high - low) / 2;
    (point_of(std::bit_cast<double>(middle)) < x ? low : high) = middle;
  }
  return std::bit_cast<double>(high);
}

void require_finite(double value, const char* name) {
  if (!std::isfinite(value)) {
    throw std::invalid_argument("an initializer's " + std::string(name) + " is " + text(value) +
                                "; pass a finite number");
  }
}

void require_deviation(double value) {
  require_finite(value, "standard deviation");
  if (value < 0) {
    throw std::invalid_argument("an initializer's standard deviation is " + text(value) +
                                "; pass one that is not negative");
  }
}

void require_range(double low, double high) {
  require_finite(low, "lower bound");
  require_finite(high, "upper bound");
  if (low > high || !std::isfinite(high - low)) {
    throw std::invalid_argument("an initializer's range from " + text(low) + " to " + text(high) +
                                " is " + (low > high ? "empty" : "too wide") +
                                "; pass low <= high with a finite difference");
  }
}

void fill_truncation(InitialSpec& spec) {
  if (spec.b == 0) {
    if (spec.a < spec.c || spec.a > spec.d) {
      throw std::invalid_argument("an initializer's mean " + text(spec.a) +
                                  " with standard deviation 0 lies outside its range from " +
                                  text(spec.c) + " to " + text(spec.d));
    }
    spec.kind = Initial::constant;
    return;
  }
  double low = (spec.c - spec.a) / spec.b;
  double high = (spec.d - spec.a) / spec.b;
  spec.mirrored = low > 0;
  if (spec.mirrored) {
    std::swap(low, high);
    low = -low;
    high = -high;
  }
  spec.probability_low = probability_below(std::min(low, 0.0));
  spec.probability_high = high <= 0 ? probability_below(high) : 1 - probability_below(-high);
  if (!(spec.probability_low < spec.probability_high)) {
    throw std::invalid_argument("an initializer's range from " + text(spec.c) + " to " +
                                text(spec.d) + " holds none of the normal distribution of mean " +
                                text(spec.a) + " and standard deviation " + text(spec.b) +
                                "; widen it or move the mean into it");
  }
}

// Rows of a table whose columns start as different things, on the calling thread.
void write_bands(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t n,
                 int64_t dim, DType dtype, uint8_t* rows) {
  auto item = static_cast<int64_t>(size_of(dtype));
  std::vector<uint8_t> scratch;
  int64_t begin = 0;  // column of the table in which the band begins, less the part's first column
  for (const InitialSpec& band : spec.bands) {
    int64_t from = std::max<int64_t>(begin, 0);
    int64_t to = std::min(band.end_column - spec.origin.column, dim);
    begin = band.end_column - spec.origin.column;
    if (from >= to) continue;
    InitialSpec part = band;
    part.table_key = spec.table_key;
    part.has_padding = spec.has_padding;
    part.padding_id = spec.padding_id;
    part.origin = spec.origin;
    part.origin.column += from;
    int64_t width = (to - from) * item;
    scratch.resize(static_cast<size_t>(n * width));
    kernels().initial_rows(part, ids, first_id, n, to - from, dtype, scratch.data());
    for (int64_t r = 0; r < n; ++r) {
      std::memcpy(rows + (r * dim + from) * item, scratch.data() + r * width,
                  static_cast<size_t>(width));
    }
  }
}

}  // namespace

InitialSpec initial_columns(std::vector<InitialSpec> bands, uint64_t table_key) {
  if (bands.size() == 1) {
    bands[0].table_key = table_key;
    return bands[0];
  }
  InitialSpec spec{.table_key = table_key};
  int64_t before = 0;
  for (const InitialSpec& band : bands) {
    if (band.end_column <= before) {
      throw std::invalid_argument("a band of columns ends at " + std::to_string(band.end_column) +
                                  ", and the one before it at " + std::to_string(before));
    }
    before = band.end_column;
  }
  spec.bands = std::move(bands);
  return spec;
}

InitialSpec initial_spec(Initial kind, double a, double b, double c, double d, uint64_t table_key) {
  InitialSpec spec{.kind = kind, .a = a, .b = b, .c = c, .d = d, .table_key = table_key};
  switch (kind) {
    case Initial::constant: require_finite(a, "value"); break;
    case Initial::uniform: require_range(a, b); break;
    case Initial::normal:
      require_finite(a, "mean");
      require_deviation(b);
      break;
    case Initial::truncated_normal:
      require_finite(a, "mean");
      require_deviation(b);
      require_range(c, d);
      fill_truncation(spec);
      break;
    default:
      throw std::invalid_argument("initializer kind " + std::to_string(static_cast<int>(kind)) +
                                  " is unknown; pass 0 (constant) to 3 (truncated normal)");
  }
  return spec;
}

void initial_rows(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t n,
                  int64_t dim, DType dtype, void* rows) {
  if (n <= 0 || dim <= 0) return;
  const Kernels& kernel = kernels();
  int64_t rows_per_task = std::max<int64_t>(1, kValuesPerTask / dim);
  int64_t tasks = (n + rows_per_task - 1) / rows_per_task;
  auto row_bytes = static_cast<int64_t>(size_of(dtype)) * dim;
  auto* out = static_cast<uint8_t*>(rows);
#pragma omp parallel for schedule(static) if (tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    int64_t begin = task * rows_per_task;
    int64_t count = std::min(rows_per_task, n - begin);
    auto first =
        static_cast<int64_t>(static_cast<uint64_t>(first_id) + static_cast<uint64_t>(begin));
    const int64_t* own = ids ? ids + begin : nullptr;
    if (!spec.bands.empty()) {
      write_bands(spec, own, first, count, dim, dtype, out + begin * row_bytes);
    } else {
      kernel.initial_rows(spec, own, first, count, dim, dtype, out + begin * row_bytes);
    }
  }
}

}  // namespace hotbed
