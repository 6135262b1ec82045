#include "index/group.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace hotbed {

namespace {

constexpr uint32_t kEmpty = ~uint32_t{0};
constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio: neighbours lie far apart

int64_t by_modulo(int64_t id, int64_t ranks) {
  const int64_t rest = id % ranks;
  return rest < 0 ? rest + ranks : rest;
}

int64_t by_hash(int64_t id, int64_t ranks) {
  auto bits = static_cast<uint64_t>(id);
  bits = (bits ^ bits >> 33) * 0xFF51AFD7ED558CCD;
  bits = (bits ^ bits >> 33) * 0xC4CEB9FE1A85EC53;
  bits ^= bits >> 33;
  return static_cast<int64_t>((bits >> 32) * static_cast<uint64_t>(ranks) >> 32);
}

}  // namespace

int64_t group_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* inverse) {
  if (n >= int64_t{kEmpty}) throw std::length_error("more ids than one batch can have");
  if (n == 0) return 0;
  // Open addressing over positions in distinct, at most half full; it stays in the nearest cache.
  const auto places = std::bit_ceil(static_cast<uint64_t>(n) * 2);
  const int shift = 64 - std::countr_zero(places);
  const std::unique_ptr<uint32_t[]> at(new uint32_t[places]);
  std::fill_n(at.get(), places, kEmpty);
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    auto mixed = static_cast<uint64_t>(id);
    mixed ^= mixed >> 32;
    uint64_t place = (mixed * kSpread) >> shift;
    while (at[place] != kEmpty && distinct[at[place]] != id) place = (place + 1) & (places - 1);
    if (at[place] == kEmpty) {
      distinct[count] = id;
      at[place] = count++;
    }
    inverse[i] = at[place];
  }
  return count;
}

void find_owners(const int64_t* ids, int64_t n, int64_t ranks, OwnerRule owner_rule,
                 int64_t* owners) {
  if (ranks < 1) throw std::invalid_argument("there must be a rank");
  if (owner_rule == OwnerRule::given) throw std::invalid_argument("owners are to be given");
  if (owner_rule == OwnerRule::hash) {
    for (int64_t i = 0; i < n; ++i) owners[i] = by_hash(ids[i], ranks);
  } else if (std::has_single_bit(static_cast<uint64_t>(ranks))) {
    for (int64_t i = 0; i < n; ++i) owners[i] = ids[i] & (ranks - 1);  // a division takes longer
  } else {
    for (int64_t i = 0; i < n; ++i) owners[i] = by_modulo(ids[i], ranks);
  }
}

void order_by_owner(const int64_t* ids, int64_t n, int64_t ranks, OwnerRule owner_rule,
                    int64_t* ordered, int64_t* place, int64_t* sizes) {
  find_owners(ids, n, ranks, owner_rule, place);
  order_by_given_owner(ids, n, ranks, ordered, place, sizes);
}

void order_by_given_owner(const int64_t* ids, int64_t n, int64_t ranks, int64_t* ordered,
                          int64_t* place, int64_t* sizes) {
  std::fill_n(sizes, ranks, int64_t{0});
  for (int64_t i = 0; i < n; ++i) {
    if (place[i] < 0 || place[i] >= ranks) throw std::invalid_argument("an owner is no rank");
    ++sizes[place[i]];
  }
  std::vector<int64_t> next(static_cast<size_t>(ranks));
  std::exclusive_scan(sizes, sizes + ranks, next.begin(), int64_t{0});
  for (int64_t i = 0; i < n; ++i) {
    place[i] = next[static_cast<size_t>(place[i])]++;
    ordered[place[i]] = ids[i];
  }
}

}  // namespace hotbed
