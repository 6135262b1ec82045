// Pool: rows → one vector a bag, and its two backward passes that read rows or outputs.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch.hpp"
#include "kernels/kernels.hpp"

namespace hotbed {

// Where a feature's vectors go, or its gradient comes from: bag b at data + b * stride elements of
// the table's compute type.
struct Vectors {
  void* data = nullptr;
  int64_t stride = 0;
};

// One a feature.
struct VectorPlaces {
  std::vector<Vectors> of_features;
};

// Writes wanted[f], one Vectors a feature, and remembers in the batch what backward will need, also
// of features whose vectors nobody wants.
// Each bag is summed in the order of its ids; combiner none treats every id as a bag of its own.
void pool(Batch& batch, const std::vector<Vectors>& wanted);

// The gradient of per-sample weights: grad_weights[f] (count of compute type) or nullptr for each
// feature; grads and outputs as in pool. Combiners sum, mean and sqrtn.
void weight_gradients(const Batch& batch, const std::vector<Vectors>& grads,
                      const std::vector<Vectors>& outputs, const std::vector<void*>& grad_weights);

}  // namespace hotbed
