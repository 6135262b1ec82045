#include "rules/initial.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>

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

}  // namespace

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
    kernel.initial_rows(spec, ids ? ids + begin : nullptr, first, count, dim, dtype,
                        out + begin * row_bytes);
  }
}

}  // namespace hotbed
