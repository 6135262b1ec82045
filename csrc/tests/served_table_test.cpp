// Tables over memory of exactly the size that they say: under AddressSanitizer nothing beyond it is
// read, whatever lies in it.
#include "serve/served_table.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "kernels/kernels.hpp"
#include "rules/initial.hpp"
#include "tests/check.hpp"

using namespace hotbed;

namespace {

using Draw = std::mt19937_64;

// Bytes that no other memory follows at once.
struct Block {
  explicit Block(int64_t bytes, Draw& draw) : at(new uint8_t[static_cast<size_t>(bytes)]) {
    for (int64_t i = 0; i < bytes; ++i) at[i] = static_cast<uint8_t>(draw());
  }
  std::unique_ptr<uint8_t[]> at;
};

// A table of one layer, and what keeps its memory.
struct Fixture {
  Fixture(StoredAs stored_as, int64_t dim, int64_t count, const int64_t* ids, Draw& draw)
      : Fixture(stored_as, dim, count, ids, draw,
                MissingRows(std::vector<float>(static_cast<size_t>(dim), 0.5f))) {}
  Fixture(StoredAs stored_as, int64_t dim, int64_t count, const int64_t* ids, Draw& draw,
          MissingRows missing)
      : rows(count * stored_bytes(stored_as, dim), draw),
        scales(count * scale_bytes(stored_as), draw),
        table({{{stored_as, rows.at.get(), scale_bytes(stored_as) ? scales.at.get() : nullptr,
                 stored_bytes(stored_as, dim)},
                count,
                ids}},
              std::move(missing), ids ? std::nullopt : std::optional<int64_t>(count)) {}
  Block rows, scales;
  ServedTable table;
};

constexpr StoredAs kForms[] = {StoredAs::f32, StoredAs::f16, StoredAs::int8, StoredAs::int4};

int64_t position_of(const std::vector<int64_t>& ids, int64_t id) {
  auto at = std::lower_bound(ids.begin(), ids.end(), id);
  return at != ids.end() && *at == id ? at - ids.begin() : -1;
}

}  // namespace

TEST(rising_ids_are_found) {
  Draw draw(1);
  for (int64_t count : {0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096, 10007}) {
    std::vector<int64_t> ids;
    int64_t id = std::numeric_limits<int64_t>::min();
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(id);
      id += 1 + static_cast<int64_t>(draw() % 3);
    }
    if (count > 2) ids.back() = std::numeric_limits<int64_t>::max();
    std::vector<int64_t> wanted = ids;
    for (int64_t each : ids) wanted.push_back(each == ids.back() ? 0 : each + 1);
    wanted.push_back(-1);
    std::vector<int64_t> at(wanted.size());
    SortedIds(ids.data(), count)
        .find(wanted.data(), static_cast<int64_t>(wanted.size()), at.data());
    for (size_t i = 0; i < wanted.size(); ++i) CHECK_EQ(at[i], position_of(ids, wanted[i]));
  }
}

TEST(ids_that_do_not_rise_stay_inside) {
  Draw draw(2);
  for (int64_t count : {1, 63, 64, 65, 100, 1000}) {
    std::vector<int64_t> ids(static_cast<size_t>(count));
    for (int64_t& id : ids) id = static_cast<int64_t>(draw());
    ids.shrink_to_fit();
    std::vector<int64_t> at(ids.size());
    SortedIds(ids.data(), count).find(ids.data(), count, at.data());
    for (size_t i = 0; i < at.size(); ++i) {
      CHECK(at[i] >= -1 && at[i] < count);
      if (at[i] >= 0) CHECK_EQ(ids[at[i]], ids[i]);
    }
  }
}

TEST(nothing_beyond_the_rows_is_read) {
  for (const char* isa : {"base", "avx2", "avx512"}) {
    if (!use_kernels(isa)) continue;
    Draw draw(3);
    for (StoredAs stored_as : kForms) {
      for (int64_t dim : {1, 2, 3, 7, 15, 16, 17, 33, 63, 64, 100, 129, 200, 300}) {
        Fixture made(stored_as, dim, 5, nullptr, draw);
        std::vector<int64_t> ids = {4, 0, 4, 3, 4, 4}, offsets = {0, 2, 2, 5, 6};
        for (Combiner combiner :
             {Combiner::none, Combiner::sum, Combiner::mean, Combiner::sqrtn, Combiner::max}) {
          bool each = combiner == Combiner::none;
          int64_t bags = each ? 6 : 4;
          std::vector<float> out(static_cast<size_t>(bags * dim), -7);
          CHECK(!look_up({{&made.table, ids.data(), 6, each ? nullptr : offsets.data(), bags,
                           combiner, 3, out.data()}}));
          int64_t empty = each ? 3 : 1;
          for (int64_t j = 0; j < dim; ++j) CHECK_EQ(out[empty * dim + j], 0.0f);
        }
      }
    }
  }
  use_kernels("best");
}

