// Table and Batch for Python.
#include "table/table.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "batch/batch.hpp"
#include "batch/reduce.hpp"
#include "bindings/initial.hpp"
#include "bindings/tensors.hpp"
#include "table/hold.hpp"

using namespace hotbed;

namespace {

// The tensor keeps the memory, also where its table lets go of it.
Tensor plane_tensor(const Plane& plane, int64_t rows, DType dtype) {
  using Hold = std::shared_ptr<const void>;
  size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(plane.width())};
  nb::capsule owner = owner_of(std::make_unique<Hold>(plane.hold()));
  return Tensor(plane.data(), 2, shape, owner, nullptr, element(dtype));
}

// (table, combiner, ids, id bytes, count, offsets, fixed, bags, weights)
using InputTuple = std::tuple<int, int, Address, int, int64_t, Address, int64_t, int64_t, Address>;

std::shared_ptr<Batch> make_batch(std::vector<std::shared_ptr<Table>> tables,
                                  const std::vector<InputTuple>& tuples) {
  std::vector<FeatureInput> inputs;
  inputs.reserve(tuples.size());
  for (const auto& [table, combiner, ids, id_bytes, count, offsets, fixed, bags, weights] :
       tuples) {
    inputs.push_back({table, static_cast<Combiner>(combiner), pointer<void>(ids), id_bytes, count,
                      pointer<int64_t>(offsets), fixed, bags, pointer<void>(weights)});
  }
  return std::make_shared<Batch>(std::move(tables), std::move(inputs));
}

std::shared_ptr<Batch> batch_of_ids(std::vector<std::shared_ptr<Table>> tables,
                                    const std::vector<int>& table_of, Address ids,
                                    const std::vector<int64_t>& counts) {
  if (table_of.size() != counts.size()) throw std::invalid_argument("a count for each feature");
  std::vector<FeatureInput> inputs;
  inputs.reserve(counts.size());
  auto* next = pointer<const int64_t>(ids);
  for (size_t f = 0; f < counts.size(); ++f) {
    inputs.push_back(
        {table_of[f], Combiner::none, next, 8, counts[f], nullptr, 1, counts[f], nullptr});
    next += counts[f];
  }
  return std::make_shared<Batch>(std::move(tables), std::move(inputs));
}

std::shared_ptr<Batch> batch_of_sums(std::vector<std::shared_ptr<Table>> tables,
                                     const std::vector<int>& table_of,
                                     const std::vector<std::tuple<int64_t, int64_t, bool>>& shapes,
                                     Address ids, Address offsets) {
  if (table_of.size() != shapes.size()) throw std::invalid_argument("a shape for each feature");
  std::vector<FeatureInput> inputs;
  inputs.reserve(shapes.size());
  auto* next = pointer<const int64_t>(ids);
  auto* edges = pointer<const int64_t>(offsets);
  for (size_t f = 0; f < shapes.size(); ++f) {
    auto [count, bags, has_offsets] = shapes[f];
    int64_t fixed = has_offsets || !bags ? 0 : count / bags;
    inputs.push_back({table_of[f], Combiner::sum, next, 8, count, has_offsets ? edges : nullptr,
                      fixed, bags, nullptr});
    next += count;
    if (has_offsets) edges += bags + 1;
  }
  return std::make_shared<Batch>(std::move(tables), std::move(inputs));
}

std::vector<bool> reduced(Batch& batch, const std::vector<Vectors>& grads,
                          const std::vector<Address>& values, const std::vector<Address>& indices) {
  for (size_t t = 0; t < values.size(); ++t) {
    const TableBatch& part = batch.parts[t];
    if (indices[t] && part.unique) {
      std::memcpy(pointer<void>(indices[t]), part.unique_slots.data(), part.unique * 8);
    }
  }
  return reduce(batch, grads, pointers<void>(values));
}

