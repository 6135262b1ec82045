#include "exchange/exchange.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "exchange/messages.hpp"
#include "kernels/kernels.hpp"

namespace hotbed {

namespace {

int64_t element(DType dtype, bool stored) {
  if (dtype == DType::f64) return 8;
  return stored && (dtype == DType::f16 || dtype == DType::bf16) ? 2 : 4;
}

bool widened(DType dtype) { return element(dtype, true) != element(dtype, false); }

// Rows that are copied: row i from row_of[i], -1 being zeros, to row_at[i]; where these are
// nullptr, from or to row i.
struct Copied {
  const uint8_t* from;  // nullptr: zeros
  int64_t from_stride;
  uint8_t* to;
  int64_t to_stride;
  int64_t bytes;  // of each row
  int64_t rows;
  const int64_t* row_of = nullptr;
  const int64_t* row_at = nullptr;
};

void copy(const Copied& c) {
  bool in_order = !c.row_of && !c.row_at;
  if (c.from && in_order && c.from_stride == c.bytes && c.to_stride == c.bytes) {
    if (c.rows) std::memcpy(c.to, c.from, c.rows * c.bytes);
    return;
  }
  for (int64_t i = 0; i < c.rows; ++i) {
    int64_t row = c.row_of ? c.row_of[i] : i;
    uint8_t* to = c.to + (c.row_at ? c.row_at[i] : i) * c.to_stride;
    if (!c.from || row < 0) {
      std::memset(to, 0, c.bytes);
    } else {
      std::memcpy(to, c.from + row * c.from_stride, c.bytes);
    }
  }
}

// Bytes that a task copies, and below which one thread copies all.
constexpr int64_t kTaskBytes = 256 << 10;

// All of them, in parallel where it is worth it.
void copy_all(const std::vector<Copied>& wanted) {
  std::vector<Copied> tasks;
  tasks.reserve(wanted.size());
  int64_t total = 0;
  for (const Copied& c : wanted) {
    total += c.rows * c.bytes;
    int64_t most = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, c.bytes));
    for (int64_t first = 0; first < c.rows; first += most) {
      Copied task = c;
      task.rows = std::min(most, c.rows - first);
      if (c.row_at) {
        task.row_at += first;
      } else {
        task.to += first * c.to_stride;
      }
      if (c.row_of) {
        task.row_of += first;
      } else if (c.from) {
        task.from += first * c.from_stride;
      }
      tasks.push_back(task);
    }
  }
#pragma omp parallel for schedule(dynamic) if (total > kTaskBytes)
  for (size_t i = 0; i < tasks.size(); ++i) copy(tasks[i]);
}

// Where some ids have no row, the rows count as added to zeros: -0 becomes 0.
void add_to_zeros(DType dtype, void* values, int64_t n) {
  if (dtype == DType::f64) {
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(values)[i] += 0.0;
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(values)[i] += 0.0F;
  }
}

}  // namespace

std::vector<int64_t> distinct_ids(const Batch& batch, int64_t* distinct, int64_t* inverse) {
  std::vector<int64_t> counts, joined;
  counts.reserve(batch.parts.size());
  for (const TableBatch& part : batch.parts) {
    const int64_t* ids = nullptr;
    if (part.features.size() == 1 && batch.features[part.features[0]].input.id_bytes == 8) {
      ids = static_cast<const int64_t*>(batch.features[part.features[0]].input.ids);
    } else {
      joined.resize(part.count);
      ids = joined.data();
      for (int f : part.features) {
        const FeatureInput& input = batch.features[f].input;
        int64_t* out = joined.data() + batch.features[f].base;
        if (input.id_bytes == 8) {
          std::copy_n(static_cast<const int64_t*>(input.ids), input.count, out);
        } else {
          std::copy_n(static_cast<const int32_t*>(input.ids), input.count, out);
        }
      }
    }
    counts.push_back(group_ids(ids, part.count, distinct, inverse));
    distinct += counts.back();
    inverse += part.count;
  }
  return counts;
}

