#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kernels.hpp"
#include "memory.hpp"

namespace nb = nanobind;

void bind_initial(nb::module_& module);
void bind_rules(nb::module_& module);
void bind_data(nb::module_& module);
void bind_index(nb::module_& module);

NB_MODULE(_core, module) {
  module.doc() = "The compiled core of Hotbed.";
  module.def("isa", [] { return std::string(hotbed::kernels().isa); });
  module.def("use_isa", &hotbed::use_kernels, nb::arg("isa"));
  module.def("available_memory", &hotbed::available_memory);
  module.def("set_available_memory_for_test", &hotbed::set_available_memory_for_test);
  bind_initial(module);
  bind_rules(module);
  bind_data(module);
  bind_index(module);
}
