#include "exchange/layout.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hotbed {

void own_ids(const ExchangedShard& shard, const int64_t* ids, int64_t n, int64_t* out) {
  if (shard.first == 0 && shard.stride == 1) {
    if (n) std::memcpy(out, ids, n * sizeof(int64_t));
    return;
  }
  if (std::has_single_bit(static_cast<uint64_t>(shard.stride))) {  // a division takes longer
    const int shift = std::countr_zero(static_cast<uint64_t>(shard.stride));
    for (int64_t i = 0; i < n; ++i) out[i] = (ids[i] - shard.first) >> shift;
    return;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = (ids[i] - shard.first) / shard.stride;
}

ExchangeLayout::ExchangeLayout(int rank, int ranks, std::vector<ExchangedTable> all_tables,
                               std::vector<ExchangedShard> all_shards, int trainers)
    : rank(rank),
      ranks(ranks),
      trainers(trainers),
      tables(std::move(all_tables)),
      shards(std::move(all_shards)),
      owners(tables.size()),
      kept_by(ranks) {
  for (size_t s = 0; s < shards.size(); ++s) {
    const ExchangedShard& shard = shards[s];
    kept_by.at(shard.rank).push_back(static_cast<int>(s));
    int& known = owners.at(shard.table);
    if (shard.owner < 0 || shard.owner >= std::max(ranks, static_cast<int>(shards.size()))) {
      throw std::invalid_argument("shard " + std::to_string(s) + " has no owner");
    }
    known = std::max(known, shard.owner + 1);
  }
  number_of.push_back(0);
  for (size_t t = 0; t < tables.size(); ++t) {
    if (!tables[t].owner_rule) owners[t] = 1;
    if (tables[t].owner_rule == OwnerRule::given) owners[t] = ranks;
    number_of.push_back(number_of.back() + owners[t]);
  }
}

void ExchangeLayout::order_by_owner(const int64_t* ids, const std::vector<int64_t>& counts,
                                    int64_t* ordered, int64_t* new_positions,
                                    int64_t* numbers) const {
  if (counts.size() != tables.size()) throw std::invalid_argument("a count for each table");
  for (size_t t = 0; t < tables.size(); ++t) {
    int64_t n = counts[t];
    if (tables[t].owner_rule == OwnerRule::given) {
      order_by_given_owner(ids, n, ranks, ordered, new_positions, numbers + number_of[t]);
      for (int r = 0; r < ranks; ++r) {
        bool keeps = std::any_of(kept_by[r].begin(), kept_by[r].end(),
                                 [&](int s) { return shards[s].table == static_cast<int>(t); });
        if (numbers[number_of[t] + r] && !keeps) {
          throw std::invalid_argument("rank " + std::to_string(r) + " owns ids and has no shard");
        }
      }
    } else if (tables[t].owner_rule) {
      hotbed::order_by_owner(ids, n, owners[t], *tables[t].owner_rule, ordered, new_positions,
                             numbers + number_of[t]);
    } else {
      if (n) std::memcpy(ordered, ids, n * sizeof(int64_t));
      std::iota(new_positions, new_positions + n, int64_t{0});
      numbers[number_of[t]] = n;
    }
    ids += n;
    ordered += n;
    new_positions += n;
  }
}

}  // namespace hotbed