namespace {

// The numbers of all ranks, as far as one knows them.
std::vector<int64_t> known_numbers(const ExchangeLayout& layout, const std::vector<int64_t>& own,
                                   const std::vector<int64_t>& asked_here) {
  const int64_t width = layout.number_of.back();
  const std::vector<int>& mine = layout.kept_by[layout.rank];
  if (std::ssize(own) != width || asked_here.size() != mine.size() * layout.ranks) {
    throw std::invalid_argument("numbers of another layout");
  }
  std::vector<int64_t> numbers(layout.ranks * width);
  auto count = asked_here.begin();
  for (int s : mine) {
    const ExchangedShard& shard = layout.shards[s];
    int64_t at = layout.number_of[shard.table];
    if (layout.tables[shard.table].owner_rule) at += shard.owner;
    for (int r = 0; r < layout.ranks; ++r) numbers[r * width + at] = *count++;
  }
  std::copy(own.begin(), own.end(), numbers.begin() + layout.rank * width);
  return numbers;
}

}  // namespace

Exchange::Exchange(std::shared_ptr<const ExchangeLayout> all, const std::vector<int64_t>& own,
                   const std::vector<int64_t>& asked_here)
    : Exchange(all, known_numbers(*all, own, asked_here).data()) {}

Exchange::Exchange(std::shared_ptr<const ExchangeLayout> all, const int64_t* numbers)
    : layout(std::move(all)) {
  const ExchangeLayout& l = *layout;
  for (int64_t n = 0; n < l.ranks * l.number_of.back(); ++n) {  // they come from other processes
    if (numbers[n] < 0 || numbers[n] > kMostIds) {
      throw std::invalid_argument("a rank tells that it asks for " + std::to_string(numbers[n]) +
                                  " ids");
    }
  }
  ranges_.reserve(l.ranks * l.shards.size());
  std::vector<int64_t> begins(l.number_of.back());
  for (int r = 0; r < l.ranks; ++r, numbers += l.number_of.back()) {
    int before = -1;
    for (const ExchangedShard& shard : l.shards) {
      const int64_t* own = numbers + l.number_of[shard.table];
      if (!l.tables[shard.table].owner_rule) {
        ranges_.push_back({0, own[0]});
        continue;
      }
      if (shard.table != before)
        std::exclusive_scan(own, own + l.owners[shard.table], begins.begin(), int64_t{0});
      before = shard.table;
      ranges_.push_back({begins[shard.owner], own[shard.owner]});
    }
    if (r != l.rank) continue;
    asked_at_.push_back(0);
    for (size_t t = 0; t < l.tables.size(); ++t) {
      int64_t total = std::reduce(numbers + l.number_of[t], numbers + l.number_of[t + 1]);
      asked_at_.push_back(asked_at_.back() + total);
    }
  }
}

int64_t Exchange::row_bytes(int shard, bool stored) const {
  const ExchangedShard& s = layout->shards[shard];
  return s.width * element(layout->tables[s.table].dtype, stored);
}

int64_t Exchange::piece_bytes(int requester, int shard, bool stored) const {
  return rounded(count(requester, shard) * row_bytes(shard, stored));
}

// -- ids to their owners
// ---------------------------------------------------------------------------

MessageSizes Exchange::id_sizes() const {
  return message_sizes(*layout, true, [&](int r, int s) { return kWord * count(r, s); });
}

void Exchange::write_ids(const int64_t* ordered, const Messages& messages) const {
  for (int r = 0; r < layout->ranks; ++r) {
    if (r == layout->rank) continue;
    auto* out = static_cast<int64_t*>(messages[r]);
    for (int s : layout->kept_by[r]) {
      const ExchangedShard& shard = layout->shards[s];
      int64_t n = count(layout->rank, s);
      own_ids(shard, ordered + asked_at_[shard.table] + begin(layout->rank, s), n, out);
      out += n;
    }
  }
}

std::vector<int64_t> Exchange::asked_here() const {
  std::vector<int64_t> counts;
  counts.reserve(mine().size() * layout->ranks);
  for (int s : mine()) {
    for (int r = 0; r < layout->ranks; ++r) counts.push_back(count(r, s));
  }
  return counts;
}

void Exchange::read_ids(const int64_t* ordered, const Messages& messages, int64_t* ids) const {
  std::vector<const int64_t*> next;
  for (void* message : messages) next.push_back(static_cast<const int64_t*>(message));
  for (int s : mine()) {
    const ExchangedShard& shard = layout->shards[s];
    for (int r = 0; r < layout->ranks; ++r) {
      int64_t n = count(r, s);
      if (r == layout->rank) {
        own_ids(shard, ordered + asked_at_[shard.table] + begin(r, s), n, ids);
      } else if (n) {
        std::memcpy(ids, next[r], n * sizeof(int64_t));
        next[r] += n;
      }
      ids += n;
    }
  }
}

