#include "bindings/initial.hpp"

#include <nanobind/stl/optional.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "kernels/kernels.hpp"

namespace hotbed {

InitialSpec initial_of(const Bands& bands, uint64_t key, std::optional<int64_t> padding) {
  std::vector<InitialSpec> specs;
  for (const auto& [end, kind, a, b, c, d] : bands) {
    specs.push_back(initial_spec(static_cast<Initial>(kind), a, b, c, d, 0));
    specs.back().end_column = end;
  }
  InitialSpec initial = initial_columns(std::move(specs), key);
  initial.has_padding = padding.has_value();
  initial.padding_id = padding.value_or(0);
  return initial;
}

}  // namespace hotbed

using namespace hotbed;

namespace {

void write_initial_rows(int kind, double a, double b, double c, double d, uint64_t table_key,
                        Address ids, int64_t n, int64_t dim, int dtype, Address out,
                        int64_t first_id, std::optional<int64_t> padding_id) {
  InitialSpec spec = initial_spec(static_cast<Initial>(kind), a, b, c, d, table_key);
  spec.has_padding = padding_id.has_value();
  spec.padding_id = padding_id.value_or(0);
  initial_rows(spec, pointer<const int64_t>(ids), first_id, n, dim, static_cast<DType>(dtype),
               pointer<void>(out));
}

}  // namespace

// An address of 0 for `ids` stands for first_id .. first_id + n - 1.
void bind_initial(nb::module_& module) {
  module.def("initial_rows", &write_initial_rows, "kind"_a, "a"_a, "b"_a, "c"_a, "d"_a,
             "table_key"_a, "ids"_a, "n"_a, "dim"_a, "dtype"_a, "out"_a, "first_id"_a = 0,
             "padding_id"_a = nb::none(), Unlocked());
  module.def(
      "check_initial",
      [](int kind, double a, double b, double c, double d) {
        initial_spec(static_cast<Initial>(kind), a, b, c, d, 0);
      },
      "kind"_a, "a"_a, "b"_a, "c"_a, "d"_a);
  module.def(
      "encode_values",
      [](int dtype, Address values, int64_t n, Address out) {
        kernels().encode_values(static_cast<DType>(dtype), pointer<const float>(values), n,
                                pointer<void>(out));
      },
      "dtype"_a, "values"_a, "n"_a, "out"_a, Unlocked());
  module.def(
      "encode_values_stochastic",
      [](int dtype, Address values, Address random, int64_t n, Address out) {
        kernels().encode_values_stochastic(static_cast<DType>(dtype), pointer<const float>(values),
                                           pointer<const uint32_t>(random), n, pointer<void>(out));
      },
      "dtype"_a, "values"_a, "random"_a, "n"_a, "out"_a, Unlocked());
  module.def(
      "decode_values",
      [](int dtype, Address values, int64_t n, Address out) {
        kernels().decode_values(static_cast<DType>(dtype), pointer<const void>(values), n,
                                pointer<float>(out));
      },
      "dtype"_a, "values"_a, "n"_a, "out"_a, Unlocked());
}
