// Optimizer rules for Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "kernels/rule.hpp"
#include "rules/catch_up.hpp"
#include "rules/history.hpp"
#include "rules/state_planes.hpp"
#include "rules/update.hpp"

using namespace hotbed;

namespace {

std::vector<RowUpdate> gather(const std::vector<RowUpdate*>& tables) {
  std::vector<RowUpdate> all;
  all.reserve(tables.size());
  for (const RowUpdate* table : tables) all.push_back(*table);
  return all;
}

using Addresses = nb::typed<nb::tuple, Address, Address>;

template <class C>
Addresses sum_duplicates_into(Address slots, Address values, int64_t count, int64_t dim,
                              nb::typed<nb::callable, Addresses(int64_t)> allocate) {
  SummedRows<C> summed;
  {
    nb::gil_scoped_release release;
    summed = sum_duplicates(pointer<const int64_t>(slots), pointer<const C>(values), count, dim);
  }
  auto unique = static_cast<int64_t>(summed.slots.size());
  Addresses made = nb::cast<Addresses>(allocate(unique));
  std::copy(summed.slots.begin(), summed.slots.end(), pointer<int64_t>(nb::cast<Address>(made[0])));
  std::copy(summed.values.data(), summed.values.data() + unique * dim,
            pointer<C>(nb::cast<Address>(made[1])));
  return made;
}

}  // namespace

void bind_rules(nb::module_& module) {
  nb::enum_<Rule> rules(module, "Rule");
  for (const RuleKind& kind : kRuleKinds) rules.value(kind.name, kind.rule);

  nb::class_<RuleOptions> options(module, "RuleOptions");
  options.def(nb::init<>())
      .def(
          "__eq__", [](const RuleOptions& a, const RuleOptions& b) { return a == b; },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def_rw("rule", &RuleOptions::rule);
  for (auto [name, member] : kOptions) options.def_rw(name, member);

  nb::class_<Hyperparameters> numbers(module, "Hyperparameters");
  numbers.def(nb::init<>())
      .def(
          "__eq__", [](const Hyperparameters& a, const Hyperparameters& b) { return a == b; },
          nb::sig("def __eq__(self, other: object, /) -> bool"));
  for (auto [name, member] : kNumbers) numbers.def_rw(name, member);

  nb::class_<RowUpdate>(module, "RowUpdate",
                        "One table's share of a step; see csrc/kernels/rule.hpp.")
      .def(nb::init<>())
      .def_rw("options", &RowUpdate::options)
      .def_rw("hyper", &RowUpdate::hyper)
      .def_rw("dim", &RowUpdate::dim)
      .def_rw("count", &RowUpdate::count)
      .def_rw("table_key", &RowUpdate::table_key)
      .def_rw("step", &RowUpdate::step)
      .def_prop_rw(
          "dtype", [](const RowUpdate& u) { return static_cast<int>(u.dtype); },
          [](RowUpdate& u, int dtype) { u.dtype = static_cast<DType>(dtype); })
      .def(
          "set_planes",
          [](RowUpdate& u, Address weights, const std::vector<Address>& states, Address ids,
             Address last_step) {
            if (states.size() > kMaxStates) throw std::invalid_argument("too many states");
            u.weights = pointer<void>(weights);
            for (size_t k = 0; k < kMaxStates; ++k) {
              u.states[k] = k < states.size() ? pointer<void>(states[k]) : nullptr;
            }
            u.ids = pointer<const int64_t>(ids);
            u.last_step = pointer<int64_t>(last_step);
          },
          "weights"_a, "states"_a, "ids"_a = 0, "last_step"_a = 0,
          "Addresses of the planes; 0 where there is none. They change when a plane grows.")
      .def(
          "set_gradient",
          [](RowUpdate& u, Address slots, Address grads, int64_t count, int64_t step) {
            u.slots = pointer<const int64_t>(slots);
            u.grads = pointer<const void>(grads);
            u.count = count;
            u.step = step;
          },
          "slots"_a, "grads"_a, "count"_a, "step"_a)
      .def_prop_ro("weights", [](const RowUpdate& u) { return address(u.weights); });

  module.def(
      "state_planes",
      [](const RuleOptions& options, double initial_accumulator_value) {
        std::vector<std::tuple<std::string, bool, double>> planes;
        for (const StatePlane& p : state_planes(options, initial_accumulator_value)) {
          planes.emplace_back(p.name, p.one_per_row, p.first_value);
        }
        return planes;
      },
      "options"_a, "initial_accumulator_value"_a = 0.0,
      "(name, one value a row instead of dim, first value) of each state of a rule.");

  module.def(
      "update",
      [](const std::vector<RowUpdate*>& tables) {
        std::vector<RowUpdate> all = gather(tables);
        nb::gil_scoped_release release;
        update(all);
      },
      "tables"_a, "Applies one step to the rows of all tables.");

  nb::class_<History>(module, "History", "The hyperparameters of a table's steps.")
      .def(nb::init<const RuleOptions&>(), "options"_a)
      .def("record", &History::record, "hyper"_a)
      .def("forget", &History::forget, "step"_a)
      .def_prop_ro("steps", &History::steps)
      .def_prop_ro("run_count", &History::run_count);

  module.def(
      "catch_up",
      [](const RowUpdate& rows, const History& history) {
        nb::gil_scoped_release release;
        catch_up(rows, history);
      },
      "rows"_a, "history"_a,
      "Brings rows to the last step of the history, as steps with zero gradients would have.");
  module.def("why_not_exact", &why_not_exact, "options"_a, "hyper"_a,
             "Why untouched rows cannot follow the dense optimizer; empty if they can.");
  module.def("untouched_rows_stay", &untouched_rows_stay, "options"_a, "hyper"_a);

  module.def(
      "find_non_finite",
      [](const std::vector<std::tuple<Address, int64_t, bool>>& arrays) {
        std::vector<GradientView> views;
        for (auto [values, count, is_double] : arrays) {
          views.push_back({pointer<const void>(values), count, is_double});
        }
        NonFinite found;
        {
          nb::gil_scoped_release release;
          found = find_non_finite(views);
        }
        return std::make_tuple(found.array, found.element);
      },
      "arrays"_a,
      "(index of the array, element) of the first infinite or NaN value among arrays given as "
      "(address, elements, is double); (-1, -1) if there is none.");

  module.def(
      "has_duplicates",
      [](Address slots, int64_t count) {
        nb::gil_scoped_release release;
        return has_duplicates(pointer<const int64_t>(slots), count);
      },
      "slots"_a, "count"_a);
  module.def("sum_duplicates_f32", &sum_duplicates_into<float>, "slots"_a, "values"_a, "count"_a,
             "dim"_a, "allocate"_a,
             "Sums the gradient rows of each slot. `allocate(n)` returns the addresses of the n "
             "unique slots and their n x dim sums, and what it returned is returned.");
  module.def("sum_duplicates_f64", &sum_duplicates_into<double>, "slots"_a, "values"_a, "count"_a,
             "dim"_a, "allocate"_a);
}