// -- rows back
// -------------------------------------------------------------------------------------

MessageSizes Exchange::row_sizes() const {
  return message_sizes(*layout, false,
                       [&](int r, int s) { return answers(s, r) ? piece_bytes(r, s, true) : 0; });
}

std::vector<Vectors> Exchange::row_places(const Messages& messages, void* wide) const {
  std::vector<Vectors> places;
  places.reserve(mine().size() * layout->ranks);
  Messages next = messages;
  auto* widened_next = static_cast<uint8_t*>(wide);
  for (int s : mine()) {
    const ExchangedShard& shard = layout->shards[s];
    bool is_widened = widened(layout->tables[shard.table].dtype);
    for (int r = 0; r < layout->ranks; ++r) {
      if (!answers(s, r)) {
        places.push_back({});
        continue;
      }
      places.push_back({is_widened ? widened_next : next[r], shard.width});
      if (is_widened) widened_next += piece_bytes(r, s, false);
      next[r] = bytes(next[r]) + piece_bytes(r, s, true);
    }
  }
  return places;
}

int64_t Exchange::wide_bytes() const {
  int64_t total = 0;
  for (int s : mine()) {
    if (!widened(layout->tables[layout->shards[s].table].dtype)) continue;
    for (int r = 0; r < layout->ranks; ++r) {
      if (answers(s, r)) total += piece_bytes(r, s, false);
    }
  }
  return total;
}

void Exchange::narrow(const void* wide, const Messages& messages) const {
  const uint8_t* from = bytes(wide);
  Messages next = messages;
  for (int s : mine()) {
    DType dtype = layout->tables[layout->shards[s].table].dtype;
    for (int r = 0; r < layout->ranks; ++r) {
      if (!answers(s, r)) continue;
      if (widened(dtype)) {
        int64_t values = count(r, s) * layout->shards[s].width;
        kernels().encode_values(dtype, reinterpret_cast<const float*>(from), values, next[r]);
        from += piece_bytes(r, s, false);
      }
      next[r] = bytes(next[r]) + piece_bytes(r, s, true);
    }
  }
}

void Exchange::read_rows(const Messages& messages, const std::vector<void*>& out,
                         const int64_t* row_at) const {
  std::vector<Copied> copied;
  for (int r = 0; r < layout->ranks; ++r) {
    const uint8_t* from = bytes(messages[r]);
    for (int s : layout->kept_by[r]) {
      if (!answers(s, layout->rank)) continue;
      const ExchangedShard& shard = layout->shards[s];
      const ExchangedTable& table = layout->tables[shard.table];
      int64_t size = element(table.dtype, true), stride = table.dim * size;
      int64_t first = begin(layout->rank, s), part = shard.width * size;
      uint8_t* to = bytes(out[shard.table]) + shard.column * size;
      const int64_t* at = row_at ? row_at + asked_at_[shard.table] + first : nullptr;
      if (!at) to += first * stride;
      copied.push_back({from, part, to, stride, part, count(layout->rank, s), nullptr, at});
      from += piece_bytes(layout->rank, s, true);
    }
  }
  copy_all(copied);
}

// -- rows, or their gradients, to the owners
// -------------------------------------------------------

MessageSizes Exchange::given_sizes(const std::vector<bool>& chosen, bool stored) const {
  return message_sizes(*layout, true, [&](int r, int s) {
    return chosen[layout->shards[s].table] ? piece_bytes(r, s, stored) : 0;
  });
}

