// What tests of Python give to the core: disks that fail, machines with little memory.
#include "bindings/bindings.hpp"
#include "testing/io_faults.hpp"
#include "testing/pretended_memory.hpp"

using namespace hotbed;

void bind_testing(nb::module_& module) {
  nb::class_<IoFaults, IoObserver>(module, "IoFaults", "Makes chosen transfers of a log fail.")
      .def(nb::init<>())
      .def("fail_read", &IoFaults::fail_read, "nth"_a, "error"_a, nb::rv_policy::reference_internal)
      .def("fail_write", &IoFaults::fail_write, "nth"_a, "error"_a,
           nb::rv_policy::reference_internal)
      .def("flip_bit", &IoFaults::flip_bit, "nth"_a, "bit"_a, nb::rv_policy::reference_internal)
      .def("shorten_read", &IoFaults::shorten_read, "nth"_a, "nbytes"_a,
           nb::rv_policy::reference_internal)
      .def("full_after_writing", &IoFaults::full_after_writing, "nbytes"_a,
           nb::rv_policy::reference_internal)
      .def("full_after_preallocating", &IoFaults::full_after_preallocating, "nbytes"_a,
           nb::rv_policy::reference_internal)
      .def("make_room", &IoFaults::make_room, nb::rv_policy::reference_internal)
      .def_prop_ro("reads", &IoFaults::reads);

  module.def("pretend_memory", &pretend_memory, "nbytes"_a,
             "available_memory() answers so many from now on; 0: as the system has it.");
}
