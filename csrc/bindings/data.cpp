// The click-log parser for Python: bytes and NumPy arrays in, counts out, the GIL released.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "data/criteo.hpp"
#include "data/hash_ids.hpp"

using namespace hotbed;

namespace {

using Dense = nb::shape<-1, criteo::kIntegers>;
using Ids = nb::shape<criteo::kCategories, -1>;

std::string_view tail(const nb::bytes& text, size_t at) {
  if (at > text.size()) throw nb::index_error("the position is beyond the text");
  return {text.c_str() + at, text.size() - at};
}

auto as_tuple(const criteo::Progress& p) {
  return std::make_tuple(p.rows, p.lines, p.bytes, static_cast<int>(p.fault), p.column, p.begin,
                         p.end);
}

}  // namespace

void bind_data(nb::module_& module) {
  module.def(
      "criteo_parse",
      [](nb::bytes text, size_t at, size_t most, std::optional<Array<float, Vector>> label,
         Array<float, Dense> dense, Array<int64_t, Ids> ids, size_t row) {
        criteo::Columns out{label ? label->data() : nullptr, dense.data(), ids.data(),
                            ids.shape(1)};
        if (dense.shape(0) != out.capacity || (label && label->shape(0) != out.capacity)) {
          throw nb::value_error("label, dense and ids hold different numbers of rows");
        }
        std::string_view view = tail(text, at);
        criteo::Progress progress;
        {
          nb::gil_scoped_release release;
          progress = criteo::parse(view, most, out, row);
        }
        return as_tuple(progress);
      },
      "text"_a, "at"_a, "most"_a, "label"_a.none(), "dense"_a, "ids"_a, "row"_a,
      "(rows, lines, bytes, fault, column, begin, end) of csrc/data/criteo.hpp's parse.");

  module.def(
      "criteo_skip",
      [](nb::bytes text, size_t at, size_t most) {
        std::string_view view = tail(text, at);
        criteo::Progress progress;
        {
          nb::gil_scoped_release release;
          progress = criteo::skip(view, most);
        }
        return as_tuple(progress);
      },
      "text"_a, "at"_a, "most"_a);

  module.def(
      "criteo_format",
      [](std::optional<Array<const uint8_t, Vector>> label, Array<const int64_t, Dense> integers,
         Array<const int64_t, Ids> ids) {
        size_t n = ids.shape(1);
        if (integers.shape(0) != n || (label && label->shape(0) != n)) {
          throw nb::value_error("label, integers and ids hold different numbers of rows");
        }
        std::string out;
        {
          nb::gil_scoped_release release;
          out.reserve(n * 240);
          criteo::format(label ? label->data() : nullptr, integers.data(), ids.data(), n, out);
        }
        return nb::bytes(out.data(), out.size());
      },
      "label"_a.none(), "integers"_a, "ids"_a);

  module.def(
      "hash_ids",
      [](Address bytes, Address offsets, size_t width, size_t count, uint64_t seed, Address out) {
        hash_ids(pointer<const uint8_t>(bytes), pointer<const int64_t>(offsets), width, count, seed,
                 pointer<int64_t>(out));
      },
      "bytes"_a, "offsets"_a, "width"_a, "count"_a, "seed"_a, "out"_a, Unlocked(),
      "Writes the XXH64 of each value as int64; `offsets` 0: each has `width` bytes.");

  module.attr("CRITEO_LONGEST_LINE") = criteo::kLongestLine;
}
