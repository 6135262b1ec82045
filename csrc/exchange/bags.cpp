#include "exchange/bags.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

#include "exchange/messages.hpp"

namespace hotbed {

namespace {

// The ids of a feature without padding, and the length of each bag without it where they differ.
struct Kept {
  const int64_t* ids;
  int64_t count;
  Buffer<int64_t> copied;
  Buffer<int32_t> lengths;
};

Kept without_padding(const FeatureInput& input, std::optional<int64_t> padding) {
  Kept kept;
  kept.ids = static_cast<const int64_t*>(input.ids);
  kept.count = input.count;
  if (input.id_bytes != 8) {
    kept.copied.resize(input.count);
    std::copy_n(static_cast<const int32_t*>(input.ids), input.count, kept.copied.data());
    kept.ids = kept.copied.data();
  }
  bool drops =
      padding && std::find(kept.ids, kept.ids + kept.count, *padding) != kept.ids + kept.count;
  if (!input.offsets && !drops) return kept;
  kept.lengths.resize(input.bags);
  if (drops && kept.ids != kept.copied.data()) kept.copied.resize(input.count);
  int64_t n = 0;
  for (int64_t b = 0; b < input.bags; ++b) {
    int64_t begin = input.offsets ? input.offsets[b] : b * input.fixed;
    int64_t end = input.offsets ? input.offsets[b + 1] : begin + input.fixed;
    int64_t before = n;
    if (drops) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t id = kept.ids[i];
        if (id != *padding) kept.copied[n++] = id;  // at or before i
      }
    } else {
      n = end;
    }
    kept.lengths[b] = static_cast<int32_t>(n - before);
  }
  if (drops) kept.ids = kept.copied.data();
  kept.count = n;
  return kept;
}

void order(const FeatureInput& input, const ExchangedTable& table, int owner_count,
           OrderedBags::Feature& out) {
  Kept kept = without_padding(input, table.padding);
  out.ids.resize(kept.count);
  if (!table.owner_rule) {
    out.counts = {kept.count};
    if (kept.count) std::memcpy(out.ids.data(), kept.ids, kept.count * sizeof(int64_t));
    out.lengths = std::move(kept.lengths);
    return;
  }
  out.counts.assign(owner_count, 0);
  Buffer<int64_t> owners(kept.count);
  find_owners(kept.ids, kept.count, owner_count, *table.owner_rule, owners.data());
  out.lengths.resize(owner_count * out.bags);
  std::fill_n(out.lengths.data(), owner_count * out.bags, 0);
  int64_t i = 0;
  for (int64_t b = 0; b < out.bags; ++b) {
    int64_t end = i + (kept.lengths.size() ? kept.lengths[b] : input.fixed);
    for (; i < end; ++i) ++out.lengths[owners[i] * out.bags + b];
  }
  std::vector<int64_t*> next(owner_count, out.ids.data());
  for (int o = 0; o < owner_count; ++o) {
    const int32_t* lengths = out.lengths.data() + o * out.bags;
    out.counts[o] = std::reduce(lengths, lengths + out.bags, int64_t{0});
    if (o + 1 < owner_count) next[o + 1] = next[o] + out.counts[o];
  }
  for (i = 0; i < kept.count; ++i) *next[owners[i]]++ = kept.ids[i];
}

struct Strided {
  void* data;
  int64_t stride;  // in elements
};

// Rows of `width` numbers: `to` becomes what `from` has, zeros where that is nothing, or grows by
// it.
template <class T>
void copy_rows(Strided from, Strided to, int64_t rows, int64_t width, bool add) {
  auto* in = static_cast<const T*>(from.data);
  auto* out = static_cast<T*>(to.data);
  for (int64_t i = 0; i < rows; ++i, out += to.stride) {
    if (!in) {
      std::memset(out, 0, width * sizeof(T));
      continue;
    }
    if (add) {
      for (int64_t c = 0; c < width; ++c) out[c] += in[c];
    } else {
      std::memcpy(out, in, width * sizeof(T));
    }
    in += from.stride;
  }
}

template <class T>
T inverse_of(const OrderedBags::Feature& feature, int64_t bag) {
  T divisor = feature.divisor<T>(bag);
  return divisor == 0 ? T(0) : 1 / divisor;
}

