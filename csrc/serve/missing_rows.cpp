#include "serve/missing_rows.hpp"

#include <algorithm>
#include <utility>

#include "kernels/kernels.hpp"
#include "rules/initial.hpp"

namespace hotbed {

MissingRows::MissingRows(std::vector<float> vector) : vector_(std::move(vector)) {}

MissingRows::MissingRows(InitialSpec spec, DType dtype, int64_t dim)
    : vector_(static_cast<size_t>(dim)),
      spec_(std::move(spec)),
      dtype_(dtype),
      are_computed_(true) {}

void MissingRows::compute(const int64_t* ids, int64_t n, float* rows) const {
  if (dtype_ == DType::f32) return initial_rows(spec_, ids, 0, n, dim(), dtype_, rows);
  std::vector<uint8_t> encoded(static_cast<size_t>(n * dim()) * size_of(dtype_));
  initial_rows(spec_, ids, 0, n, dim(), dtype_, encoded.data());
  if (dtype_ == DType::f64) {
    auto* numbers = reinterpret_cast<const double*>(encoded.data());
    std::transform(numbers, numbers + n * dim(), rows,
                   [](double number) { return static_cast<float>(number); });
  } else {
    kernels().decode_values(dtype_, encoded.data(), n * dim(), rows);
  }
}

}  // namespace hotbed
