// TopUses: what its counts promise, for streams of every kind.
#include "tiers/top_uses.hpp"

#include <algorithm>
#include <map>
#include <random>

#include "check.hpp"

using namespace hotbed;

namespace {

// What is shown lies between its bounds, and nothing that is not shown was used more often.
void check_bounds(const TopUses& top, const std::map<int64_t, uint64_t>& used, uint64_t total) {
  auto shown = top.top(1 << 20);
  CHECK_EQ(shown.size(), std::min<size_t>(used.size(), TopUses::kIds));
  std::map<int64_t, uint64_t> missing = used;
  for (const TopUses::Used& one : shown) {
    uint64_t uses = used.at(one.id);
    CHECK(uses <= one.uses && one.uses - one.excess <= uses);
    CHECK(one.excess <= total / TopUses::kIds);
    CHECK_EQ(missing.erase(one.id), 1u);
  }
  CHECK(std::is_sorted(shown.begin(), shown.end(), [](const auto& a, const auto& b) {
    return a.uses != b.uses ? a.uses > b.uses : a.id < b.id;
  }));
  for (auto [id, uses] : missing) CHECK(uses <= shown.back().uses);
}

}  // namespace

TEST(counts_keep_their_bounds) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    TopUses top;
    std::map<int64_t, uint64_t> used;
    uint64_t total = 0;
    int64_t space = seed % 4 == 0 ? 256 : seed % 4 == 1 ? 257 : seed % 4 == 2 ? 2000 : 1'000'000;
    for (int batch = 0; batch < 30; ++batch) {
      std::map<int64_t, int32_t> counts;
      for (int draw = 0; draw < 700; ++draw) {
        double u = std::uniform_real_distribution<>(0, 1)(random);
        if (seed % 3 == 0) u = u * u * u;
        counts[static_cast<int64_t>(u * static_cast<double>(space)) * (seed % 2 ? 1 : 4096)] +=
            seed % 5 == 0 ? 1000 : 1;
      }
      std::vector<int64_t> ids;
      std::vector<int32_t> uses;
      for (auto [id, count] : counts) {
        ids.push_back(id);
        uses.push_back(count);
        used[id] += static_cast<uint64_t>(count);
        total += static_cast<uint64_t>(count);
      }
      top.add(ids.data(), uses.data(), static_cast<int64_t>(ids.size()));
      check_bounds(top, used, total);
    }
    CHECK(top.memory_bytes() < 26'000);
    CHECK_EQ(top.top(7).size(), 7u);
    CHECK(top.top(-1).empty());
    top.clear();
    CHECK(top.top(1).empty());
    int64_t id = 3;
    int32_t count = 2;
    top.add(&id, &count, 1);
    CHECK(top.top(9).size() == 1 && top.top(9)[0].uses == 2);
  }
}