template <class F>
void with_compute_type(DType dtype, const F& f) {
  if (dtype == DType::f64) {
    f(static_cast<double*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

}  // namespace

// -- bags of this rank
// -----------------------------------------------------------------------------

template <class T>
T OrderedBags::Feature::divisor(int64_t bag) const {
  if (combiner == Combiner::sum) return 1;
  int64_t length = lengths.size() ? 0 : static_cast<int64_t>(ids.size()) / bags;
  for (size_t r = 0; lengths.size() && r < counts.size(); ++r) length += lengths[r * bags + bag];
  auto total = static_cast<T>(length);
  return combiner == Combiner::mean ? total : static_cast<T>(__builtin_sqrt(total));
}

std::vector<double> OrderedBags::inverses(int f) const {
  const Feature& feature = features.at(f);
  std::vector<double> found(feature.bags);
  auto write = [&]<class T>(T*) {
    for (int64_t b = 0; b < feature.bags; ++b) found[b] = inverse_of<T>(feature, b);
  };
  with_compute_type(layout->tables[f].dtype, write);
  return found;
}

OrderedBags::OrderedBags(std::shared_ptr<const ExchangeLayout> all, const Batch& given,
                         const std::vector<int>& chosen)
    : layout(std::move(all)), features(chosen.size()) {
  if (chosen.size() != layout->tables.size()) {
    throw std::invalid_argument("a feature for each table");
  }
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic) if (chosen.size() > 1)
  for (size_t f = 0; f < chosen.size(); ++f) {
    try {
      const FeatureInput& input = given.features.at(chosen[f]).input;
      features[f].combiner = input.combiner;
      features[f].bags = input.bags;
      order(input, layout->tables[f], layout->owners[f], features[f]);
    } catch (...) {
#pragma omp critical
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

OrderedBags::OrderedBags(std::shared_ptr<const ExchangeLayout> all)
    : layout(std::move(all)), features(layout->tables.size()) {
  for (size_t t = 0; t < features.size(); ++t) {
    features[t].counts.resize(layout->owners[t]);
  }
}

std::vector<int64_t> OrderedBags::numbers() const {
  std::vector<int64_t> found;
  found.reserve(BagExchange::width(*layout));
  for (const Feature& feature : features) {
    found.insert(found.end(), feature.counts.begin(), feature.counts.end());
    found.push_back(2 * feature.bags + (feature.lengths.size() ? 1 : 0));
  }
  return found;
}

void OrderedBags::write_positions(int f, int64_t* ids, int64_t* of_bags) const {
  const Feature& feature = features.at(f);
  auto n = static_cast<int64_t>(feature.ids.size());
  std::copy_n(feature.ids.data(), n, ids);
  if (!feature.lengths.size()) {
    int64_t fixed = n ? n / feature.bags : 1;
    for (int64_t i = 0; i < n; ++i) of_bags[i] = i / fixed;
    return;
  }
  const int32_t* length = feature.lengths.data();
  for (size_t owner = 0; owner < feature.counts.size(); ++owner) {
    for (int64_t b = 0; b < feature.bags; ++b, ++length) {
      of_bags = std::fill_n(of_bags, *length, b);
    }
  }
}

// -- what all ranks ask
// ----------------------------------------------------------------------------

BagExchange::BagExchange(std::shared_ptr<const ExchangeLayout> all, const int64_t* numbers)
    : layout(std::move(all)) {
  const ExchangeLayout& l = *layout;
  asked_.reserve(l.ranks * l.shards.size());
  for (int r = 0; r < l.ranks; ++r, numbers += width(l)) {
    for (int64_t n = 0; n < width(l); ++n) {  // they come from other processes
      if (numbers[n] < 0 || numbers[n] > 2 * kMostIds) {
        throw std::invalid_argument("a rank tells that it asks for " + std::to_string(numbers[n]) +
                                    " ids or bags");
      }
    }
    for (const ExchangedShard& shard : l.shards) {
      int t = shard.table;
      const int64_t* own = numbers + l.number_of[t] + t;
      bool split = l.tables[t].owner_rule.has_value();
      int64_t of_bags = own[l.owners[t]];
      Asked made{0, own[0], of_bags / 2, of_bags % 2 == 1};
      if (split) {
        made = {std::reduce(own, own + shard.owner), own[shard.owner], of_bags / 2, true};
      }
      if (!made.has_lengths && (made.bags ? made.count % made.bags : made.count)) {
        throw std::invalid_argument("a rank tells of " + std::to_string(made.count) + " ids in " +
                                    std::to_string(made.bags) + " bags of one length");
      }
      asked_.push_back(made);
    }
  }
}

int64_t BagExchange::vectors(int rank, int shard) const {
  const Asked& one = asked(rank, shard);
  return is_split(shard) && !one.count ? 0 : one.bags;
}

int64_t BagExchange::lengths_bytes(int rank, int shard) const {
  return asked(rank, shard).has_lengths
             ? rounded(vectors(rank, shard) * static_cast<int64_t>(sizeof(int32_t)))
             : 0;
}

int64_t BagExchange::id_bytes(int rank, int shard) const {
  return asked(rank, shard).count * kWord + lengths_bytes(rank, shard);
}

int64_t BagExchange::piece_bytes(int rank, int shard) const {
  const ExchangedShard& s = layout->shards[shard];
  auto size = static_cast<int64_t>(compute_size(layout->tables[s.table].dtype));
  return rounded(vectors(rank, shard) * s.width * size);
}

// -- ids, and lengths, to their owners
// ---------------------------------------------------------------

MessageSizes BagExchange::id_sizes() const {
  return message_sizes(*layout, true, [&](int r, int s) { return id_bytes(r, s); });
}

void BagExchange::write_ids(const OrderedBags& own, const Messages& messages) const {
#pragma omp parallel for schedule(dynamic) if (layout->ranks > 2)
  for (int r = 0; r < layout->ranks; ++r) {
    if (r == layout->rank) continue;
    uint8_t* out = bytes(messages[r]);
    for (int s : layout->kept_by[r]) {
      const ExchangedShard& shard = layout->shards[s];
      const OrderedBags::Feature& feature = own.features[shard.table];
      const Asked& here = asked(layout->rank, s);
      own_ids(shard, feature.ids.data() + here.begin, here.count, reinterpret_cast<int64_t*>(out));
      out += here.count * kWord;
      if (int64_t size = lengths_bytes(layout->rank, s)) {
        int64_t first = is_split(s) ? shard.owner * feature.bags : 0;
        std::memcpy(out, feature.lengths.data() + first, here.bags * sizeof(int32_t));
        out += size;
      }
    }
  }
}

std::vector<BagExchange::Here> BagExchange::here() const {
  std::vector<Here> found;
  found.reserve(mine().size() * layout->ranks);
  for (int s : mine()) {
    for (int r = 0; r < layout->ranks; ++r) {
      const Asked& one = asked(r, s);
      found.push_back({one.count, vectors(r, s), one.has_lengths});
    }
  }
  return found;
}

void BagExchange::read_ids(const OrderedBags& own, const Messages& messages, int64_t* ids,
                           int64_t* offsets) const {
  Messages next = messages;
  for (int s : mine()) {
    const ExchangedShard& shard = layout->shards[s];
    for (int r = 0; r < layout->ranks; ++r) {
      const Asked& one = asked(r, s);
      const int32_t* lengths = nullptr;
      if (r == layout->rank) {
        const OrderedBags::Feature& feature = own.features[shard.table];
        own_ids(shard, feature.ids.data() + one.begin, one.count, ids);
        lengths = feature.lengths.data() + (is_split(s) ? shard.owner * feature.bags : 0);
      } else {
        if (one.count) std::memcpy(ids, next[r], one.count * kWord);
        next[r] = bytes(next[r]) + one.count * kWord;
        lengths = static_cast<const int32_t*>(next[r]);
        next[r] = bytes(next[r]) + lengths_bytes(r, s);
      }
      ids += one.count;
      if (!one.has_lengths) continue;
      *offsets++ = 0;
      for (int64_t b = 0; b < vectors(r, s); ++b, ++offsets) *offsets = offsets[-1] + lengths[b];
    }
  }
}

// -- vectors back
// ----------------------------------------------------------------------------------

MessageSizes BagExchange::vector_sizes() const {
  return message_sizes(*layout, false, [&](int r, int s) { return answer_bytes(r, s); });
}

std::vector<Vectors> BagExchange::vector_places(const Messages& messages) const {
  return piece_places(*layout, messages, [&](int r, int s) { return answer_bytes(r, s); });
}

void BagExchange::read_vectors(const OrderedBags& own, const Messages& messages,
                               const std::vector<Vectors>& out) const {
  const ExchangeLayout& l = *layout;
  std::vector<void*> pieces(l.shards.size(), nullptr);
  for (int r = 0; r < l.ranks; ++r) {
    uint8_t* next = bytes(messages[r]);
    for (int s : l.kept_by[r]) {
      if (!answers(s, l.rank)) continue;
      pieces[s] = next;
      next += piece_bytes(l.rank, s);
    }
  }
  std::vector<std::vector<int>> shards_of(l.tables.size());
  for (size_t s = 0; s < l.shards.size(); ++s) {
    if (pieces[s]) shards_of[l.shards[s].table].push_back(static_cast<int>(s));
  }
  for (std::vector<int>& of_table : shards_of) {  // the first owner writes all columns
    std::stable_sort(of_table.begin(), of_table.end(),
                     [&](int a, int b) { return l.shards[a].owner < l.shards[b].owner; });
  }
#pragma omp parallel for schedule(dynamic) if (l.tables.size() > 1)
  for (size_t t = 0; t < l.tables.size(); ++t) {
    with_compute_type(l.tables[t].dtype, [&]<class T>(T*) {
      const OrderedBags::Feature& feature = own.features[t];
      auto* whole = static_cast<T*>(out[t].data);
      int64_t stride = out[t].stride, dim = l.tables[t].dim;
      int first = -1;  // owner that has some of these ids
      for (int s : shards_of[t]) {
        if (!vectors(l.rank, s)) continue;
        const ExchangedShard& shard = l.shards[s];
        if (first < 0) first = shard.owner;
        Strided from{pieces[s], shard.width}, to{whole + shard.column, stride};
        copy_rows<T>(from, to, feature.bags, shard.width, shard.owner != first);
      }
      if (first < 0) copy_rows<T>({}, {whole, stride}, feature.bags, dim, false);
      for (int64_t b = 0; feature.combiner != Combiner::sum && b < feature.bags; ++b) {
        T divisor = feature.divisor<T>(b);
        T* row = whole + b * stride;
        for (int64_t c = 0; c < dim; ++c) row[c] = divisor == 0 ? T(0) : row[c] / divisor;
      }
    });
  }
}

// -- gradients of vectors to the owners
// --------------------------------------------------------------

MessageSizes BagExchange::given_sizes(const std::vector<bool>& chosen) const {
  return message_sizes(*layout, true, [&](int r, int s) {
    return chosen[layout->shards[s].table] ? piece_bytes(r, s) : 0;
  });
}

void BagExchange::write_given(const OrderedBags& own, const std::vector<bool>& chosen,
                              const std::vector<Vectors>& given, const Messages& messages) const {
  const ExchangeLayout& l = *layout;
  struct Piece {
    int shard;
    void* to;
  };
  std::vector<Piece> pieces;
  for (int r = 0; r < l.ranks; ++r) {
    uint8_t* next = bytes(messages[r]);
    for (int s : l.kept_by[r]) {
      if (!chosen[l.shards[s].table]) continue;
      pieces.push_back({s, next});
      next += piece_bytes(l.rank, s);
    }
  }
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1)
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ExchangedShard& shard = l.shards[pieces[i].shard];
    const OrderedBags::Feature& feature = own.features[shard.table];
    Vectors grads = given[shard.table];
    with_compute_type(l.tables[shard.table].dtype, [&]<class T>(T*) {
      Strided from{nullptr, grads.stride};
      if (grads.data) from.data = static_cast<T*>(grads.data) + shard.column;
      int64_t rows = vectors(l.rank, pieces[i].shard);
      auto* to = static_cast<T*>(pieces[i].to);
      copy_rows<T>(from, {to, shard.width}, rows, shard.width, false);
      if (!grads.data) return;
      auto trainers = static_cast<T>(l.trainers);
      for (int64_t b = 0; b < rows; ++b, to += shard.width) {
        T inverse = inverse_of<T>(feature, b);
        for (int64_t c = 0; c < shard.width; ++c) to[c] = to[c] * inverse / trainers;
      }
    });
  }
}

std::vector<Vectors> BagExchange::given_places(const std::vector<bool>& chosen,
                                               const Messages& messages) const {
  return piece_places(*layout, messages, [&](int r, int s) {
    return chosen[layout->shards[s].table] ? piece_bytes(r, s) : 0;
  });
}

}  // namespace hotbed
