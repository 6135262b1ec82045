// What tables in the memory of a device need of the core, for Python.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "batch/device_batch.hpp"
#include "bindings/bindings.hpp"
#include "storage/storage.hpp"
#include "tiers/row_planes.hpp"

using namespace hotbed;

namespace {

// A Python object that C++ keeps, and lets go of on any thread.
class Kept {
 public:
  explicit Kept(nb::object object) : object_(std::move(object)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    nb::gil_scoped_acquire locked;
    object_.reset();
  }
  const nb::object& get() const { return object_; }

 private:
  nb::object object_;
};

// Planes that Python moves rows of. Whoever calls must not hold a lock that is waited for under the
// interpreter's: the core's calls from Python release it first.
class PythonPlanes : public RowPlanes {
 public:
  explicit PythonPlanes(nb::object planes) : planes_(std::move(planes)) {}
  void gather(const int64_t* slots, int64_t n, uint8_t* records) override {
    nb::gil_scoped_acquire locked;
    planes_.get().attr("gather")(address(slots), n, address(records));
  }
  void scatter(const uint8_t* records, const int64_t* slots, int64_t n) override {
    nb::gil_scoped_acquire locked;
    planes_.get().attr("scatter")(address(records), address(slots), n);
  }
  const nb::object& object() const { return planes_.get(); }

 private:
  Kept planes_;
};

}  // namespace

void bind_device(nb::module_& module) {
  module.def(
      "set_planes",
      [](Storage& storage, nb::object make) {
        if (make.is_none()) return storage.set_planes(nullptr);
        auto kept = std::make_shared<Kept>(std::move(make));
        storage.set_planes([kept](const RecordLayout& layout, int64_t capacity) {
          nb::gil_scoped_acquire locked;
          nb::object planes =
              kept->get()(layout.dim, layout.dtype, nb::cast(layout.state_widths), capacity);
          return std::make_shared<PythonPlanes>(std::move(planes));
        });
      },
      "storage"_a, "make"_a.none(),
      "Rows that compute lie in `make(dim, dtype, state widths, capacity)` from the next layout "
      "on: objects with gather(slots, n, records) and scatter(records, slots, n), which are called "
      "with addresses, on any thread. None: in the core's memory.");
  module.def(
      "planes_of",
      [](const Table& table) -> nb::object {
        if (!table.space() || table.unallocated()) return nb::none();
        auto* planes = dynamic_cast<PythonPlanes*>(table.space()->planes());
        return planes ? planes->object() : nb::none();
      },
      "table"_a, "What set_planes' function made for the table's row space, or None.");
  module.def(
      "write_slots",
      [](const Batch& batch, Address out) { write_slots(batch, pointer<int64_t>(out)); }, "batch"_a,
      "out"_a, Unlocked(), "The slots of all positions, one feature after the other.");
  module.def(
      "write_index",
      [](Batch& batch, Address out) { return write_index(batch, pointer<int64_t>(out)); },
      "batch"_a, "out"_a, Unlocked(),
      "The transposed index: (used, taken), and slots (used), starts (used + 1), order (taken), "
      "table starts, ids (used) one behind the other.");
  module.def(
      "mark_written",
      [](const Table& table, Address slots, int64_t n) {
        table.space()->mark_dirty(pointer<const int64_t>(slots), n);
      },
      "table"_a, "slots"_a, "n"_a, "The rows in these slots of a table in tiers were written.");
  module.def(
      "scratch_of",
      [](Batch& batch, size_t table) {
        auto& scratch = batch.parts.at(table).scratch;
        return std::make_pair(address(scratch.data()), scratch.size());
      },
      "batch"_a, "table"_a, "(address, bytes) of rows that have no slot.");
}
