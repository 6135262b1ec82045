// Ids grouped; and hotbed._core.KeyIndex, for tests and measurements of the index by itself.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "index/group.hpp"
#include "index/key_index.hpp"

using namespace hotbed;

namespace {

// Key and slot of every entry, by rising key.
void items(const KeyIndex& index, Address keys, Address slots) {
  std::vector<std::pair<int64_t, int64_t>> entries;
  entries.reserve(static_cast<size_t>(index.size()));
  index.for_each([&](int64_t key, int64_t slot) { entries.emplace_back(key, slot); });
  std::sort(entries.begin(), entries.end());
  for (size_t i = 0; i < entries.size(); ++i) {
    pointer<int64_t>(keys)[i] = entries[i].first;
    pointer<int64_t>(slots)[i] = entries[i].second;
  }
}

}  // namespace

void bind_index(nb::module_& module) {
  module.def(
      "group_ids",
      [](Address ids, int64_t n, Address distinct, Address inverse) {
        return group_ids(pointer<int64_t>(ids), n, pointer<int64_t>(distinct),
                         pointer<int64_t>(inverse));
      },
      "ids"_a, "n"_a, "distinct"_a, "inverse"_a, Unlocked(),
      "Writes each of n ids once, as they first appear, and the position of each id among them. "
      "Returns how many are distinct.");
  nb::enum_<OwnerRule>(module, "OwnerRule")
      .value("modulo", OwnerRule::modulo)
      .value("hash", OwnerRule::hash)
      .value("given", OwnerRule::given);
  module.def(
      "find_owners",
      [](Address ids, int64_t n, int64_t ranks, OwnerRule owner_rule, Address owners) {
        find_owners(pointer<int64_t>(ids), n, ranks, owner_rule, pointer<int64_t>(owners));
      },
      "ids"_a, "n"_a, "ranks"_a, "owner_rule"_a, "owners"_a, Unlocked(),
      "Writes the owner of each of n ids.");
  module.def(
      "order_by_owner",
      [](Address ids, int64_t n, int64_t ranks, OwnerRule owner_rule, Address ordered,
         Address place) {
        std::vector<int64_t> sizes(static_cast<size_t>(ranks));
        order_by_owner(pointer<int64_t>(ids), n, ranks, owner_rule, pointer<int64_t>(ordered),
                       pointer<int64_t>(place), sizes.data());
        return sizes;
      },
      "ids"_a, "n"_a, "ranks"_a, "owner_rule"_a, "ordered"_a, "place"_a, Unlocked(),
      "Writes n ids ordered by their owners, and where each went. Returns how many each has.");
  nb::class_<KeyIndex>(
      module, "KeyIndex",
      "int64 key -> slot. Arrays are addresses of contiguous int64 data. Finds may "
      "run concurrently; everything else needs the index for itself.")
      .def(nb::init<std::string>(), "name"_a = "the key index")
      .def_ro_static("SLOT_LIMIT", &KeyIndex::kSlotLimit)
      .def(
          "find",
          [](const KeyIndex& index, Address keys, int64_t n, Address slots) {
            index.find(pointer<int64_t>(keys), n, pointer<int64_t>(slots));
          },
          "keys"_a, "n"_a, "slots"_a, Unlocked(), "Writes the slot of each of n keys, or -1.")
      .def(
          "find_or_insert",
          [](KeyIndex& index, Address keys, int64_t n, Address slots, int64_t first_free,
             Address new_positions) {
            return index.find_or_insert(pointer<int64_t>(keys), n, pointer<int64_t>(slots),
                                        first_free, pointer<int64_t>(new_positions));
          },
          "keys"_a, "n"_a, "slots"_a, "first_free"_a, "new_positions"_a = 0, Unlocked(),
          "As find, but absent keys get the slots from first_free on, in order. Returns how many "
          "were new and, unless new_positions is 0, writes where each came first.")
      .def(
          "insert",
          [](KeyIndex& index, Address keys, int64_t n, Address slots) {
            index.insert(pointer<int64_t>(keys), n, pointer<int64_t>(slots));
          },
          "keys"_a, "n"_a, "slots"_a, Unlocked(),
          "Inserts n absent keys with these slots: all of them, or none and an error.")
      .def(
          "update",
          [](KeyIndex& index, Address keys, int64_t n, Address slots) {
            return index.update(pointer<int64_t>(keys), n, pointer<int64_t>(slots));
          },
          "keys"_a, "n"_a, "slots"_a, Unlocked(),
          "Gives those of n keys that are there these slots. Returns how many were.")
      .def(
          "erase",
          [](KeyIndex& index, Address keys, int64_t n, Address slots) {
            return index.erase(pointer<int64_t>(keys), n, pointer<int64_t>(slots));
          },
          "keys"_a, "n"_a, "slots"_a, Unlocked(),
          "Writes the slot that each key had, or -1. Returns how many were erased.")
      .def("items", &items, "keys"_a, "slots"_a, Unlocked(),
           "Writes len(index) keys, rising, and their slots.")
      .def("reserve", &KeyIndex::reserve, "keys"_a, Unlocked())
      .def("clear", &KeyIndex::clear, Unlocked())
      .def("__len__", &KeyIndex::size)
      .def("memory_bytes", &KeyIndex::memory_bytes);
}
