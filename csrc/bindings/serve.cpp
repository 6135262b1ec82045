// Tables of bundles. Arrays cross as buffers: of all ways that check their kind and size it is the
// one that costs least, and a request has some of them for each of its lookups.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/initial.hpp"
#include "serve/served_table.hpp"

using namespace hotbed;

namespace {

// A C-contiguous array of Python's, held.
class HeldArray {
 public:
  // `kinds`: letters of the module struct, one of which its elements have.
  HeldArray(nb::handle array, const char* kinds, bool writable = false) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array.ptr(), &view_, flags)) throw nb::python_error();
    const char* kind = view_.format ? view_.format : "B";
    if (!*kind || kind[1] || !std::strchr(kinds, *kind)) {
      std::string found = kind;
      PyBuffer_Release(&view_);
      throw nb::type_error(
          ("expected an array of one of the kinds " + std::string(kinds) + ", got one of " + found)
              .c_str());
    }
  }
  HeldArray(HeldArray&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  HeldArray& operator=(HeldArray&&) = delete;
  ~HeldArray() {
    if (view_.obj) PyBuffer_Release(&view_);
  }

  template <class T>
  T* data() const {
    return static_cast<T*>(view_.buf);
  }
  int64_t bytes() const { return view_.len; }
  int64_t count() const { return view_.len / view_.itemsize; }

 private:
  Py_buffer view_{};
};

constexpr const char* kInt64 = sizeof(long) == 8 ? "lq" : "q";

const char* kinds_of(StoredAs stored_as) {
  switch (stored_as) {
    case StoredAs::f32: return "f";
    case StoredAs::f16: return "e";
    default: return "B";
  }
}

// A table and the arrays that it reads.
struct TableOfArrays {
  TableOfArrays() = default;
  TableOfArrays(const TableOfArrays&) = delete;
  std::vector<HeldArray> held;
  std::optional<ServedTable> table;
};

// (how rows are stored, rows, scales or None, ids or None)
using LayerArrays = nb::typed<nb::tuple, int, nb::object, nb::object, nb::object>;

ServedRows held_rows(const LayerArrays& layer, int64_t dim, std::vector<HeldArray>& held) {
  int how = nb::cast<int>(layer[0]);
  if (how < 0 || how > 3) throw nb::value_error("stored as: expected 0 to 3");
  auto stored_as = static_cast<StoredAs>(how);
  const HeldArray& rows = held.emplace_back(layer[1], kinds_of(stored_as));
  StoredRows stored{stored_as, rows.data<uint8_t>(), nullptr, stored_bytes(stored_as, dim)};
  int64_t count = rows.bytes() / stored.row_bytes;
  bool fits = rows.bytes() == count * stored.row_bytes && count <= kRowMask;
  if (int64_t each = scale_bytes(stored_as)) {
    const HeldArray& scales = held.emplace_back(layer[2], each == 8 ? "f" : "e");
    stored.scales = scales.data<uint8_t>();
    fits = fits && scales.bytes() == count * each;
  }
  const int64_t* ids = nullptr;
  if (!layer[3].is_none()) {
    static const int64_t none = 0;
    const HeldArray& array = held.emplace_back(layer[3], kInt64);
    ids = array.count() ? array.data<int64_t>() : &none;
    fits = fits && array.count() == count;
  }
  if (!fits) throw nb::value_error("rows, scales and ids are of different numbers of rows");
  return {stored, count, ids};
}

// (bands of columns, key, the id whose row is zeros or None, dtype)
using FirstValues = std::tuple<Bands, uint64_t, std::optional<int64_t>, DType>;

MissingRows missing_rows(const std::variant<FirstValues, nb::object>& missing) {
  if (const auto* first = std::get_if<FirstValues>(&missing)) {
    const auto& [bands, key, padding, dtype] = *first;
    int64_t dim = bands.empty() ? 0 : std::get<0>(bands.back());
    if (dim < 1) throw nb::value_error("a row has no numbers");
    return {initial_of(bands, key, padding), dtype, dim};
  }
  HeldArray vector(std::get<nb::object>(missing), "f");
  if (vector.count() == 0) throw nb::value_error("a row has no numbers");
  return MissingRows({vector.data<float>(), vector.data<float>() + vector.count()});
}

