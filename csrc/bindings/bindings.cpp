#include "bindings/bindings.hpp"

#include <nanobind/stl/string.h>

#include "base/crc32c.hpp"
#include "base/memory.hpp"
#include "base/shared_counter.hpp"
#include "kernels/kernels.hpp"
#include "log/io_engine.hpp"
#include "storage/storage.hpp"

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // a model alive at exit is no leak
  module.doc() = "The compiled core of Hotbed.";
  module.def("isa", [] { return std::string(hotbed::kernels().isa); });
  module.def("use_isa", &hotbed::use_kernels, "isa"_a);
  module.def(
      "crc32c",
      [](hotbed::Array<const uint8_t, hotbed::Vector> data, uint32_t before) {
        nb::gil_scoped_release unlocked;
        return hotbed::crc32c(data.data(), data.size(), before);
      },
      "data"_a, "before"_a = 0, "csrc/base/crc32c.hpp. Thread-safe.");
  nb::enum_<hotbed::Waited>(module, "Waited")
      .value("raised", hotbed::Waited::raised)
      .value("too_long", hotbed::Waited::too_long)
      .value("ended", hotbed::Waited::ended)
      .value("exited", hotbed::Waited::exited);
  module.def(
      "raise_counter",
      [](hotbed::Address counter, int64_t value) {
        hotbed::raise_counter(hotbed::pointer<int64_t>(counter), value);
      },
      "counter"_a, "value"_a, "csrc/base/shared_counter.hpp.");
  module.def(
      "leave_counter",
      [](hotbed::Address counter) { hotbed::leave_counter(hotbed::pointer<int64_t>(counter)); },
      "counter"_a, "csrc/base/shared_counter.hpp.");
  module.def(
      "wait_for_counter",
      [](hotbed::Address counter, int64_t value, double seconds, int process) {
        return hotbed::wait_for_counter(hotbed::pointer<int64_t>(counter), value, seconds, process);
      },
      "counter"_a, "value"_a, "seconds"_a, "process"_a, hotbed::Unlocked(),
      "csrc/base/shared_counter.hpp.");
  module.def("available_memory", &hotbed::available_memory);
  // hotbed.errors defines the class (an import cycle in C++ would be worse) and registers it here.
  static PyObject* out_of_memory = nullptr;
  module.def("register_out_of_memory",
             [](nb::object type) { out_of_memory = type.release().ptr(); });
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const hotbed::OutOfMemory& error) {
      nb::object made = nb::handle(out_of_memory ? out_of_memory : PyExc_MemoryError)(error.what());
      if (out_of_memory) {
        made.attr("asked_bytes") = error.asked;
        made.attr("free_bytes") = error.free;
      }
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
  });

  static PyObject* storage_error = nullptr;
  module.def("register_storage_error",
             [](nb::object type) { storage_error = type.release().ptr(); });
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    auto raise = [](const std::string& message, uint64_t needed, nb::object needs = nb::tuple(),
                    const std::string& path = {}, nb::object budget = nb::none(),
                    nb::object parts = nb::none(), int code = 0) {
      nb::object made = nb::handle(storage_error ? storage_error : PyExc_RuntimeError)(message);
      made.attr("needed") = needed;
      made.attr("needs") = needs;
      made.attr("path") = path;
      made.attr("budget") = budget;
      made.attr("parts") = parts;
      if (code) made.attr("errno") = code;
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    };
    try {
      std::rethrow_exception(thrown);
    } catch (const hotbed::OverBudget& error) {
      nb::list needs;
      for (const hotbed::OverBudget::Need& need : error.needs) {
        needs.append(nb::make_tuple(hotbed::address(need.space), need.slots));
      }
      raise(std::string("Storage: ") + error.what() + ".",
            static_cast<uint64_t>(error.needs[0].slots), needs);
    } catch (const hotbed::BudgetTooSmall& error) {
      const char* budget = error.host ? "Storage: host " : "Storage: the tier that computes ";
      raise(std::string(budget) + error.what() + ".", error.needed.total(), nb::tuple(), {},
            nb::str(error.host ? "host" : "compute"), by_part(error.needed));
    } catch (const hotbed::TierError& error) {
      raise(error.what(), error.bytes, nb::tuple(), error.path, nb::none(), nb::none(), error.code);
    } catch (const hotbed::IoError& error) {
      raise(error.what(), error.bytes, nb::tuple(), error.path, nb::none(), nb::none(), error.code);
    }
  });

  bind_data(module);
  bind_initial(module);
  bind_rules(module);
  bind_table_rule(module);
  bind_index(module);
  bind_log(module);
  bind_table(module);
  bind_records(module);
  bind_residency(module);
  bind_storage(module);
  bind_device(module);
  bind_exchange(module);
  bind_serve(module);
  bind_testing(module);
}
