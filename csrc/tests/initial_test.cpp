// First values: the same whatever the instruction set, the batch and the dtype's neighbours.
#include "rules/initial.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.hpp"

using namespace hotbed;

static void expect(bool truth, const char* what) {
  if (truth) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

static std::vector<uint8_t> rows_of(const InitialSpec& spec, const std::vector<int64_t>& ids,
                                    int64_t dim, DType dtype) {
  std::vector<uint8_t> out(ids.size() * static_cast<size_t>(dim) * size_of(dtype));
  initial_rows(spec, ids.data(), 0, static_cast<int64_t>(ids.size()), dim, dtype, out.data());
  return out;
}

static void same_bits_everywhere() {
  std::vector<int64_t> ids{0, -1, INT64_MAX, INT64_MIN, 77};
  for (int64_t i = 0; i < 300; ++i) ids.push_back(i * 1000003);
  const InitialSpec specs[] = {
      initial_spec(Initial::constant, 1.5, 0, 0, 0, 9),
      initial_spec(Initial::uniform, -0.25, 0.5, 0, 0, 9),
      initial_spec(Initial::normal, 1, 2, 0, 0, 9),
      initial_spec(Initial::truncated_normal, 0, 1, -1, 2.5, 9),
      initial_spec(Initial::truncated_normal, 0, 1, 7, 9, 9),
  };
  for (const InitialSpec& spec : specs) {
    for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      for (int64_t dim : {1, 3, 64, 1025}) {
        use_kernels("base");
        std::vector<uint8_t> base = rows_of(spec, ids, dim, dtype);
        for (const char* isa : {"avx2", "avx512"}) {
          if (!use_kernels(isa)) continue;
          expect(rows_of(spec, ids, dim, dtype) == base, "instruction sets agree");
        }
        std::vector<uint8_t> one = rows_of(spec, {ids[4]}, dim, dtype);
        size_t row = one.size();
        expect(std::memcmp(one.data(), base.data() + 4 * row, row) == 0, "a row alone is the same");
      }
    }
  }
  use_kernels("best");
}

static void ranges_and_padding() {
  InitialSpec spec = initial_spec(Initial::normal, 0, 1, 0, 0, 3);
  spec.has_padding = true;
  spec.padding_id = 12;
  std::vector<float> by_range(10 * 5), by_id(10 * 5);
  std::vector<int64_t> ids{10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
  initial_rows(spec, nullptr, 10, 10, 5, DType::f32, by_range.data());
  initial_rows(spec, ids.data(), 0, 10, 5, DType::f32, by_id.data());
  expect(by_range == by_id, "a range of ids gives the same rows as the ids");
  for (int i = 10; i < 15; ++i) expect(by_id[i] == 0, "the padding row is zeros");
  expect(by_id[0] != 0 && by_id[15] != 0, "other rows are not");
}

static void refusals() {
  auto refused = [](Initial kind, double a, double b, double c, double d) {
    try {
      initial_spec(kind, a, b, c, d, 0);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  expect(refused(Initial::uniform, 1, 0, 0, 0), "an empty uniform range");
  expect(refused(Initial::normal, NAN, 1, 0, 0), "a mean that is not a number");
  expect(refused(Initial::normal, 0, -1, 0, 0), "a negative deviation");
  expect(refused(Initial::truncated_normal, 0, 1, 2, 1), "an inverted truncation");
  expect(refused(Initial::truncated_normal, 0, 1, 1, 1), "a truncation without width");
  expect(refused(Initial::truncated_normal, 0, 1, 50, 60), "a truncation beyond all probability");
  expect(!refused(Initial::truncated_normal, 0, 1, 30, 31), "a far truncation is possible");
  expect(!refused(Initial::uniform, 1, 1, 0, 0), "a uniform range of one value");
}

int main() {
  same_bits_everywhere();
  ranges_and_padding();
  refusals();
  std::puts("ok");
}
