// Lines of the Criteo click logs to arrays and back. A line is
//   label, I1..I13, C1..C26      (tabs between; the label is missing in rows to be scored)
// where I are decimal integers, C eight hexadecimal digits, and any of them may be empty.
//
// Threads: pure functions of their arguments. Any number of threads may call them at once, on
// outputs of their own. No OpenMP, so they also run in a process forked from one that used it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hotbed::criteo {

constexpr int kIntegers = 13;
constexpr int kCategories = 26;
constexpr size_t kLongestLine = 4096;
constexpr int64_t kMissingId = -1;              // below every 32-bit value
constexpr int64_t kMissingInteger = INT64_MIN;  // for format()

enum class Fault : int { none = 0, columns = 1, label = 2, integer = 3, category = 4, length = 5 };

// Where rows go. `label` is null for lines without one.
struct Columns {
  float* label;     // (capacity)
  float* dense;     // (capacity, 13): log(1 + max(x, 0)), missing 0
  int64_t* ids;     // (26, capacity): the value itself, missing kMissingId
  size_t capacity;  // rows
};

struct Progress {
  size_t rows = 0;   // good lines, written
  size_t lines = 0;  // line feeds passed: good, bad and blank lines
  size_t bytes = 0;  // consumed
  Fault fault = Fault::none;
  int column = 0;    // the first wrong one, from 0; for Fault::columns how many there were
  size_t begin = 0;  // the offending field, relative to the text
  size_t end = 0;
};

// Reads at most `most` lines that are not blank from `text`, which holds whole lines (the last may
// lack its line feed), into rows `row`, `row` + 1, ... of `out`. Stops after a malformed line.
Progress parse(std::string_view text, size_t most, const Columns& out, size_t row);

// Passes at most `most` lines that are not blank; `rows` is the number of them.
Progress skip(std::string_view text, size_t most);

// Appends n rows as lines. `integers` is (n, 13), `ids` (26, n), `label` (n) or null.
void format(const uint8_t* label, const int64_t* integers, const int64_t* ids, size_t n,
            std::string& out);

}  // namespace hotbed::criteo
