// Compiled once for each instruction set, with HOTBED_ISA naming it. Only what lies in the inner
// namespace or is `static` may be defined here: anything else would be merged by the linker with
// the copy of another instruction set.
#include "kernels/kernels.hpp"

#include "base/prefetch.hpp"
#include "kernels/catch_up.inl"
#include "kernels/codec.hpp"
#include "kernels/codec.inl"
#include "kernels/gather.inl"
#include "kernels/initial.inl"
#include "kernels/reduce.inl"
#include "kernels/rules.inl"

#define HOTBED_STRING_OF(x) #x
#define HOTBED_STRING(x) HOTBED_STRING_OF(x)

namespace hotbed::HOTBED_ISA {

Kernels table() {
  Kernels kernels{};
  kernels.isa = HOTBED_STRING(HOTBED_ISA);
  kernels.initial_rows = initial_rows;
  kernels.encode_values = encode_values;
  kernels.encode_values_stochastic = encode_values_stochastic;
  kernels.decode_values = decode_values;
  kernels.update_rows = update_rows;
  kernels.first_non_finite = first_non_finite;
  kernels.catch_up_row = catch_up_row;
  kernels.gather = gather;
  kernels.read_row = read_row;
  kernels.reduce = reduce_rows;
  kernels.reduce_in_order = reduce_in_order;
  return kernels;
}

}  // namespace hotbed::HOTBED_ISA
