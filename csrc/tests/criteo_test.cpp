// The parser on heap copies of exact size, so that AddressSanitizer sees a read past either end.
#include "data/criteo.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

using namespace hotbed;

#define CHECK(condition)                                                 \
  if (!(condition)) {                                                    \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                        \
  }

namespace {

constexpr size_t kRows = 16;

struct Out {
  std::vector<float> label = std::vector<float>(kRows);
  std::vector<float> dense = std::vector<float>(kRows * 13);
  std::vector<int64_t> ids = std::vector<int64_t>(kRows * 26);
  criteo::Columns columns() { return {label.data(), dense.data(), ids.data(), kRows}; }
};

criteo::Progress parse(const std::string& text, Out& out) {
  auto copy = std::make_unique<char[]>(text.size());
  std::copy(text.begin(), text.end(), copy.get());
  return criteo::parse({copy.get(), text.size()}, kRows, out.columns(), 0);
}

std::string lines(size_t n) {
  std::vector<uint8_t> label(n);
  std::vector<int64_t> integers(n * 13), ids(n * 26);
  for (size_t i = 0; i < n; ++i) label[i] = i % 2;
  for (size_t i = 0; i < n * 13; ++i) {
    integers[i] = i % 5 ? static_cast<int64_t>(i * 37) - 3 : criteo::kMissingInteger;
  }
  for (size_t i = 0; i < n * 26; ++i) {
    ids[i] = i % 7 ? static_cast<int64_t>(i * 2654435761u & 0xffffffff) : criteo::kMissingId;
  }
  std::string text;
  criteo::format(label.data(), integers.data(), ids.data(), n, text);
  return text;
}

void round_trip() {
  Out out;
  std::string text = lines(kRows);
  auto progress = parse(text, out);
  CHECK(progress.rows == kRows && progress.lines == kRows && progress.bytes == text.size());
  CHECK(progress.fault == criteo::Fault::none);
  for (size_t i = 0; i < kRows; ++i) CHECK(out.label[i] == static_cast<float>(i % 2));
  for (size_t i = 0; i < kRows * 13; ++i) {
    double x = i % 5 ? std::max(0.0, static_cast<double>(i) * 37 - 3) : 0;
    CHECK(out.dense[i] == static_cast<float>(std::log1p(x)));
  }
  for (size_t i = 0; i < kRows * 26; ++i) {
    CHECK(out.ids[i] ==
          (i % 7 ? static_cast<int64_t>(i * 2654435761u & 0xffffffff) : criteo::kMissingId));
  }
}

// Every prefix of a text parses without a read outside it, and rows only come from whole lines.
void prefixes() {
  std::string text = lines(3);
  size_t first = text.find('\n') + 1, second = text.find('\n', first) + 1;
  for (size_t size = 0; size <= text.size(); ++size) {
    Out out;
    auto progress = parse(text.substr(0, size), out);
    CHECK(progress.bytes == size);
    size_t whole = (size >= first) + (size >= second);
    CHECK(progress.rows == whole || progress.rows == whole + 1);
    CHECK(progress.begin <= progress.end && progress.end <= size);
  }
}

void single_bytes() {
  std::string text = lines(2);
  for (size_t at = 0; at < text.size(); ++at) {
    for (int byte : {0, 9, 10, 13, 45, 48, 58, 71, 255}) {
      std::string changed = text;
      changed[at] = static_cast<char>(byte);
      Out out;
      auto progress = parse(changed, out);
      CHECK(progress.end <= changed.size() && progress.begin <= progress.end);
      auto rest = criteo::skip(changed, 1000);
      CHECK(rest.bytes == changed.size() && rest.rows >= 1 && rest.rows <= 3);
    }
  }
}

void two_threads() {
  std::string text = lines(kRows);
  Out outs[2];
  std::thread other([&] { parse(text, outs[0]); });
  parse(text, outs[1]);
  other.join();
  CHECK(outs[0].ids == outs[1].ids && outs[0].dense == outs[1].dense);
}

}  // namespace

int main() {
  two_threads();
  round_trip();
  prefixes();
  single_bytes();
  Out out;
  CHECK(parse("", out).rows == 0);
  CHECK(parse("\n\r\n\n", out).lines == 3);
  CHECK(parse("1\t2", out).fault == criteo::Fault::columns);
  CHECK(parse(std::string(5000, '\t'), out).fault == criteo::Fault::length);
}
