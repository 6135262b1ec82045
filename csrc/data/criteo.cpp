#include "data/criteo.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>

namespace hotbed::criteo {
namespace {

constexpr uint8_t kNoDigit = 0x80;

constexpr std::array<uint8_t, 256> hex_digits() {
  std::array<uint8_t, 256> value{};
  for (auto& v : value) v = kNoDigit;
  for (int i = 0; i < 10; ++i) value['0' + i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 6; ++i) {
    value['a' + i] = static_cast<uint8_t>(10 + i);
    value['A' + i] = static_cast<uint8_t>(10 + i);
  }
  return value;
}
constexpr std::array<uint8_t, 256> kHex = hex_digits();

// Most integers of a log are small, and a logarithm costs more than the rest of the column.
const std::array<float, 2048>& small_logarithms() {
  static const auto table = [] {
    std::array<float, 2048> value{};
    for (size_t i = 0; i < value.size(); ++i) {
      value[i] = static_cast<float>(std::log1p(static_cast<double>(i)));
    }
    return value;
  }();
  return table;
}

// One line without its end. On success p has reached end.
class Line {
 public:
  Line(const char* begin, const char* end) : p_(begin), end_(end) {}

  bool label(float* out) {
    if (p_ == end_ || (*p_ != '0' && *p_ != '1')) return false;
    *out = static_cast<float>(*p_ - '0');
    ++p_;
    return field_ends();
  }

  bool integer(const std::array<float, 2048>& logarithm, float* out) {
    bool negative = p_ != end_ && *p_ == '-';
    const char* digits = p_ + negative;
    const char* q = digits;
    uint64_t value = 0;
    while (q != end_ && static_cast<unsigned char>(*q - '0') < 10 && q - digits < 18) {
      value = value * 10 + static_cast<uint64_t>(*q++ - '0');
    }
    if (q == digits && negative) return false;
    p_ = q;
    if (negative) value = 0;
    *out = value < logarithm.size() ? logarithm[value]
                                    : static_cast<float>(std::log1p(static_cast<double>(value)));
    return field_ends();
  }

  bool category(int64_t* out) {
    if (p_ == end_ || *p_ == '\t') {
      *out = kMissingId;
      return true;
    }
    if (end_ - p_ < 8) return false;
    uint32_t value = 0;
    uint8_t wrong = 0;
    for (int i = 0; i < 8; ++i) {
      uint8_t digit = kHex[static_cast<uint8_t>(p_[i])];
      wrong |= digit;
      value = value << 4 | (digit & 15);
    }
    if (wrong & kNoDigit) return false;
    p_ += 8;
    *out = value;
    return field_ends();
  }

  // Passes the tab before the next field.
  bool next() {
    if (p_ == end_) return false;
    ++p_;
    return true;
  }

  bool done() const { return p_ == end_; }

 private:
  bool field_ends() const { return p_ == end_ || *p_ == '\t'; }

  const char* p_;
  const char* end_;
};

// A line's extent in the text: [begin, end) without "\n" or "\r\n", and where the next one starts.
struct Extent {
  const char* end;
  const char* next;
};

inline Extent extent(const char* p, const char* stop) {
  auto* feed = static_cast<const char*>(std::memchr(p, '\n', static_cast<size_t>(stop - p)));
  Extent line{feed ? feed : stop, feed ? feed + 1 : stop};
  if (line.end != p && line.end[-1] == '\r') --line.end;
  return line;
}

// The number of columns is what a reader wants to know first; only then which one is wrong.
void explain(const char* text, const char* begin, const char* end, int first, int wrong,
             Progress& progress) {
  progress.begin = static_cast<size_t>(begin - text);
  progress.end = static_cast<size_t>(end - text);
  if (static_cast<size_t>(end - begin) > kLongestLine) {
    progress.fault = Fault::length;
    return;
  }
  int found = 1 + static_cast<int>(std::count(begin, end, '\t'));
  if (found != 1 + kIntegers + kCategories - first) {
    progress.fault = Fault::columns;
    progress.column = found;
    return;
  }
  for (int column = first; column < wrong; ++column) begin = std::find(begin, end, '\t') + 1;
  progress.begin = static_cast<size_t>(begin - text);
  progress.end = static_cast<size_t>(std::find(begin, end, '\t') - text);
  progress.column = wrong;
  progress.fault = wrong == 0           ? Fault::label
                   : wrong <= kIntegers ? Fault::integer
                                        : Fault::category;
}

// Returns the first wrong column (0 label, 1..13 integers, 14..39 categories) or -1.
int read_line(Line line, const Columns& out, size_t row, const std::array<float, 2048>& logarithm) {
  if (out.label && !(line.label(out.label + row) && line.next())) return 0;
  float* dense = out.dense + row * kIntegers;
  for (int i = 0; i < kIntegers; ++i) {
    if (!(line.integer(logarithm, dense + i) && line.next())) return 1 + i;
  }
  int64_t* id = out.ids + row;
  for (int i = 0; i < kCategories; ++i, id += out.capacity) {
    if (!line.category(id)) return 1 + kIntegers + i;
    if (i + 1 < kCategories && !line.next()) return 1 + kIntegers + i;
  }
  return line.done() ? -1 : kIntegers + kCategories;
}

}  // namespace

Progress parse(std::string_view text, size_t most, const Columns& out, size_t row) {
  const auto& logarithm = small_logarithms();
  const char* p = text.data();
  const char* stop = p + text.size();
  Progress progress;
  while (p != stop && progress.rows < most && row < out.capacity) {
    auto [end, next] = extent(p, stop);
    ++progress.lines;
    if (end != p) {
      int wrong = 0;
      if (static_cast<size_t>(end - p) <= kLongestLine) {
        wrong = read_line(Line(p, end), out, row, logarithm);
      }
      if (wrong >= 0) {
        explain(text.data(), p, end, out.label ? 0 : 1, wrong, progress);
        p = next;
        break;
      }
      ++progress.rows;
      ++row;
    }
    p = next;
  }
  progress.bytes = static_cast<size_t>(p - text.data());
  return progress;
}

Progress skip(std::string_view text, size_t most) {
  const char* p = text.data();
  const char* stop = p + text.size();
  Progress progress;
  while (p != stop && progress.rows < most) {
    auto [end, next] = extent(p, stop);
    ++progress.lines;
    progress.rows += end != p;
    p = next;
  }
  progress.bytes = static_cast<size_t>(p - text.data());
  return progress;
}

void format(const uint8_t* label, const int64_t* integers, const int64_t* ids, size_t n,
            std::string& out) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::array<char, kLongestLine> line;
  for (size_t row = 0; row < n; ++row) {
    char* p = line.data();
    if (label) {
      *p++ = label[row] ? '1' : '0';
      *p++ = '\t';
    }
    for (int i = 0; i < kIntegers; ++i) {
      int64_t value = integers[row * kIntegers + static_cast<size_t>(i)];
      if (value != kMissingInteger) p = std::to_chars(p, p + 20, value).ptr;
      *p++ = '\t';
    }
    for (size_t i = 0; i < kCategories; ++i) {
      int64_t id = ids[i * n + row];
      if (id != kMissingId) {
        for (int shift = 28; shift >= 0; shift -= 4) *p++ = kDigits[id >> shift & 15];
      }
      *p++ = i + 1 < kCategories ? '\t' : '\n';
    }
    out.append(line.data(), static_cast<size_t>(p - line.data()));
  }
}

}  // namespace hotbed::criteo
