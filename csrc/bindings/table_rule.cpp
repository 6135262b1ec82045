// An optimizer's hold on a table, for Python.
#include "step/table_rule.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "bindings/bindings.hpp"

using namespace hotbed;

namespace {

// (rule, slots, gradient rows, count, hyperparameters, whether no slot repeats, whether all rows
// are known to be finite)
using StepTuple =
    std::tuple<TableRule*, Address, Address, int64_t, const Hyperparameters*, bool, bool>;

using HistoryTuple = std::tuple<int64_t, std::array<double, 5>, double, double, Hyperparameters,
                                std::vector<std::pair<int64_t, Hyperparameters>>>;

std::array<double, 5> numbers(const Transition& t) { return {t.ww, t.wb, t.bw, t.bb, t.second}; }

}  // namespace

void bind_table_rule(nb::module_& module) {
  nb::class_<TableRule>(module, "TableRule", "An optimizer's hold on one table.")
      .def_static(
          "make",
          [](std::shared_ptr<Table> table, const RuleOptions& options, double initial, bool exact) {
            nb::gil_scoped_release unlocked;
            return std::make_shared<TableRule>(std::move(table), options, initial, exact);
          },
          "table"_a, "options"_a, "initial_accumulator_value"_a, "exact"_a)
      .def_static("check_memory", &TableRule::check_memory, "tables"_a, "options"_a, "exact"_a)
      .def_prop_ro("options", &TableRule::options)
      .def_prop_ro("initial_accumulator_value", &TableRule::initial_accumulator_value)
      .def_prop_ro("exact", &TableRule::exact)
      .def_prop_ro("steps", &TableRule::steps)
      .def_prop_ro("holds_table", &TableRule::holds_table)
      .def_prop_ro("history_runs", &TableRule::history_runs)
      .def(
          "catch_up",
          [](TableRule& rule, Address slots, int64_t n) {
            nb::gil_scoped_release unlocked;
            rule.catch_up_rows(pointer<int64_t>(slots), n);
          },
          "slots"_a, "n"_a, "Brings rows to the last step; nothing to do unless exact.")
      .def(
          "restart",
          [](TableRule& rule, int64_t steps, const std::array<double, 5>& base,
             const Hyperparameters& last) {
            rule.restart(steps, {base[0], base[1], base[2], base[3], base[4]}, last);
          },
          "steps"_a, "base"_a, "last"_a)
      .def(
          "history",
          [](const TableRule& rule) -> HistoryTuple {
            History::Kept kept = rule.history();
            return {kept.forgotten,    numbers(kept.base), kept.largest_ratio,
                    kept.largest_size, kept.last,          kept.runs};
          },
          "What rows may have missed (exact only): (steps forgotten, what they did, two "
          "extremes, the last numbers, runs of steps with equal numbers).")
      .def(
          "restore",
          [](TableRule& rule, const HistoryTuple& history) {
            auto [forgotten, base, ratio, size, last, runs] = history;
            rule.restore({forgotten,
                          {base[0], base[1], base[2], base[3], base[4]},
                          ratio,
                          size,
                          last,
                          std::move(runs)});
          },
          "history"_a, "Starts over with what `history` gave.")
      .def_prop_ro("last", &TableRule::last)
      .def_prop_ro("base", [](const TableRule& rule) { return numbers(rule.base()); })
      .def_prop_ro("has_moved_untouched", &TableRule::has_moved_untouched,
                   "True if its steps changed the weights of rows that no batch had.");

  nb::class_<Step>(module, "Step",
                   "One step over tables, given as (rule, slots, gradient rows, count, "
                   "hyperparameters, whether no slot repeats, whether all rows are known to be "
                   "finite), beside arrays (address, elements, is double) of other gradients.")
      .def(
          "__init__",
          [](Step* step, const std::vector<StepTuple>& tuples,
             const std::vector<std::tuple<Address, int64_t, bool>>& dense) {
            std::vector<TableStep> tables;
            tables.reserve(tuples.size());
            for (const auto& [rule, slots, grads, count, hyper, distinct, finite] : tuples) {
              tables.push_back({rule, pointer<int64_t>(slots), pointer<const void>(grads), count,
                                *hyper, distinct, finite});
            }
            std::vector<GradientView> views;
            views.reserve(dense.size());
            for (auto [values, count, is_double] : dense) {
              views.push_back({pointer<const void>(values), count, is_double});
            }
            new (step) Step(std::move(tables), std::move(views));
          },
          "tables"_a, "dense"_a)
      .def(
          "decide",
          [](Step& step) {
            StepFault fault;
            {
              nb::gil_scoped_release unlocked;
              fault = step.decide();
            }
            return std::make_tuple(fault.array, fault.element, fault.slot);
          },
          "Checks that all gradients are finite: (-1, -1, -1), or what is not. Nothing changes.")
      .def("apply", &Step::apply, Unlocked());

  module.def(
      "step_fused",
      [](Batch& batch, const std::vector<std::pair<Address, int64_t>>& grads,
         const std::vector<std::tuple<size_t, TableRule*, const Hyperparameters*>>& steps) {
        std::vector<FusedStep> tables(batch.parts.size());
        for (auto [table, rule, hyper] : steps) tables.at(table) = {rule, *hyper};
        StepFault fault;
        {
          nb::gil_scoped_release unlocked;
          fault = step_fused(batch, vectors_of(grads), tables);
        }
        return std::make_tuple(fault.array, fault.element, fault.slot);
      },
      "batch"_a, "grads"_a, "tables"_a,
      "Batch.reduce and step in one, for tables given as (position in the batch, rule, "
      "hyperparameters), keeping no gradient. Returns (-1, -1, -1), or the first table whose "
      "gradient is not finite, which stays as it was: (position, element, slot).");
}