// Rows of `ids` as they are, absent ones with their first values; nothing is stored.
Tensor read_rows(const std::shared_ptr<Table>& table, Address ids, int64_t n) {
  const Table& t = *table;
  Tensor out =
      block_tensor({static_cast<size_t>(n), static_cast<size_t>(t.dim())}, element(t.dtype()));
  auto* rows = static_cast<uint8_t*>(out.data());
  nb::gil_scoped_release unlocked;
  const auto* id = pointer<int64_t>(ids);
  if (t.catch_up) {
    t.catch_up->read(t, id, n, rows);
  } else {
    t.copy_rows(id, n, rows, nullptr, nullptr);
  }
  return out;
}

}  // namespace

void bind_table(nb::module_& module) {
  // Any: most methods of a Tensor are untyped.
  module.def(
      "empty",
      [](std::vector<size_t> shape, DType dtype) {
        return block_tensor(std::move(shape), element(dtype));
      },
      "shape"_a, "dtype"_a,
      nb::sig("def empty(shape: collections.abc.Sequence[int], dtype: DType) -> typing.Any"),
      "A tensor over a block of the core's memory pool.");
  module.def(
      "block", [](size_t size) { return block_tensor({size}, nb::dtype<uint8_t>()); }, "size"_a,
      nb::sig("def block(size: int) -> torch.Tensor"),
      "(size,) uint8 over a block of the core's memory pool.");
  module.def("give_back_freed", &give_back_freed, nb::call_guard<nb::gil_scoped_release>(),
             "Returns to the system what was freed, and is kept to be handed out again.");

  nb::enum_<DType>(module, "DType")
      .value("f32", DType::f32)
      .value("f64", DType::f64)
      .value("f16", DType::f16)
      .value("bf16", DType::bf16);

  nb::class_<MemoryBudget>(module, "MemoryBudget", "Bytes that tables share; see `Table.make`.")
      .def(nb::init<uint64_t>(), "bytes"_a)
      .def_prop_ro("limit", &MemoryBudget::limit)
      .def_prop_ro("used", &MemoryBudget::used)
      .def("__reduce__",
           [](nb::handle self) {  // a copy is one of its own, for the copies of tables
             return nb::make_tuple(self.type(),
                                   nb::make_tuple(nb::cast<const MemoryBudget&>(self).limit()));
           });

  nb::class_<Table>(module, "Table")
      .def_static(
          "make",
          [](const std::string& name, int64_t rows, int64_t dim, DType dtype, const Bands& bands,
             uint64_t key, std::optional<int64_t> padding, bool tiered, bool released,
             std::shared_ptr<MemoryBudget> budget, std::tuple<int64_t, int64_t, int64_t> origin) {
            InitialSpec initial = initial_of(bands, key, padding);
            std::tie(initial.origin.first, initial.origin.stride, initial.origin.column) = origin;
            nb::gil_scoped_release unlocked;
            return std::make_shared<Table>(name, rows, dim, dtype, initial, tiered, released,
                                           std::move(budget));
          },
          "name"_a, "rows"_a, "dim"_a, "dtype"_a, "bands"_a, "key"_a, "padding"_a.none(),
          "tiered"_a = false, "released"_a = false, "budget"_a.none() = nullptr,
          "origin"_a = std::make_tuple(int64_t{0}, int64_t{1}, int64_t{0}),
          "`origin`: (first id, stride, first column) in the table of which it is a part. "
          "`released`: of a static table, as after `release_rows`.")
      .def_prop_ro("tiered", &Table::tiered)
      .def_prop_ro("unallocated", &Table::unallocated)
      .def(
          "stored_ids",
          [](const Table& t) {
            std::vector<int64_t> ids;
            {
              nb::gil_scoped_release unlocked;
              ids = t.stored_ids();
            }
            size_t shape[1] = {ids.size()};
            int64_t* data = ids.data();  // stays where it is
            nb::capsule owner = owner_of(std::make_unique<std::vector<int64_t>>(std::move(ids)));
            return Tensor(data, 1, shape, owner, nullptr, nb::dtype<int64_t>());
          },
          "(n,) int64, rising: the ids of rows that are stored.")
      .def(
          "hottest",
          [](const Table& t, int64_t count) {
            std::vector<std::tuple<int64_t, uint64_t, uint64_t>> all;
            for (auto [id, uses, excess] : t.uses.top(count)) all.emplace_back(id, uses, excess);
            return all;
          },
          "count"_a, "(id, uses, excess) of the most used ids; see top_uses.hpp.")
      .def_prop_ro("counts_uses", &Table::counts_uses)
      .def_prop_ro(
          "trained",
          [](const Table& t) {
            return std::make_tuple(t.trained.batches.load(), t.trained.rows.load(),
                                   t.trained.created.load());
          },
          "Of rows in memory: (batches of training, distinct rows of each, of those new ones).")
      .def(
          "id_of", [](const Table& t, int64_t slot) { return t.ids() ? t.ids()[slot] : slot; },
          "slot"_a)
      .def("state_widths",
           [](const Table& t) {
             std::vector<int64_t> widths;
             for (const State& state : t.states()) widths.push_back(state.plane.width());
             return widths;
           })
      .def_prop_ro("state_firsts",
                   [](const Table& t) {
                     std::vector<double> firsts;
                     for (const State& state : t.states()) firsts.push_back(state.initial);
                     return firsts;
                   })
      .def("release_rows", &Table::release_rows,
           "Gives the memory of a static table's planes back: rows are kept elsewhere from now on.")
      .def("take_rows_back", &Table::take_rows_back, "Room for them again, contents undefined.")
      .def_prop_ro("released", &Table::released)
      .def_prop_ro("name", &Table::name)
      .def("rename", &Table::rename, "name"_a)
      .def_prop_ro("dynamic", &Table::dynamic)
      .def_prop_ro("size",
                   [](const Table& t) {
                     if (!t.tiered()) return t.size();
                     nb::gil_scoped_release unlocked;
                     return t.size();
                   })
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("dtype", &Table::dtype)
      .def_prop_ro("plane_bytes", &Table::plane_bytes)
      .def_prop_ro("index_bytes", &Table::index_bytes)
      .def_prop_ro("resident_bytes", &Table::resident_bytes)
      .def_prop_ro("ids_address", [](const Table& t) { return address(t.ids()); })
      .def_prop_ro("state_names",
                   [](const Table& t) {
                     std::vector<std::string> names;
                     for (const State& state : t.states()) names.push_back(state.name);
                     return names;
                   })
      .def("add_state", &Table::add_state, "name"_a, "width"_a, "initial"_a)
      .def_prop_ro("catches_up", [](const Table& t) { return t.catch_up != nullptr; })
      .def("reserve", &Table::reserve, "rows"_a)
      .def("clear", &Table::clear, Unlocked())
      .def(
          "erase",
          [](Table& t, Address ids, int64_t n) {
            nb::gil_scoped_release unlocked;
            return t.erase(pointer<int64_t>(ids), n);
          },
          "ids"_a, "n"_a,
          "How many rows went; others of a dynamic table may get other slots. Ids are distinct.")
      .def(
          "contains",
          [](const Table& t, Address ids, int64_t n, Address found) {
            nb::gil_scoped_release unlocked;
            t.contains(pointer<int64_t>(ids), n, pointer<bool>(found));
          },
          "ids"_a, "n"_a, "found"_a, "Writes for each id whether there is a row of it.")
      .def("mark_changes", &Table::mark_changes,
           "Marks a moment; 0 where nothing can be known of changes since.")
      .def("knows_changes", &Table::knows_changes, "mark"_a,
           "Whether it is known what has changed since a mark.")
      .def(
          "wait_for_snapshot",
          [](const Table& t, bool all) {
            for (bool is_ready = false; !is_ready;) {
              {
                nb::gil_scoped_release unlocked;
                is_ready = t.wait_for_snapshot(all, std::chrono::milliseconds(100));
              }
              if (!is_ready && PyErr_CheckSignals()) throw nb::python_error();
            }
          },
          "all"_a,
          "Before rows change, or all of them: waits until a snapshot has room for those, or has "
          "copied all.")
      .def_prop_ro("in_snapshot", &Table::in_snapshot)
      .def("forget_changes", &Table::forget_changes, "No mark is good any more.")
      .def("forget_changes_before", &Table::forget_changes_before, "mark"_a,
           "Ids that went before a mark are of use to nobody.")
      .def(
          "erased_since",
          [](const Table& t, uint64_t mark) {
            return t.knows_changes(mark) ? t.changes()->erased_since(mark) : std::vector<int64_t>{};
          },
          "mark"_a, "Ids that went since a mark, rising; some may be there again.")
      .def("write_first_values", &Table::write_first_values, Unlocked())
      .def("set_key", &Table::set_key, "key"_a)
      .def_prop_ro("key", [](const Table& t) { return t.initial().table_key; })
      .def("find",
           [](const Table& t, Address ids, int64_t n, Address slots) {
             nb::gil_scoped_release unlocked;
             t.find(pointer<int64_t>(ids), n, pointer<int64_t>(slots));
           })
      .def("find_or_insert", [](Table& t, Address ids, int64_t n, Address slots) {
        nb::gil_scoped_release unlocked;
        return t.find_or_insert(pointer<int64_t>(ids), n, pointer<int64_t>(slots));
      });

  nb::class_<Hold>(
      module, "Hold",
      "A `with` statement's hold on the rows of tables: with others that read them, or "
      "alone.")
      .def(nb::init<std::vector<std::shared_ptr<Table>>, bool>(), "tables"_a, "alone"_a)
      .def_static("of_forward", &Hold::of_forward, "tables"_a, "training"_a,
                  "Alone where a forward may write.")
      .def(
          "__enter__",
          [](nb::object self) {
            Hold& hold = nb::cast<Hold&>(self);
            if (!hold.try_take()) {
              nb::gil_scoped_release unlocked;
              hold.take();
            }
            return self;
          },
          nb::sig("def __enter__(self) -> Hold"))
      .def(
          "__exit__", [](Hold& hold, nb::args) { hold.release(); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def("share", &Hold::share, "Lets others read what was written; nobody writes any more.");

  // Tensors that alias planes: valid until the table grows.
  module.def("weights", [](const std::shared_ptr<Table>& t) {
    return plane_tensor(t->weight_plane(), t->size(), t->dtype());
  });
  module.def("ids", [](const std::shared_ptr<Table>& t) {
    size_t shape[1] = {static_cast<size_t>(t->size())};
    nb::capsule owner = owner_of(std::make_unique<std::shared_ptr<Table>>(t));
    return Tensor(const_cast<int64_t*>(t->ids()), 1, shape, owner, nullptr, nb::dtype<int64_t>());
  });
  module.def("state", [](const std::shared_ptr<Table>& t, size_t i) {
    const State& state = t->states().at(i);
    return plane_tensor(state.plane, t->size(), t->dtype() == DType::f64 ? DType::f64 : DType::f32);
  });
  module.def("read_rows", &read_rows, "table"_a, "ids"_a, "n"_a);
  module.def(
      "write",
      [](const std::shared_ptr<Table>& table, Address ids, int64_t n, Address weights,
         const std::optional<std::vector<Address>>& states, Address last) {
        std::vector<const void*> at;
        if (states) at = pointers<const void>(*states);
        nb::gil_scoped_release unlocked;
        table->write(pointer<int64_t>(ids), n, pointer<void>(weights), states ? at.data() : nullptr,
                     pointer<int64_t>(last));
      },
      "table"_a, "ids"_a, "n"_a, "weights"_a, "states"_a.none() = nb::none(), "last"_a = 0,
      "Overwrites of rows what is given (address 0, None: it stays); absent ids of a dynamic table "
      "get one.");
  nb::class_<Batch>(module, "Batch")
      .def_static("make", &make_batch, "tables"_a, "inputs"_a)
      .def_static("of_ids", &batch_of_ids, "tables"_a, "table_of"_a, "ids"_a, "counts"_a,
                  "Of int64 ids alone, one feature after the other, with one vector an id.")
      .def_static("of_sums", &batch_of_sums, "tables"_a, "table_of"_a, "shapes"_a, "ids"_a,
                  "offsets"_a,
                  "Of int64 ids, one feature after the other, whose bags are summed: shapes are "
                  "(ids, bags, whether the next bags + 1 of the offsets are its).")
      .def_prop_ro("positions", [](const Batch& batch) { return batch.positions; })
      .def(
          "check",
          [](const Batch& batch) {
            InputFault fault;
            {
              nb::gil_scoped_release unlocked;
              fault = batch.check();
            }
            return std::make_tuple(static_cast<int>(fault.kind), fault.feature, fault.bag,
                                   fault.value, fault.bound);
          },
          "(kind, feature, bag, value, bound) of the first fault; kind 0: there is none.")
      .def(
          "resolve",
          [](Batch& batch, bool insert, bool transpose, const std::vector<size_t>& frozen) {
            for (size_t table : frozen) batch.parts.at(table).frozen = true;
            nb::gil_scoped_release unlocked;
            batch.resolve(insert, transpose);
          },
          "insert"_a, "transpose"_a, "frozen"_a,
          "Positions get slots; tables at the positions `frozen` take no new rows.")
      .def("keep_inputs", &Batch::keep_inputs)
      .def("group",
           [](Batch& batch, const std::vector<size_t>& frozen) {
             for (size_t table : frozen) batch.parts.at(table).frozen = true;
             nb::gil_scoped_release unlocked;
             batch.group();
           })
      .def("first_difference", &Batch::first_difference, "now"_a, Unlocked(),
           "The first feature of another batch that asks for something else than group() has read "
           "here; -1: none does.")
      .def("use_weights_of", &Batch::use_weights_of, "now"_a,
           "Weights come from where that batch has them.")
      .def("announce", &Batch::announce, Unlocked())
      .def("admit", &Batch::admit, Unlocked())
      .def("find_slots", &Batch::find_slots, Unlocked())
      .def_prop_ro("claim", &Batch::claim)
      .def("unique_counts",
           [](const Batch& batch) {
             std::vector<int64_t> counts;
             for (const TableBatch& part : batch.parts) counts.push_back(part.unique);
             return counts;
           })
      .def(
          "write_unique_slots",
          [](const Batch& batch, size_t table, Address out) {
            const TableBatch& part = batch.parts.at(table);
            std::copy_n(part.unique_slots.data(), part.unique, pointer<int64_t>(out));
          },
          "table"_a, "out"_a)
      .def("pool",
           [](Batch& batch, const std::vector<std::pair<Address, int64_t>>& out) {
             nb::gil_scoped_release unlocked;
             pool(batch, vectors_of(out));
           })
      .def(
          "pool", [](Batch& batch, const VectorPlaces& out) { pool(batch, out.of_features); },
          "out"_a, Unlocked())
      .def(
          "reduce",
          // For each table the addresses of (unique, dim) values and (unique,) slots to write; 0
          // leaves the table out.
          [](Batch& batch, const std::vector<std::pair<Address, int64_t>>& grads,
             const std::vector<Address>& values, const std::vector<Address>& indices) {
            nb::gil_scoped_release unlocked;
            return reduced(batch, vectors_of(grads), values, indices);
          },
          "Whether the values of each table are all finite.")
      .def("reduce",
           [](Batch& batch, const VectorPlaces& grads, const std::vector<Address>& values,
              const std::vector<Address>& indices) {
             nb::gil_scoped_release unlocked;
             return reduced(batch, grads.of_features, values, indices);
           })
      .def("weight_gradients", [](const Batch& batch,
                                  const std::vector<std::pair<Address, int64_t>>& grads,
                                  const std::vector<std::pair<Address, int64_t>>& outputs,
                                  const std::vector<Address>& results) {
        nb::gil_scoped_release unlocked;
        weight_gradients(batch, vectors_of(grads), vectors_of(outputs), pointers<void>(results));
      });
}
