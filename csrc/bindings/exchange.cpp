// Exchanges of ranks for Python.
#include "exchange/exchange.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "exchange/bags.hpp"
#include "exchange/wire_forms.hpp"

using namespace hotbed;

namespace {

using TableTuple =
    std::tuple<std::string, int64_t, DType, std::optional<OwnerRule>, std::optional<int64_t>>;
using ShardTuple = std::tuple<int, int, bool, int64_t, int64_t, int64_t, int64_t, int>;
using WireTuple = std::tuple<WireForm, DType, int64_t, int64_t, Address, Address, bool, uint64_t>;
using PartTuple = std::tuple<const Exchange*, Address, std::vector<Address>>;
using GivenTuple = std::tuple<Address, Address, int64_t, int64_t>;

std::shared_ptr<ExchangeLayout> make_layout(int rank, int ranks,
                                            const std::vector<TableTuple>& table_tuples,
                                            const std::vector<ShardTuple>& shard_tuples,
                                            int trainers) {
  std::vector<ExchangedTable> tables;
  for (const auto& [name, dim, dtype, owner_rule, padding] : table_tuples) {
    tables.push_back({name, dim, dtype, owner_rule, padding});
  }
  std::vector<ExchangedShard> shards;
  for (const auto& [table, rank, replica, first, stride, column, width, owner] : shard_tuples) {
    shards.push_back({table, rank, replica, first, stride, column, width, owner});
  }
  return std::make_shared<ExchangeLayout>(rank, ranks, std::move(tables), std::move(shards),
                                          trainers);
}

std::vector<GivenRows> given_of(const std::vector<GivenTuple>& tuples) {
  std::vector<GivenRows> given;
  given.reserve(tuples.size());
  for (auto [slots, rows, count, first] : tuples) {
    given.push_back({pointer<int64_t>(slots), pointer<void>(rows), count, first});
  }
  return given;
}

using PlacePairs = std::vector<std::pair<Address, int64_t>>;

void bind_bags(nb::module_& module) {
  nb::class_<OrderedBags>(module, "OrderedBags",
                          "Bags of this rank, the ids of each feature ordered by their owners.")
      .def(
          "__init__",
          [](OrderedBags* made, std::shared_ptr<ExchangeLayout> layout, const Batch& given,
             const std::vector<int>& features) {
            new (made) OrderedBags(std::move(layout), given, features);
          },
          "layout"_a, "given"_a, "features"_a, Unlocked(),
          "Of some features of a checked batch, one for each table of the layout.")
      .def(
          "__init__",
          [](OrderedBags* made, std::shared_ptr<ExchangeLayout> layout) {
            new (made) OrderedBags(std::move(layout));
          },
          "layout"_a, "No bags.")
      .def_prop_ro("numbers", &OrderedBags::numbers, "What the other ranks must know.")
      .def_prop_ro(
          "counts",
          [](const OrderedBags& bags) {
            std::vector<int64_t> counts;
            for (const auto& feature : bags.features) {
              counts.push_back(static_cast<int64_t>(feature.ids.size()));
            }
            return counts;
          },
          "How many ids each feature has, padding left out.")
      .def(
          "write_positions",
          [](const OrderedBags& bags, int feature, Address ids, Address of_bags) {
            bags.write_positions(feature, pointer<int64_t>(ids), pointer<int64_t>(of_bags));
          },
          "feature"_a, "ids"_a, "bags"_a, Unlocked(),
          "Writes the ids of a feature, as they are ordered, and the bag of each.")
      .def("inverses", &OrderedBags::inverses, "feature"_a,
           "What gradients of the ids of each bag are multiplied by.");

  nb::class_<BagExchange>(module, "BagExchange",
                          "Sizes, places, and contents of the messages of a batch whose bags are "
                          "pooled by the owners; messages are addresses, one a rank.")
      .def(
          "__init__",
          [](BagExchange* made, std::shared_ptr<ExchangeLayout> layout, Address numbers) {
            new (made) BagExchange(std::move(layout), pointer<int64_t>(numbers));
          },
          "layout"_a, "numbers"_a)
      .def_static("width", &BagExchange::width, "layout"_a, "How many numbers a rank tells.")
      .def("id_sizes", &BagExchange::id_sizes)
      .def(
          "write_ids",
          [](const BagExchange& exchange, const OrderedBags& own,
             const std::vector<Address>& messages) {
            exchange.write_ids(own, pointers<void>(messages));
          },
          "own"_a, "messages"_a, Unlocked())
      .def(
          "here",
          [](const BagExchange& exchange) {
            std::vector<std::tuple<int64_t, int64_t, bool>> found;
            for (auto [ids, bags, has_offsets] : exchange.here()) {
              found.emplace_back(ids, bags, has_offsets);
            }
            return found;
          },
          "(ids, bags, whether there are offsets) of what each rank asks of the first shard of "
          "this "
          "rank, then of the next.")
      .def(
          "read_ids",
          [](const BagExchange& exchange, const OrderedBags& own,
             const std::vector<Address>& messages, Address ids, Address offsets) {
            exchange.read_ids(own, pointers<void>(messages), pointer<int64_t>(ids),
                              pointer<int64_t>(offsets));
          },
          "own"_a, "messages"_a, "ids"_a, "offsets"_a, Unlocked())
      .def("vectors", &BagExchange::vectors, "rank"_a, "shard"_a,
           "How many vectors a shard has for a rank.")
      .def("vector_sizes", &BagExchange::vector_sizes)
      .def(
          "vector_places",
          [](const BagExchange& exchange, const std::vector<Address>& messages) {
            return VectorPlaces{exchange.vector_places(pointers<void>(messages))};
          },
          "messages"_a)
      .def(
          "read_vectors",
          [](const BagExchange& exchange, const OrderedBags& own,
             const std::vector<Address>& messages, const PlacePairs& out) {
            nb::gil_scoped_release unlocked;
            exchange.read_vectors(own, pointers<void>(messages), vectors_of(out));
          },
          "own"_a, "messages"_a, "out"_a)
      .def("given_sizes", &BagExchange::given_sizes, "chosen"_a)
      .def(
          "write_given",
          [](const BagExchange& exchange, const OrderedBags& own, const std::vector<bool>& chosen,
             const PlacePairs& given, const std::vector<Address>& messages) {
            nb::gil_scoped_release unlocked;
            exchange.write_given(own, chosen, vectors_of(given), pointers<void>(messages));
          },
          "own"_a, "chosen"_a, "given"_a, "messages"_a)
      .def(
          "given_places",
          [](const BagExchange& exchange, const std::vector<bool>& chosen,
             const std::vector<Address>& messages) {
            return VectorPlaces{exchange.given_places(chosen, pointers<void>(messages))};
          },
          "chosen"_a, "messages"_a);
}

std::vector<WirePiece> pieces_of(const std::vector<WireTuple>& tuples) {
  std::vector<WirePiece> pieces;
  pieces.reserve(tuples.size());
  for (const auto& [form, dtype, rows, width, in_core, on_wire, at_random, seed] : tuples) {
    pieces.push_back({form, dtype, rows, width, pointer<void>(in_core), pointer<void>(on_wire),
                      at_random, seed});
  }
  return pieces;
}

void bind_wire_forms(nb::module_& module) {
  nb::enum_<WireForm>(module, "WireForm", "How rows travel that are not as they are stored.")
      .value("float16", WireForm::f16)
      .value("bfloat16", WireForm::bf16)
      .value("int8", WireForm::int8);
  module.def("wire_row_bytes", &wire_row_bytes, "form"_a, "width"_a, "Bytes of a row.");
  module.def(
      "encode_pieces",
      [](const std::vector<WireTuple>& tuples) {
        std::vector<WirePiece> pieces = pieces_of(tuples);
        nb::gil_scoped_release unlocked;
        encode_pieces(pieces);
      },
      "pieces"_a,
      "Writes rows of shards in another form. Pieces are (form, dtype, rows, width, address as the "
      "core has them, address in the message, whether int8 rounds at random, seed of that).");
  module.def(
      "decode_pieces",
      [](const std::vector<WireTuple>& tuples) {
        std::vector<WirePiece> pieces = pieces_of(tuples);
        nb::gil_scoped_release unlocked;
        decode_pieces(pieces);
      },
      "pieces"_a, "Writes rows as the core has them.");
}

}  // namespace