void make_table(TableOfArrays* self, const std::vector<LayerArrays>& layers,
                const std::variant<FirstValues, nb::object>& missing,
                std::optional<int64_t> limit) {
  MissingRows missing_of = missing_rows(missing);
  std::vector<HeldArray> held;
  std::vector<ServedRows> rows;
  for (const LayerArrays& layer : layers) rows.push_back(held_rows(layer, missing_of.dim(), held));
  for (const ServedRows& layer : rows) {
    if (!layer.ids && limit && layer.count < *limit) {
      throw nb::value_error("a layer without ids has fewer rows than ids may be asked for");
    }
  }
  new (self) TableOfArrays();
  try {
    nb::gil_scoped_release unlocked;
    self->table.emplace(std::move(rows), std::move(missing_of), limit);
  } catch (...) {
    self->~TableOfArrays();
    throw;
  }
  self->held = std::move(held);
}

// (table, ids, offsets or None, combiner, the id that is none or None, vectors)
using Request =
    nb::typed<nb::tuple, TableOfArrays, nb::object, nb::object, int, nb::object, nb::object>;

// Offsets are read once more than bags, so that kernels can rely on them.
void check_offsets(const int64_t* offsets, int64_t bags, int64_t count) {
  bool rise = bags >= 0 && offsets[0] == 0 && offsets[bags] == count;
  for (int64_t b = 0; rise && b < bags; ++b) rise = offsets[b] <= offsets[b + 1];
  if (!rise) throw nb::value_error("offsets do not rise from 0 to the number of ids");
}

ServedLookup held_lookup(nb::handle request, std::vector<HeldArray>& held) {
  if (!PyTuple_CheckExact(request.ptr()) || PyTuple_GET_SIZE(request.ptr()) != 6) {
    throw nb::type_error("expected (table, ids, offsets, combiner, skipped, vectors)");
  }
  auto item = [&](int i) { return nb::handle(PyTuple_GET_ITEM(request.ptr(), i)); };
  ServedLookup lookup{};
  lookup.table = &*nb::cast<const TableOfArrays&>(item(0)).table;
  const HeldArray& ids = held.emplace_back(item(1), kInt64);
  lookup.ids = ids.data<int64_t>();
  lookup.count = lookup.bags = ids.count();
  if (!item(2).is_none()) {
    const HeldArray& offsets = held.emplace_back(item(2), kInt64);
    lookup.offsets = offsets.data<int64_t>();
    lookup.bags = offsets.count() - 1;
    check_offsets(lookup.offsets, lookup.bags, lookup.count);
  }
  int combiner = nb::cast<int>(item(3));
  if (combiner < 0 || combiner > 4 || (combiner == 0 && lookup.offsets)) {
    throw nb::value_error("combiner: expected 0, without offsets, or 1 to 4");
  }
  lookup.combiner = static_cast<Combiner>(combiner);
  if (!item(4).is_none()) lookup.skipped = nb::cast<int64_t>(item(4));
  const HeldArray& out = held.emplace_back(item(5), "f", true);
  lookup.out = out.data<float>();
  if (out.count() != lookup.bags * lookup.table->dim()) {
    throw nb::value_error("vectors do not have a row a bag");
  }
  return lookup;
}

std::optional<std::pair<int64_t, int64_t>> look_up_all(
    const nb::typed<nb::sequence, Request>& requests) {
  std::vector<HeldArray> held;
  std::vector<ServedLookup> lookups;
  size_t count = nb::len(requests);
  held.reserve(3 * count);
  lookups.reserve(count);
  for (nb::handle request : requests) lookups.push_back(held_lookup(request, held));
  std::optional<RefusedId> refused;
  {
    nb::gil_scoped_release unlocked;
    refused = look_up(lookups);
  }
  if (!refused) return std::nullopt;
  return std::make_pair(refused->lookup, refused->position);
}

}  // namespace

void bind_serve(nb::module_& module) {
  nb::class_<TableOfArrays>(module, "ServedTable",
                            "csrc/serve/served_table.hpp, over arrays that it keeps. Thread-safe.")
      .def("__init__", &make_table, "layers"_a, "missing"_a, "limit"_a.none());
  module.def("look_up", &look_up_all, "lookups"_a,
             "Writes vectors, float32, of int64 ids and offsets. Returns None, or the numbers of a "
             "lookup and of the first of its ids that the table refuses. Thread-safe.");
}
