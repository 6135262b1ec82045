// Rows of ids that no layer of a table has.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.hpp"
#include "kernels/initial_spec.hpp"

namespace hotbed {

// Threads: everything const may run in several.
class MissingRows {
 public:
  // The same for all.
  explicit MissingRows(std::vector<float> vector);
  // First values, rounded to the dtype of the table that was trained.
  MissingRows(InitialSpec spec, DType dtype, int64_t dim);

  int64_t dim() const { return static_cast<int64_t>(vector_.size()); }
  // False: vector() is read of all.
  bool are_computed() const { return are_computed_; }
  const float* vector() const { return vector_.data(); }
  // Writes n x dim numbers.
  void compute(const int64_t* ids, int64_t n, float* rows) const;

 private:
  std::vector<float> vector_;
  InitialSpec spec_;
  DType dtype_ = DType::f32;
  bool are_computed_ = false;
};

}  // namespace hotbed
