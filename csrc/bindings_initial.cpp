#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "initial.hpp"
#include "kernels.hpp"

namespace nb = nanobind;

namespace {

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

void initial_rows(int kind, double a, double b, double c, double d, uint64_t table_key,
                  uint64_t ids, int64_t n, int64_t dim, int dtype, uint64_t out, int64_t first_id,
                  std::optional<int64_t> padding_id) {
  hotbed::InitialSpec spec =
      hotbed::initial_spec(static_cast<hotbed::Initial>(kind), a, b, c, d, table_key);
  spec.has_padding = padding_id.has_value();
  spec.padding_id = padding_id.value_or(0);
  hotbed::initial_rows(spec, pointer<const int64_t>(ids), first_id, n, dim,
                       static_cast<hotbed::DType>(dtype), pointer<void>(out));
}

}  // namespace

// Addresses are plain integers (Tensor.data_ptr()); the caller keeps the memory alive and of the
// right size. An address of 0 for `ids` stands for first_id .. first_id + n - 1.
void bind_initial(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def("initial_rows", &initial_rows, nb::arg("kind"), nb::arg("a"), nb::arg("b"),
             nb::arg("c"), nb::arg("d"), nb::arg("table_key"), nb::arg("ids"), nb::arg("n"),
             nb::arg("dim"), nb::arg("dtype"), nb::arg("out"), nb::arg("first_id") = 0,
             nb::arg("padding_id") = nb::none(), release());
  module.def(
      "check_initial",
      [](int kind, double a, double b, double c, double d) {
        hotbed::initial_spec(static_cast<hotbed::Initial>(kind), a, b, c, d, 0);
      },
      nb::arg("kind"), nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"));
  module.def(
      "encode_values",
      [](int dtype, uint64_t values, int64_t n, uint64_t out) {
        hotbed::kernels().encode_values(static_cast<hotbed::DType>(dtype),
                                        pointer<const float>(values), n, pointer<void>(out));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("n"), nb::arg("out"), release());
  module.def(
      "encode_values_stochastic",
      [](int dtype, uint64_t values, uint64_t random, int64_t n, uint64_t out) {
        hotbed::kernels().encode_values_stochastic(
            static_cast<hotbed::DType>(dtype), pointer<const float>(values),
            pointer<const uint32_t>(random), n, pointer<void>(out));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("random"), nb::arg("n"), nb::arg("out"),
      release());
  module.def(
      "decode_values",
      [](int dtype, uint64_t values, int64_t n, uint64_t out) {
        hotbed::kernels().decode_values(static_cast<hotbed::DType>(dtype),
                                        pointer<const void>(values), n, pointer<float>(out));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("n"), nb::arg("out"), release());
}
