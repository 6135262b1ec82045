// Tensors of torch over memory of the core.
#pragma once

#include <vector>

#include "base/dtype.hpp"
#include "batch/pool.hpp"
#include "bindings/bindings.hpp"

namespace hotbed {

inline nb::dlpack::dtype element(DType dtype) {
  switch (dtype) {
    case DType::f64: return nb::dtype<double>();
    case DType::f32: return nb::dtype<float>();
    case DType::f16: return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    default: return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  }
}

using Tensor = nb::ndarray<nb::pytorch, nb::device::cpu>;

// A tensor of `shape` over a block that returns to the pool with the tensor.
inline Tensor block_tensor(std::vector<size_t> shape, nb::dlpack::dtype element) {
  uint64_t bytes = element.bits / 8;
  for (size_t extent : shape) bytes *= extent;
  void* block = BlockPool::instance().take(bytes);
  nb::capsule owner(block, [](void* data) noexcept { BlockPool::instance().give(data); });
  return Tensor(block, shape.size(), shape.data(), owner, nullptr, element);
}

}  // namespace hotbed