void Exchange::write_given(const std::vector<bool>& chosen, bool stored,
                           const std::vector<GivenRows>& given, const Messages& messages) const {
  const ExchangeLayout& l = *layout;
  // For each id ordered for, which row is its own; -1: none. Empty: they are in order.
  std::vector<std::vector<int64_t>> row_of(l.tables.size());
  for (size_t t = 0; t < l.tables.size(); ++t) {
    const GivenRows& own = given[t];
    if (!chosen[t] || !own.rows || !own.slots) continue;
    int64_t n = asked(static_cast<int>(t)), i = 0;
    while (i < own.count && own.slots[i] - own.first == i) ++i;
    if (i == n && own.count == n) continue;
    row_of[t].assign(n, -1);
    for (i = 0; i < own.count; ++i) {
      int64_t position = own.slots[i] - own.first;
      if (position < 0 || position >= n || row_of[t][position] >= 0) {
        throw std::invalid_argument("table '" + l.tables[t].name + "': slot " +
                                    std::to_string(own.slots[i]) + " of a gradient of " +
                                    std::to_string(n) + " rows");
      }
      row_of[t][position] = i;
    }
  }
  std::vector<Copied> copied;
  struct Added {
    DType dtype;
    uint8_t* values;
    int64_t count;
  };
  std::vector<Added> added;
  for (int r = 0; r < l.ranks; ++r) {
    uint8_t* to = bytes(messages[r]);
    for (int s : l.kept_by[r]) {
      const ExchangedShard& shard = l.shards[s];
      if (!chosen[shard.table]) continue;
      const GivenRows& own = given[shard.table];
      const auto& rows = row_of[shard.table];
      DType dtype = l.tables[shard.table].dtype;
      int64_t size = element(dtype, stored), stride = l.tables[shard.table].dim * size;
      int64_t part = shard.width * size, n = count(l.rank, s), first = begin(l.rank, s);
      const uint8_t* from = own.rows ? bytes(own.rows) + shard.column * size : nullptr;
      const int64_t* row_at = rows.empty() ? nullptr : rows.data() + first;
      if (from && !row_at) from += first * stride;
      copied.push_back({from, stride, to, part, part, n, row_at});
      if (row_at && own.count < asked(shard.table)) added.push_back({dtype, to, n * shard.width});
      to += piece_bytes(l.rank, s, stored);
    }
  }
  copy_all(copied);
  for (const Added& rows : added) add_to_zeros(rows.dtype, rows.values, rows.count);
}

std::vector<Vectors> Exchange::given_places(const std::vector<bool>& chosen, bool stored,
                                            const Messages& messages) const {
  return piece_places(*layout, messages, [&](int r, int s) {
    return chosen[layout->shards[s].table] ? piece_bytes(r, s, stored) : 0;
  });
}

// -- rows that came
// --------------------------------------------------------------------------------

void FetchedRows::read(const Exchange& exchange, const int64_t* ordered, const Messages& messages) {
  exchange.read_rows(messages, room_for(exchange, ordered));
}

void FetchedRows::read(const Exchange& exchange, const int64_t* ordered,
                       const std::vector<PartOfRows>& parts) {
  std::vector<void*> out = room_for(exchange, ordered);
  for (const PartOfRows& part : parts) part.exchange.read_rows(part.messages, out, part.row_at);
}

std::vector<void*> FetchedRows::room_for(const Exchange& exchange, const int64_t* ordered) {
  std::vector<void*> out;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const ExchangedTable& spec = layout_->tables[t];
    int64_t n = exchange.asked(static_cast<int>(t));
    std::optional<int64_t> padding;
    if (spec.padding) {
      const int64_t* at = std::find(ordered, ordered + n, *spec.padding);
      if (at != ordered + n) padding = at - ordered;
    }
    ordered += n;
    // One that an earlier batch had is used again: fresh memory costs more than the rows.
    std::shared_ptr<Table>& table = tables_[t];
    if (!table || n > table->size() || table->size() > 8 * n + 64) {
      auto size = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n) + 1));
      table = std::make_shared<Table>(spec.name, size, spec.dim, spec.dtype,
                                      initial_spec(Initial::constant, 0, 0, 0, 0, 0));
    }
    table->set_padding(padding);
    out.push_back(table->weights());
  }
  return out;
}

std::shared_ptr<Batch> FetchedRows::batch(const Batch& given, const std::vector<int64_t>& counts,
                                          const int64_t* new_positions, int64_t* inverse) const {
  std::vector<FeatureInput> inputs;
  inputs.reserve(given.features.size());
  for (const FeatureBatch& feature : given.features) inputs.push_back(feature.input);
  for (size_t t = 0; t < given.parts.size(); ++t) {
    const TableBatch& part = given.parts[t];
    for (int64_t p = 0; p < part.count; ++p) inverse[p] = new_positions[inverse[p]];
    for (int f : part.features) {
      inputs[f].ids = inverse + given.features[f].base;
      inputs[f].id_bytes = 8;
    }
    new_positions += counts[t];
    inverse += part.count;
  }
  return std::make_shared<Batch>(tables_, std::move(inputs));
}

}  // namespace hotbed
