// All rows of tables for Python, chunk by chunk: out of tables, and out of the files of a log.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings/tensors.hpp"
#include "log/row_log.hpp"
#include "table/record_stream.hpp"
#include "table/snapshot.hpp"

using namespace hotbed;

namespace {

Tensor copy_of(const void* from, std::vector<size_t> shape, nb::dlpack::dtype element) {
  Tensor made = block_tensor(std::move(shape), element);
  std::memcpy(made.data(), from, made.nbytes());
  return made;
}

// (place of the table, ids, weights, states, last steps) of rows, or None. `make`: a tensor of what
// lies at an address, of a shape and element.
template <class Make>
nb::object as_tuple(const RecordParts* rows, size_t at, bool with_states, Make make) {
  if (!rows) return nb::none();
  const RecordLayout& layout = rows->layout;
  auto n = static_cast<size_t>(rows->count);
  DType of_states = layout.dtype == DType::f64 ? DType::f64 : DType::f32;
  nb::list states;
  for (size_t k = 0; with_states && k < rows->states.size(); ++k) {
    auto width = static_cast<size_t>(layout.state_widths[k]);
    states.append(make(rows->states[k].data(), {n, width}, element(of_states)));
  }
  nb::object last = nb::none();
  if (layout.steps) last = nb::cast(make(rows->last.data(), {n}, nb::dtype<int64_t>()));
  return nb::make_tuple(
      at, make(rows->ids.data(), {n}, nb::dtype<int64_t>()),
      make(rows->weights.data(), {n, static_cast<size_t>(layout.dim)}, element(layout.dtype)),
      states, last);
}

nb::object next_rows(RecordStream& stream, bool with_states) {
  size_t at;
  const RecordParts* rows;
  {
    nb::gil_scoped_release unlocked;
    rows = stream.next(at);
  }
  return as_tuple(rows, at, with_states, copy_of);
}

// The same, without a copy.
nb::object taken_rows(Snapshot& snapshot, bool with_states) {
  size_t at;
  std::shared_ptr<RecordParts> rows;
  {
    nb::gil_scoped_release unlocked;
    rows = snapshot.next(at);
  }
  auto view = [&](const void* from, std::vector<size_t> shape, nb::dlpack::dtype element) {
    nb::capsule owner = owner_of(std::make_unique<std::shared_ptr<RecordParts>>(rows));
    return Tensor(const_cast<void*>(from), shape.size(), shape.data(), owner, nullptr, element);
  };
  return as_tuple(rows.get(), at, with_states, view);
}

nb::object rows_of_log(RecordsByTable& stream, bool with_states) {
  int32_t table = 0;
  const RecordParts* rows;
  {
    nb::gil_scoped_release unlocked;
    rows = stream.next(table);
  }
  return as_tuple(rows, static_cast<size_t>(table), with_states, copy_of);
}

std::unique_ptr<RecordsByTable> all_of_log(RowLog& log, size_t store,
                                           const std::vector<int32_t>& tables, DType dtype,
                                           int64_t dim, std::vector<int64_t> state_widths,
                                           bool steps, int64_t most) {
  RecordLayout layout{dtype, dim, std::move(state_widths), steps};
  LogTier& tier = log.tier(store);
  if (layout.bytes() != tier.record_bytes()) {
    throw std::invalid_argument("records have " + std::to_string(tier.record_bytes()) +
                                " bytes, and such rows " + std::to_string(layout.bytes()));
  }
  return std::make_unique<RecordsByTable>(layout, nullptr, tier.scan(tables), most);
}

}  // namespace

void bind_records(nb::module_& module) {
  nb::class_<RecordStream>(module, "RecordStream",
                           "The stored rows of tables, each once, in the order in which they lie; "
                           "until it is closed, rows of tiers stay where they are.")
      .def_static(
          "make",
          [](std::vector<std::shared_ptr<Table>> tables, int64_t most, bool current,
             std::vector<uint64_t> since) {
            return std::make_unique<RecordStream>(std::move(tables), most, current,
                                                  std::move(since));
          },
          "tables"_a, "most"_a, "current"_a, "since"_a = std::vector<uint64_t>{},
          "`since`: of each table the mark since which rows have changed that are wanted; none: "
          "all "
          "rows.")
      .def(
          "next", &next_rows, "states"_a,
          nb::sig("def next(self, states: bool) -> tuple[int, torch.Tensor, torch.Tensor, "
                  "list[torch.Tensor], torch.Tensor | None] | None"),
          "(place of the table, ids, weights, states, last steps) of up to `most` rows of it; None "
          "behind the last.")
      .def("close", &RecordStream::close, Unlocked());
  nb::class_<Snapshot>(module, "Snapshot",
                       "The rows of tables as they are when it is made, each once, while others "
                       "change them; made while the tables are held.")
      .def_static("can_read", &Snapshot::can_read, "tables"_a,
                  "Whether rows of these tables can be read while others change them.")
      .def(
          nb::init<std::vector<std::shared_ptr<Table>>, int64_t, uint64_t, std::vector<uint64_t>>(),
          "tables"_a, "most"_a, "bytes"_a, "since"_a, Unlocked(),
          "Of tables that can be read. `bytes`: of rows that others have changed and nobody has "
          "taken; beyond, a change waits. "
          "`since`: as of RecordStream.")
      .def("next", &taken_rows, "states"_a,
           nb::sig("def next(self, states: bool) -> tuple[int, torch.Tensor, torch.Tensor, "
                   "list[torch.Tensor], torch.Tensor | None] | None"),
           "As RecordStream.next().")
      .def("stop", &Snapshot::stop, Unlocked(), "Nobody wants the rest.")
      .def("end", &Snapshot::end, Unlocked(),
           "Has the tables forget it, while somebody has them alone.")
      .def_prop_ro(
          "waited",
          [](const Snapshot& s) { return std::chrono::duration<double>(s.waited()).count(); },
          "Seconds that changes have waited for room.");
  nb::class_<RecordsByTable>(module, "RecordsByTable", "The rows of tables in a log, each once.")
      .def_static(
          "make", &all_of_log, "log"_a, "store"_a, "tables"_a, "dtype"_a, "dim"_a, "state_widths"_a,
          "steps"_a, "most"_a, nb::keep_alive<0, 1>(), Unlocked(),
          "Of tables of a store by their numbers, whose rows are of this kind; `steps`: with "
          "the step up to which each is current.")
      .def("next", &rows_of_log, "states"_a,
           nb::sig("def next(self, states: bool) -> tuple[int, torch.Tensor, torch.Tensor, "
                   "list[torch.Tensor], torch.Tensor | None] | None"),
           "As RecordStream.next(), with the number of the table.");
}
