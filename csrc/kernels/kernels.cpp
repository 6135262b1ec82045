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
#include "kernels/int8.inl"
#include "kernels/reduce.inl"
#include "kernels/rules.inl"
#include "kernels/stored_rows.inl"

#define HOTBED_STRING_OF(x) #x
#define HOTBED_STRING(x) HOTBED_STRING_OF(x)

namespace hotbed::HOTBED_ISA {

// A constant, as code to fill it in would run before anybody has asked what the processor has.
extern constinit const Kernels table{
    .isa = HOTBED_STRING(HOTBED_ISA),
    .initial_rows = initial_rows,
    .encode_values = encode_values,
    .encode_values_stochastic = encode_values_stochastic,
    .decode_values = decode_values,
    .encode_int8 = encode_int8,
    .decode_int8 = decode_int8,
    .update_rows = update_rows,
    .first_non_finite = first_non_finite,
    .catch_up_row = catch_up_row,
    .gather = gather,
    .read_row = read_row,
    .reduce = reduce_rows,
    .reduce_in_order = reduce_in_order,
    .pool_stored = pool_stored,
};

}  // namespace hotbed::HOTBED_ISA