void bind_exchange(nb::module_& module) {
  bind_wire_forms(module);

  nb::class_<VectorPlaces>(module, "VectorPlaces",
                           "Where vectors of each feature of a batch are, or go.");

  nb::class_<ExchangeLayout>(module, "ExchangeLayout",
                             "The shards of some tables, the same on all ranks.")
      .def_static(
          "make", &make_layout, "rank"_a, "ranks"_a, "tables"_a, "shards"_a, "trainers"_a,
          "Tables are (name, dim, dtype, owner_rule, padding), shards (table, rank, is a "
          "replica, first id, stride, first column, columns, owner where rows are split), of "
          "the first table, then of the next. Gradients are averaged over so many "
          "trainers.")
      .def_prop_ro(
          "numbers", [](const ExchangeLayout& l) { return l.number_of.back(); },
          "How many numbers ranks tell each other of their ids.")
      .def_ro("kept_by", &ExchangeLayout::kept_by, "Positions of the shards of each rank.")
      .def(
          "order_by_owner",
          [](const ExchangeLayout& layout, Address ids, const std::vector<int64_t>& counts,
             Address ordered, Address new_positions) {
            std::vector<int64_t> numbers(layout.number_of.back());
            layout.order_by_owner(pointer<int64_t>(ids), counts, pointer<int64_t>(ordered),
                                  pointer<int64_t>(new_positions), numbers.data());
            return numbers;
          },
          "ids"_a, "counts"_a, "ordered"_a, "new_positions"_a, Unlocked(),
          "Writes the ids of each table ordered by their owners, and where each went; of tables "
          "with "
          "OwnerRule.given its owner is there before. Returns what the other ranks must know.");

  module.def(
      "distinct_ids",
      [](const Batch& batch, Address distinct, Address inverse) {
        return distinct_ids(batch, pointer<int64_t>(distinct), pointer<int64_t>(inverse));
      },
      "batch"_a, "distinct"_a, "inverse"_a, Unlocked(),
      "Writes the distinct ids of each table of a checked batch as they first appear, and the "
      "position of each id among those of its table. Returns how many each table has.");

  nb::class_<Exchange>(module, "Exchange",
                       "Sizes, places, and contents of the messages of one batch; messages are "
                       "addresses, one a rank.")
      .def(
          "__init__",
          [](Exchange* made, std::shared_ptr<ExchangeLayout> layout, Address numbers) {
            new (made) Exchange(std::move(layout), pointer<int64_t>(numbers));
          },
          "layout"_a, "numbers"_a)
      .def(nb::init<std::shared_ptr<ExchangeLayout>, const std::vector<int64_t>&,
                    const std::vector<int64_t>&>(),
           "layout"_a, "own"_a, "asked_here"_a,
           "As one rank knows it, by its own numbers and what is asked of its shards.")
      .def("count", &Exchange::count, "rank"_a, "shard"_a)
      .def("begin", &Exchange::begin, "rank"_a, "shard"_a)
      .def("id_sizes", &Exchange::id_sizes)
      .def(
          "write_ids",
          [](const Exchange& exchange, Address ordered, const std::vector<Address>& messages) {
            exchange.write_ids(pointer<int64_t>(ordered), pointers<void>(messages));
          },
          "ordered"_a, "messages"_a, Unlocked())
      .def("asked_here", &Exchange::asked_here,
           "How many ids are asked of the shards of this rank: of the first by each rank, then of "
           "the next.")
      .def(
          "read_ids",
          [](const Exchange& exchange, Address ordered, const std::vector<Address>& messages,
             Address ids) {
            exchange.read_ids(pointer<int64_t>(ordered), pointers<void>(messages),
                              pointer<int64_t>(ids));
          },
          "ordered"_a, "messages"_a, "ids"_a, Unlocked())
      .def("row_sizes", &Exchange::row_sizes)
      .def(
          "row_places",
          [](const Exchange& exchange, const std::vector<Address>& messages, Address wide) {
            return VectorPlaces{exchange.row_places(pointers<void>(messages), pointer<void>(wide))};
          },
          "messages"_a, "wide"_a)
      .def_prop_ro("wide_bytes", &Exchange::wide_bytes)
      .def(
          "narrow",
          [](const Exchange& exchange, Address wide, const std::vector<Address>& messages) {
            exchange.narrow(pointer<void>(wide), pointers<void>(messages));
          },
          "wide"_a, "messages"_a, Unlocked())
      .def(
          "read_rows",
          [](const Exchange& exchange, const std::vector<Address>& messages,
             const std::vector<Address>& out) {
            exchange.read_rows(pointers<void>(messages), pointers<void>(out));
          },
          "messages"_a, "out"_a, Unlocked())
      .def("given_sizes", &Exchange::given_sizes, "chosen"_a, "stored"_a)
      .def(
          "write_given",
          [](const Exchange& exchange, const std::vector<bool>& chosen, bool stored,
             const std::vector<GivenTuple>& given, const std::vector<Address>& messages) {
            nb::gil_scoped_release unlocked;
            exchange.write_given(chosen, stored, given_of(given), pointers<void>(messages));
          },
          "chosen"_a, "stored"_a, "given"_a, "messages"_a)
      .def(
          "given_places",
          [](const Exchange& exchange, const std::vector<bool>& chosen, bool stored,
             const std::vector<Address>& messages) {
            return VectorPlaces{exchange.given_places(chosen, stored, pointers<void>(messages))};
          },
          "chosen"_a, "stored"_a, "messages"_a);

  bind_bags(module);

  nb::class_<FetchedRows>(module, "FetchedRows",
                          "Rows that came for one batch, as tables that a batch reads.")
      .def(
          "__init__",
          [](FetchedRows* made, std::shared_ptr<ExchangeLayout> layout) {
            new (made) FetchedRows(std::move(layout));
          },
          "layout"_a)
      .def(
          "read",
          [](FetchedRows& rows, const Exchange& exchange, Address ordered,
             const std::vector<Address>& messages) {
            rows.read(exchange, pointer<int64_t>(ordered), pointers<void>(messages));
          },
          "exchange"_a, "ordered"_a, "messages"_a, Unlocked())
      .def(
          "read_parts",
          [](FetchedRows& rows, const Exchange& exchange, Address ordered,
             const std::vector<PartTuple>& tuples) {
            std::vector<PartOfRows> parts;
            for (const auto& [part, row_at, messages] : tuples) {
              parts.push_back({*part, pointer<int64_t>(row_at), pointers<void>(messages)});
            }
            nb::gil_scoped_release unlocked;
            rows.read(exchange, pointer<int64_t>(ordered), parts);
          },
          "exchange"_a, "ordered"_a, "parts"_a,
          "Parts are (exchange, address of the positions of its ids among those of each table, "
          "messages), and together have each id once.")
      .def(
          "batch",
          [](const FetchedRows& rows, const Batch& given, const std::vector<int64_t>& counts,
             Address new_positions, Address inverse) {
            return rows.batch(given, counts, pointer<int64_t>(new_positions),
                              pointer<int64_t>(inverse));
          },
          "given"_a, "counts"_a, "new_positions"_a, "inverse"_a, Unlocked());
}
