// hotbed._core.Residency, for tests and measurements of the policy by itself; what it decides goes
// out as NumPy arrays.
#include "tiers/residency.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"

using namespace hotbed;

namespace {

using Numbers = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

template <class F>
Numbers array(size_t n, F value) {
  auto data = std::make_unique<int64_t[]>(n);
  for (size_t i = 0; i < n; ++i) data[i] = value(i);
  int64_t* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  return Numbers(raw, {n}, owner);
}

Numbers array(const std::vector<int64_t>& values) {
  return array(values.size(), [&](size_t i) { return values[i]; });
}

// (table, address of distinct ids, how many)
using Part = std::tuple<int32_t, Address, int64_t>;

std::vector<TableIds> parts_of(const std::vector<Part>& parts) {
  std::vector<TableIds> result;
  for (const auto& [table, ids, n] : parts) {
    result.push_back({table, pointer<const int64_t>(ids), n});
  }
  return result;
}

Numbers tables_of(const std::vector<RowKey>& rows) {
  return array(rows.size(), [&](size_t i) { return rows[i].table; });
}

Numbers ids_of(const std::vector<RowKey>& rows) {
  return array(rows.size(), [&](size_t i) { return rows[i].id; });
}

std::tuple<Numbers, Numbers, Numbers, Numbers> items(const Residency& residency) {
  std::vector<RowKey> rows;
  std::vector<int64_t> slots, dirty;
  residency.for_each([&](int64_t slot, RowKey row, bool is_dirty) {
    slots.push_back(slot);
    rows.push_back(row);
    dirty.push_back(is_dirty);
  });
  return {array(slots), tables_of(rows), ids_of(rows), array(dirty)};
}

}  // namespace

void bind_residency(nb::module_& module) {
  nb::class_<Moves>(module, "Moves", "What must be done so that a batch is resident.")
      .def(nb::init<>())
      .def_prop_ro(
          "evicted",
          [](const Moves& moves) {
            Numbers dirty = array(moves.evicted_dirty.size(), [&](size_t i) {
              return static_cast<int64_t>(moves.evicted_dirty[i]);
            });
            return std::make_tuple(tables_of(moves.evicted), ids_of(moves.evicted),
                                   array(moves.evicted_slots), dirty);
          },
          nb::rv_policy::move, "(tables, ids, slots, dirty)")
      .def_prop_ro(
          "loaded",
          [](const Moves& moves) {
            return std::make_tuple(tables_of(moves.loaded), ids_of(moves.loaded),
                                   array(moves.loaded_slots));
          },
          nb::rv_policy::move, "(tables, ids, slots)")
      .def_prop_ro("loads", [](const Moves& moves) { return moves.loaded.size(); })
      .def_prop_ro("evictions", [](const Moves& moves) { return moves.evicted.size(); })
      .def_ro("slots_needed", &Moves::slots_needed);

  nb::class_<Residency>(
      module, "Residency",
      "Which rows have which slot of a pool (csrc/tiers/residency.hpp). Parts are "
      "(table, address of distinct int64 ids, how many). One user at a time.")
      .def(
          "__init__",
          [](Residency* self, const std::vector<int64_t>& table_rows, int64_t capacity,
             double half_life, double ghosts, int64_t slots_a_victim, int64_t slots_a_batch) {
            new (self) Residency(table_rows, capacity,
                                 ResidencyPolicy{half_life, ghosts, slots_a_victim, slots_a_batch});
          },
          "table_rows"_a, "capacity"_a, "half_life"_a = ResidencyPolicy{}.half_life,
          "ghosts"_a = ResidencyPolicy{}.ghosts,
          "slots_a_victim"_a = ResidencyPolicy{}.slots_a_victim,
          "slots_a_batch"_a = ResidencyPolicy{}.slots_a_batch)
      .def_static(
          "fixed_bytes",
          [](const std::vector<int64_t>& table_rows, int64_t capacity) {
            return Residency::fixed_bytes(table_rows, capacity);
          },
          "table_rows"_a, "capacity"_a)
      .def(
          "announce",
          [](Residency& self, const std::vector<Part>& parts) {
            return self.announce(parts_of(parts));
          },
          "parts"_a, Unlocked())
      .def("retract", &Residency::retract, Unlocked())
      .def("retract_first", &Residency::retract_first, Unlocked())
      .def("admit", &Residency::admit, "batch"_a, "moves"_a, Unlocked())
      .def(
          "admit_now",
          [](Residency& self, const std::vector<Part>& parts, Moves& moves) {
            return self.admit_now(parts_of(parts), moves);
          },
          "parts"_a, "moves"_a, Unlocked())
      .def("slots",
           [](const Residency& self, int64_t batch) {
             std::vector<int64_t> slots(static_cast<size_t>(self.count(batch)));
             self.slots(batch, slots.data());
             return array(slots);
           })
      .def(
          "mark_new",
          [](Residency& self, Address slots, int64_t n) {
            self.mark_new(pointer<const int64_t>(slots), n);
          },
          "slots"_a, "n"_a, Unlocked())
      .def(
          "consume",
          [](Residency& self, int64_t batch) {
            std::vector<RowKey> born;
            {
              nb::gil_scoped_release unlocked;
              self.consume(batch, &born);
            }
            return std::make_tuple(tables_of(born), ids_of(born));
          },
          "batch"_a, "(tables, ids) of the rows that exist from now on.")
      .def(
          "mark_dirty", [](Residency& self, int64_t batch) { self.mark_dirty(batch); }, "batch"_a,
          Unlocked())
      .def(
          "mark_dirty_slots",
          [](Residency& self, Address slots, int64_t n) {
            self.mark_dirty(pointer<const int64_t>(slots), n);
          },
          "slots"_a, "n"_a, Unlocked())
      .def(
          "mark_clean",
          [](Residency& self, Address slots, int64_t n) {
            self.mark_clean(pointer<const int64_t>(slots), n);
          },
          "slots"_a, "n"_a, Unlocked())
      .def("release", &Residency::release, "batch"_a, Unlocked())
      .def("take_back",
           [](Residency& self, int64_t batch) {
             std::vector<int64_t> dropped;
             self.take_back(batch, dropped);
             return array(dropped);
           })
      .def(
          "drop",
          [](Residency& self, Address slots, int64_t n) {
            self.drop(pointer<const int64_t>(slots), n);
          },
          "slots"_a, "n"_a, Unlocked())
      .def(
          "find",
          [](const Residency& self, int32_t table, Address ids, int64_t n, Address slots) {
            self.find(table, pointer<const int64_t>(ids), n, pointer<int64_t>(slots));
          },
          "table"_a, "ids"_a, "n"_a, "slots"_a, Unlocked())
      .def("items", &items, "(slots, tables, ids, dirty) of the resident rows, slots rising.")
      .def_prop_ro("capacity", &Residency::capacity)
      .def_prop_ro("resident", &Residency::resident)
      .def_prop_ro("pinned", &Residency::pinned)
      .def_prop_ro("announced", &Residency::announced)
      .def_prop_ro("next_batch", &Residency::next_batch)
      .def("memory_bytes", &Residency::memory_bytes)
      .def("clear", &Residency::clear, Unlocked());
}
