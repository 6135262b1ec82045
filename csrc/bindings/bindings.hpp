// What the files of the Python module share. Large arrays cross as addresses: the Python side owns
// the memory, keeps it alive for the call and has checked its kind and size. DLPack for each of 26
// features would cost more than their lookup.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "batch/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace hotbed {

struct BudgetParts;

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
std::vector<T*> pointers(const std::vector<Address>& addresses) {
  std::vector<T*> all;
  all.reserve(addresses.size());
  for (Address address : addresses) all.push_back(pointer<T>(address));
  return all;
}

// (address, elements from one vector to the next) of each feature.
inline std::vector<Vectors> vectors_of(const std::vector<std::pair<Address, int64_t>>& pairs) {
  std::vector<Vectors> vectors;
  vectors.reserve(pairs.size());
  for (auto [data, stride] : pairs) vectors.push_back({pointer<void>(data), stride});
  return vectors;
}

inline Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// What callers from outside pass; its shape and type are checked on the way in.
template <class T, class Shape>
using Array = nb::ndarray<T, Shape, nb::c_contig, nb::device::cpu>;
using Vector = nb::shape<-1>;

// The interpreter's lock is let go of while the bound function runs.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// The owner of an array in memory that `held` keeps.
template <class T>
nb::capsule owner_of(std::unique_ptr<T> held) {
  nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<T*>(p); });
  held.release();
  return owner;
}

}  // namespace hotbed

// Bytes by part, and in total.
nb::typed<nb::dict, nb::str, int64_t> by_part(const hotbed::BudgetParts& parts);

void bind_data(nb::module_& module);
void bind_device(nb::module_& module);
void bind_exchange(nb::module_& module);
void bind_index(nb::module_& module);
void bind_initial(nb::module_& module);
void bind_log(nb::module_& module);
void bind_records(nb::module_& module);
void bind_residency(nb::module_& module);
void bind_rules(nb::module_& module);
void bind_serve(nb::module_& module);
void bind_storage(nb::module_& module);
void bind_table(nb::module_& module);
void bind_table_rule(nb::module_& module);
void bind_testing(nb::module_& module);