TEST(ids_outside_are_told_by_the_first) {
  Draw draw(4);
  Fixture made(StoredAs::int8, 8, 5, nullptr, draw);
  std::vector<int64_t> ids = {1, 2, 5, -1};
  std::vector<float> out(32);
  ServedLookup good{&made.table, ids.data(), 2, nullptr, 2, Combiner::none, {}, out.data()};
  ServedLookup bad = good;
  bad.count = bad.bags = 4;
  auto refused = look_up({good, bad});
  CHECK(refused && refused->lookup == 1 && refused->position == 2);
  bad.skipped = 5;
  refused = look_up({bad});
  CHECK(refused && refused->lookup == 0 && refused->position == 3);
}

TEST(bags_have_computed_rows_among_others) {
  Draw draw(6);
  std::vector<int64_t> known;
  for (int64_t i = 0; i < 100; ++i) known.push_back(i * 2);
  for (StoredAs stored_as : kForms) {
    for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
      int64_t dim = 5;
      Fixture made(stored_as, dim, 100, known.data(), draw,
                   MissingRows(initial_spec(Initial::uniform, 2, 3, 0, 0, 7), dtype, dim));
      std::vector<int64_t> ids, offsets = {0};
      for (int64_t bag = 0; bag < 300; ++bag) {
        bool is_odd = bag % 3 == 0;
        for (uint64_t i = draw() % 4; i > 0; --i) {
          ids.push_back(static_cast<int64_t>(draw() % 100) * 2 + (is_odd && i % 2 ? 1 : 0));
        }
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      auto count = static_cast<int64_t>(ids.size());
      std::vector<float> each(static_cast<size_t>(count * dim)), sums(300 * dim);
      CHECK(!look_up(
          {{&made.table, ids.data(), count, nullptr, count, Combiner::none, {}, each.data()},
           {&made.table, ids.data(), count, offsets.data(), 300, Combiner::sum, {}, sums.data()}}));
      for (int64_t i = 0; i < count; ++i) {
        if (ids[i] % 2 == 0) continue;
        float value = 0;
        MissingRows(initial_spec(Initial::uniform, 2, 3, 0, 0, 7), dtype, 1)
            .compute(&ids[i], 1, &value);
        CHECK_EQ(each[i * dim], value);
        CHECK(value >= 2 && value <= 3);
      }
      for (int64_t bag = 0; bag < 300; ++bag) {
        for (int64_t j = 0; j < dim; ++j) {
          float sum = 0;
          for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) sum += each[i * dim + j];
          CHECK_EQ(std::bit_cast<uint32_t>(sums[bag * dim + j]), std::bit_cast<uint32_t>(sum));
        }
      }
    }
  }
}

TEST(threads_read_at_once) {
  Draw draw(5);
  std::vector<int64_t> known;
  for (int64_t i = 0; i < 5000; ++i) known.push_back(i * 7);
  Fixture made(StoredAs::int4, 24, 5000, known.data(), draw);
  std::vector<int64_t> ids, offsets = {0};
  for (int64_t bag = 0; bag < 2000; ++bag) {
    for (uint64_t i = draw() % 20; i > 0; --i) ids.push_back(static_cast<int64_t>(draw() % 36000));
    offsets.push_back(static_cast<int64_t>(ids.size()));
  }
  auto found = [&] {
    std::vector<float> out(2000 * 24);
    look_up({{&made.table,
              ids.data(),
              static_cast<int64_t>(ids.size()),
              offsets.data(),
              2000,
              Combiner::mean,
              {},
              out.data()}});
    return out;
  };
  std::vector<float> alone = found();
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> others(4);
  for (auto& out : others) threads.emplace_back([&] { out = found(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& out : others) {
    for (size_t i = 0; i < out.size(); ++i) {
      CHECK_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(alone[i]));
    }
  }
}
