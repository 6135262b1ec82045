// hotbed._core.KeyIndex, for tests and measurements of the index by itself. Arrays come as the
// addresses of contiguous int64 data.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "key_index.hpp"

namespace nb = nanobind;
using hotbed::KeyIndex;

namespace {

int64_t* numbers(uint64_t address) { return reinterpret_cast<int64_t*>(address); }

// Key and slot of every entry, by rising key.
void items(const KeyIndex& index, uint64_t keys, uint64_t slots) {
  std::vector<std::pair<int64_t, int64_t>> entries;
  entries.reserve(static_cast<size_t>(index.size()));
  index.for_each([&](int64_t key, int64_t slot) { entries.emplace_back(key, slot); });
  std::sort(entries.begin(), entries.end());
  for (size_t i = 0; i < entries.size(); ++i) {
    numbers(keys)[i] = entries[i].first;
    numbers(slots)[i] = entries[i].second;
  }
}

}  // namespace

void bind_index(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<KeyIndex>(
      module, "KeyIndex",
      "int64 key -> slot. Arrays are addresses of contiguous int64 data. Finds may "
      "run concurrently; everything else needs the index for itself.")
      .def(nb::init<std::string>(), nb::arg("name") = "the key index")
      .def_ro_static("SLOT_LIMIT", &KeyIndex::kSlotLimit)
      .def(
          "find",
          [](const KeyIndex& index, uint64_t keys, int64_t n, uint64_t slots) {
            index.find(numbers(keys), n, numbers(slots));
          },
          nb::arg("keys"), nb::arg("n"), nb::arg("slots"), release(),
          "Writes the slot of each of n keys, or -1.")
      .def(
          "find_or_insert",
          [](KeyIndex& index, uint64_t keys, int64_t n, uint64_t slots, int64_t first_free,
             uint64_t new_positions) {
            return index.find_or_insert(numbers(keys), n, numbers(slots), first_free,
                                        numbers(new_positions));
          },
          nb::arg("keys"), nb::arg("n"), nb::arg("slots"), nb::arg("first_free"),
          nb::arg("new_positions") = 0, release(),
          "As find, but absent keys get the slots from first_free on, in order. Returns how many "
          "were new and, unless new_positions is 0, writes where each came first.")
      .def(
          "insert",
          [](KeyIndex& index, uint64_t keys, int64_t n, uint64_t slots) {
            index.insert(numbers(keys), n, numbers(slots));
          },
          nb::arg("keys"), nb::arg("n"), nb::arg("slots"), release(),
          "Inserts n absent keys with these slots: all of them, or none and an error.")
      .def(
          "update",
          [](KeyIndex& index, uint64_t keys, int64_t n, uint64_t slots) {
            return index.update(numbers(keys), n, numbers(slots));
          },
          nb::arg("keys"), nb::arg("n"), nb::arg("slots"), release(),
          "Gives those of n keys that are there these slots. Returns how many were.")
      .def(
          "erase",
          [](KeyIndex& index, uint64_t keys, int64_t n, uint64_t slots) {
            return index.erase(numbers(keys), n, numbers(slots));
          },
          nb::arg("keys"), nb::arg("n"), nb::arg("slots"), release(),
          "Writes the slot that each key had, or -1. Returns how many were erased.")
      .def("items", &items, nb::arg("keys"), nb::arg("slots"), release(),
           "Writes len(index) keys, rising, and their slots.")
      .def("reserve", &KeyIndex::reserve, nb::arg("keys"), release())
      .def("clear", &KeyIndex::clear, release())
      .def("__len__", &KeyIndex::size)
      .def("memory_bytes", &KeyIndex::memory_bytes);
}
