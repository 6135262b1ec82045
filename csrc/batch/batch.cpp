#include "batch/batch.hpp"

#include <algorithm>
#include <cstring>

#include "base/random.hpp"

namespace hotbed {

namespace {

// Fewer ids than this are resolved by the calling thread: waking the others takes longer.
constexpr int64_t kSerialPositions = 4096;

// Positions with equal keys, found by a small open-addressing table that stays in the cache.
class Grouping {
 public:
  // Keys equal to `skip` (where has_skip) are left out: their group is -1.
  void group(const int64_t* keys, int64_t n, bool has_skip, int64_t skip) {
    uint64_t room = 64;
    while (room < static_cast<uint64_t>(n) * 2) room *= 2;
    int shift = 64 - __builtin_ctzll(room);
    table_.resize(room);
    std::memset(table_.data(), 0xff, room * sizeof(int32_t));
    unique_.resize(n);
    counts_.resize(n + 1);
    groups_.resize(n);
    int32_t* table = table_.data();
    int64_t* unique = unique_.data();
    int32_t* counts = counts_.data();
    int32_t* groups = groups_.data();
    int32_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
      int64_t key = keys[i];
      if (has_skip && key == skip) {
        groups[i] = -1;
        continue;
      }
      uint64_t at = (static_cast<uint64_t>(key) * kGolden) >> shift;
      int32_t entry;
      while ((entry = table[at]) >= 0 && unique[entry] != key) at = (at + 1) & (room - 1);
      if (entry < 0) {
        entry = found++;
        table[at] = entry;
        unique[entry] = key;
        counts[entry] = 0;
      }
      ++counts[entry];
      groups[i] = entry;
    }
    size_ = found;
  }

  int64_t size() const { return size_; }
  int64_t* unique() { return unique_.data(); }
  const int32_t* groups() const { return groups_.data(); }

  // Hands the group of every position over, and copies the size of every group.
  void give(Buffer<int32_t>& groups, Buffer<int32_t>& counts) {
    groups = std::move(groups_);
    counts.resize(size_);
    std::copy_n(counts_.data(), size_, counts.data());
  }

 private:
  int64_t size_ = 0;
  Buffer<int32_t> table_;
  Buffer<int64_t> unique_;
  Buffer<int32_t> counts_;
  Buffer<int32_t> groups_;
};

bool plain(const FeatureInput& input) { return !input.offsets && input.fixed == 1; }

// Rows that are not stored, or not as they are to be read, go to scratch: their slots become -1 -
// k.
void read_scratch(const Table& table, const int64_t* ids, int64_t n, int64_t* slots,
                  Buffer<uint8_t>& scratch) {
  if (table.tiered()) {
    // Slots are not for those who only read: a row may leave them at any time.
    for (int64_t i = 0; i < n; ++i) slots[i] = -1 - i;
    scratch.resize((n + 1) * table.weight_plane().row_bytes());  // padding is the last
    if (table.catch_up) {
      table.catch_up->read(table, ids, n, scratch.data());
    } else {
      table.copy_rows(ids, n, scratch.data(), nullptr, nullptr);
    }
    return;
  }
  Buffer<int64_t> wanted(n);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] >= 0 && !table.catch_up) continue;
    wanted[count] = ids[i];
    slots[i] = -1 - count++;
  }
  scratch.resize(count * table.weight_plane().row_bytes());
  if (table.catch_up) {
    table.catch_up->read(table, wanted.data(), count, scratch.data());
  } else {
    table.first_values(wanted.data(), count, scratch.data());
  }
}

// The positions of a table that has several features, or bags of other than one id.
void locate(const std::vector<FeatureBatch>& features, TableBatch& part) {
  if (part.features.size() == 1 && plain(features[part.features[0]].input)) return;
  part.bag_of.resize(part.count);
  if (part.features.size() > 1) part.feature_of.resize(part.count);
  for (size_t f = 0; f < part.features.size(); ++f) {
    const FeatureBatch& feature = features[part.features[f]];
    const FeatureInput& input = feature.input;
    int32_t* bag_of = part.bag_of.data() + feature.base;
    for (int64_t bag = 0; bag < input.bags; ++bag) {
      int64_t begin = input.offsets ? input.offsets[bag] : bag * input.fixed;
      int64_t end = input.offsets ? input.offsets[bag + 1] : begin + input.fixed;
      for (int64_t p = begin; p < end; ++p) bag_of[p] = static_cast<int32_t>(bag);
    }
    if (part.features.size() > 1) {
      std::fill_n(part.feature_of.data() + feature.base, input.count, static_cast<uint16_t>(f));
    }
  }
}

}  // namespace

Batch::Batch(std::vector<std::shared_ptr<Table>> all_tables, std::vector<FeatureInput> inputs)
    : tables(std::move(all_tables)), parts(tables.size()) {
  for (size_t t = 0; t < tables.size(); ++t) parts[t].table = tables[t].get();
  features.resize(inputs.size());
  for (size_t f = 0; f < inputs.size(); ++f) {
    TableBatch& part = parts.at(inputs[f].table);
    features[f].input = inputs[f];
    features[f].base = part.count;
    part.features.push_back(static_cast<int>(f));
    part.count += inputs[f].count;
    positions += inputs[f].count;
    if (part.count > INT32_MAX || inputs[f].bags > INT32_MAX) {
      throw std::length_error("Table '" + part.table->name() + "': " + std::to_string(part.count) +
                              " ids in one batch; at most 2147483647 are possible");
    }
    if (part.features.size() > UINT16_MAX) {
      throw std::length_error("Table '" + part.table->name() +
                              "': " + std::to_string(part.features.size()) +
                              " features; at most 65535 can share a table. Join some into bags");
    }
  }
}

InputFault Batch::check() const {
  InputFault fault;
#pragma omp parallel for schedule(dynamic) if (positions > kSerialPositions)
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureInput& input = features[f].input;
    const Table& table = *parts[input.table].table;
    InputFault found;
    found.feature = static_cast<int>(f);
    if (input.offsets) {
      if (input.offsets[0] != 0) {
        found.kind = InputFault::offsets_start;
        found.value = input.offsets[0];
      }
      for (int64_t b = 0; b < input.bags && !found.kind; ++b) {
        if (input.offsets[b + 1] < input.offsets[b]) {
          found.kind = InputFault::offsets_falling;
          found.bag = b;
          found.value = input.offsets[b + 1];
          found.bound = input.offsets[b];
        }
      }
      if (!found.kind && input.offsets[input.bags] != input.count) {
        found.kind = InputFault::offsets_end;
        found.value = input.offsets[input.bags];
        found.bound = input.count;
      }
    }
    if (!found.kind && !table.dynamic()) {
      auto rows = static_cast<uint64_t>(table.size());
      auto id_at = [&](int64_t p) -> int64_t {
        return input.id_bytes == 4 ? static_cast<const int32_t*>(input.ids)[p]
                                   : static_cast<const int64_t*>(input.ids)[p];
      };
      uint64_t outside = 0;
      if (input.id_bytes == 8) {
        auto* ids = static_cast<const uint64_t*>(input.ids);
        for (int64_t p = 0; p < input.count; ++p) outside |= ids[p] >= rows;
      } else {
        for (int64_t p = 0; p < input.count; ++p) {
          outside |= static_cast<uint64_t>(id_at(p)) >= rows;
        }
      }
      if (outside) {
        int64_t p = 0;
        while (static_cast<uint64_t>(id_at(p)) < rows) ++p;
        found.kind = InputFault::id_range;
        found.value = id_at(p);
        found.bound = table.size();
        if (input.offsets) {
          found.bag = std::upper_bound(input.offsets, input.offsets + input.bags + 1, p) -
                      input.offsets - 1;
        } else {
          found.bag = p / input.fixed;
        }
      }
    }
    if (found.kind) {
#pragma omp critical(hotbed_batch_check)
      if (!fault.kind || found.feature < fault.feature) fault = found;
    }
  }
  return fault;
}

// From here on an unpooled id is a bag of its own.
void Batch::unpool_unpooled() {
  for (FeatureBatch& feature : features) {
    FeatureInput& input = feature.input;
    if (input.combiner != Combiner::none) continue;
    input.offsets = nullptr;
    input.fixed = 1;
    input.bags = input.count;
  }
}

// The ids of all positions of a table, as they stand or in `copy`.
const int64_t* Batch::ids_of(const TableBatch& part, Buffer<int64_t>& copy) const {
  const FeatureInput& first = features[part.features[0]].input;
  if (part.features.size() == 1 && first.id_bytes == 8) {
    return static_cast<const int64_t*>(first.ids);
  }
  copy.resize(part.count);
  for (int f : part.features) {
    const FeatureInput& input = features[f].input;
    int64_t* out = copy.data() + features[f].base;
    if (input.id_bytes == 8) {
      std::memcpy(out, input.ids, input.count * sizeof(int64_t));
    } else {
      auto* narrow = static_cast<const int32_t*>(input.ids);
      for (int64_t p = 0; p < input.count; ++p) out[p] = narrow[p];
    }
  }
  return copy.data();
}

namespace {

thread_local Grouping grouping_of_thread;
thread_local Buffer<int64_t> ids_of_thread;

// Every position gets the slot of its group. Padding of tiered tables is in no slot: where it is
// not pooled it is row `padding_row` of scratch.
void spread(const std::vector<FeatureBatch>& features, TableBatch& part, const int32_t* groups,
            const int64_t* slot_of, int64_t padding_row) {
  part.owned_slots.resize(part.count);
  int64_t* slots = part.owned_slots.data();
  int64_t padding = part.table->padding_slot();
  for (int64_t p = 0; p < part.count; ++p) {
    slots[p] = groups[p] < 0 ? padding : slot_of[groups[p]];
  }
  part.slots = slots;
  if (!part.table->tiered() || !part.table->initial().has_padding) return;
  for (int f : part.features) {
    const FeatureBatch& feature = features[f];
    if (feature.input.combiner != Combiner::none) continue;
    for (int64_t p = feature.base; p < feature.base + feature.input.count; ++p) {
      if (groups[p] < 0) slots[p] = -1 - padding_row;
    }
  }
}

void fill_padding(TableBatch& part, int64_t padding_row) {
  if (!part.table->tiered() || !part.table->initial().has_padding) return;
  int64_t bytes = part.table->weight_plane().row_bytes();
  if (!padding_row) part.scratch.resize(bytes);
  part.table->copy_padding(part.scratch.data() + padding_row * bytes);
}

}  // namespace

void Batch::resolve_part(TableBatch& part, bool insert, bool transpose) {
  Table& table = *part.table;
  const InitialSpec& initial = table.initial();
  if (!transpose && !table.dynamic() && !table.catch_up && !table.tiered()) {
    part.slots = ids_of(part, part.owned_slots);
    return;
  }
  const int64_t* ids = ids_of(part, ids_of_thread);
  Grouping& grouping = grouping_of_thread;
  grouping.group(ids, part.count, initial.has_padding, initial.padding_id);
  int64_t unique = grouping.size();
  part.unique_slots.resize(unique);
  int64_t* slot_of = part.unique_slots.data();
  bool reading = !insert || part.frozen;
  if (!reading) {
    part.added = table.find_or_insert(grouping.unique(), unique, slot_of);
  } else {
    table.find(grouping.unique(), unique, slot_of);
    read_scratch(table, grouping.unique(), unique, slot_of, part.scratch);
  }
  bool copied = ids == ids_of_thread.data();
  if (transpose && !reading && (table.dynamic() || copied)) {
    part.slots = nullptr;
  } else if (table.dynamic() || (reading && (table.catch_up || table.tiered()))) {
    spread(features, part, grouping.groups(), slot_of, unique);
    if (reading) fill_padding(part, unique);
  } else {
    if (copied) part.owned_slots = std::move(ids_of_thread);
    part.slots = ids;
  }
  part.unique = unique;
  if (transpose) {
    part.reading = reading;
    if (table.counts_uses() || reading) {
      part.unique_ids.resize(unique);
      std::copy_n(grouping.unique(), unique, part.unique_ids.data());
    }
    grouping.give(part.groups, part.counts);
    locate(features, part);
    part.grouped = true;
  }
}

// Whether resolve(true, ...) brings the rows of this part up.
bool Batch::grows(const TableBatch& part) const {
  return part.table->tiered() && !part.frozen && !part.features.empty();
}

// Does it for every table; returns an error of one of them.
template <class F>
std::exception_ptr Batch::in_parallel(F f) {
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic) if (positions > kSerialPositions)
  for (size_t t = 0; t < parts.size(); ++t) {
    try {
      f(parts[t]);
    } catch (...) {
#pragma omp critical(hotbed_batch_resolve)
      error = std::current_exception();
    }
  }
  return error;
}

// Throws TierError with what the new rows of all tables take, where a budget has no room for them.
void Batch::refuse_growth() {
  std::vector<BudgetShare::Growth> growths;
  Grouping& grouping = grouping_of_thread;
  for (TableBatch& part : parts) {
    Table& table = *part.table;
    if (part.features.empty() || part.frozen || !table.dynamic() || !table.has_rows()) continue;
    const InitialSpec& of = table.initial();
    const int64_t* ids = ids_of(part, ids_of_thread);
    grouping.group(ids, part.count, of.has_padding, of.padding_id);
    std::vector<int64_t> slots(static_cast<size_t>(grouping.size()));
    table.find(grouping.unique(), grouping.size(), slots.data());
    growths.push_back(table.growth_with_rows(std::ranges::count(slots, -1)));
  }
  BudgetShare::check(growths);
}

void Batch::resolve(bool insert, bool transpose) {
  for (const TableBatch& part : parts) {
    if (!part.table->released()) continue;
    throw std::logic_error("the rows of table '" + part.table->name() + "' lie elsewhere");
  }
  unpool_unpooled();
  bool brings_up = false;
  for (const TableBatch& part : parts) brings_up = brings_up || (insert && grows(part));
  if (brings_up && !claim_) group();
  std::exception_ptr error = in_parallel([&](TableBatch& part) {
    if (part.features.empty() || (insert && grows(part))) return;
    resolve_part(part, insert, transpose);
  });
  if (!error && brings_up) {
    try {
      consume();
    } catch (...) {
      error = std::current_exception();
    }
  }
  // Only once no table refuses the batch: a row that is caught up in two parts may end with other
  // bits. consume() does so for those of tiers.
  bool catches_up = false;
  for (const TableBatch& part : parts) catches_up = catches_up || part.table->catch_up;
  if (!error && insert && catches_up) {
    error = in_parallel([](TableBatch& part) {
      Table& table = *part.table;
      if (part.features.empty() || part.frozen || table.tiered() || !table.catch_up) return;
      table.catch_up->write(table, part.unique_slots.data(), part.unique);
    });
  }
  if (!error) {
    if (insert) count_trained();
    return;
  }
  for (TableBatch& part : parts) {
    part.table->forget_last(part.added);
    part.added = 0;
  }
  try {
    std::rethrow_exception(error);
  } catch (const TierError&) {
    if (insert) refuse_growth();
    throw;
  }
}

// Of rows in memory; a claim counts those of tiers.
void Batch::count_trained() {
  for (TableBatch& part : parts) {
    if (!part.grouped || part.reading || part.table->tiered()) continue;
    Table& table = *part.table;
    table.trained.batches.fetch_add(1, std::memory_order_relaxed);
    table.trained.rows.fetch_add(part.unique, std::memory_order_relaxed);
    table.trained.created.fetch_add(part.added, std::memory_order_relaxed);
    if (table.counts_uses()) {
      table.uses.add(part.unique_ids.data(), part.counts.data(), part.unique);
    }
  }
}

void Batch::group() {
  unpool_unpooled();
  std::vector<TableBatch*> wanted;
  for (TableBatch& part : parts) {
    if (grows(part)) wanted.push_back(&part);
  }
#pragma omp parallel for schedule(dynamic) if (positions > kSerialPositions)
  for (size_t w = 0; w < wanted.size(); ++w) {
    TableBatch& part = *wanted[w];
    const InitialSpec& initial = part.table->initial();
    Grouping& grouping = grouping_of_thread;
    const int64_t* ids = ids_of(part, ids_of_thread);
    grouping.group(ids, part.count, initial.has_padding, initial.padding_id);
    part.unique = grouping.size();
    part.unique_ids.resize(part.unique);
    std::copy_n(grouping.unique(), part.unique, part.unique_ids.data());
    grouping.give(part.groups, part.counts);
    locate(features, part);
    part.grouped = true;
  }
  claim_ = std::make_shared<Claim>(wanted);
}

namespace {

int64_t id_at(const FeatureInput& input, int64_t p) {
  return input.id_bytes == 4 ? static_cast<const int32_t*>(input.ids)[p]
                             : static_cast<const int64_t*>(input.ids)[p];
}

// Whether a feature of a grouped table has the ids at its positions that were grouped.
template <class Id>
bool as_grouped(const TableBatch& part, const FeatureBatch& feature, const Id* ids) {
  const InitialSpec& initial = part.table->initial();
  const int32_t* groups = part.groups.data() + feature.base;
  for (int64_t p = 0; p < feature.input.count; ++p) {
    int64_t then = groups[p] < 0 ? initial.padding_id : part.unique_ids[groups[p]];
    if (then != static_cast<int64_t>(ids[p])) return false;
  }
  return true;
}

bool same_ids(const TableBatch& part, const FeatureBatch& feature, const FeatureInput& given) {
  if (part.grouped) {
    return given.id_bytes == 4 ? as_grouped(part, feature, static_cast<const int32_t*>(given.ids))
                               : as_grouped(part, feature, static_cast<const int64_t*>(given.ids));
  }
  for (int64_t p = 0; p < given.count; ++p) {
    if (id_at(given, p) != id_at(feature.input, p)) return false;
  }
  return true;
}

// Whether offsets that may be anything name the bags in which the positions were.
bool same_bags(const TableBatch& part, const FeatureBatch& feature, const int64_t* offsets) {
  if (offsets[0] != 0) return false;
  const int32_t* bag_of = part.bag_of.data() + feature.base;
  int64_t p = 0;
  for (int64_t bag = 0; bag < feature.input.bags; ++bag) {
    if (offsets[bag + 1] < p || offsets[bag + 1] > feature.input.count) return false;
    for (; p < offsets[bag + 1]; ++p) {
      if (bag_of[p] != bag) return false;
    }
  }
  return p == feature.input.count;
}

bool rise_from_0_to(int64_t end, const int64_t* offsets, int64_t bags) {
  return offsets[0] == 0 && std::is_sorted(offsets, offsets + bags + 1) && offsets[bags] == end;
}

}  // namespace

int64_t Batch::first_difference(const Batch& now) const {
  if (now.features.size() != features.size()) return 0;
  auto count = static_cast<int64_t>(features.size());
  int64_t first = count;
#pragma omp parallel for schedule(dynamic) reduction(min : first) if (positions > kSerialPositions)
  for (int64_t f = 0; f < count; ++f) {
    const FeatureBatch& feature = features[f];
    const FeatureInput &then = feature.input, &given = now.features[f].input;
    const TableBatch& part = parts[then.table];
    bool unpooled = then.combiner == Combiner::none;  // its bags are ids by now
    bool same = given.table == then.table && given.count == then.count &&
                (unpooled || (given.bags == then.bags && given.fixed == then.fixed &&
                              !given.offsets == !then.offsets));
    if (same && unpooled && given.offsets) {
      same = rise_from_0_to(given.count, given.offsets, given.bags);
    }
    if (same && then.offsets) {
      same = part.grouped ? same_bags(part, feature, given.offsets)
                          : std::equal(given.offsets, given.offsets + given.bags + 1, then.offsets);
    }
    if (same) same = same_ids(part, feature, given);
    if (!same) first = std::min(first, f);
  }
  return first < count ? first : -1;
}

void Batch::use_weights_of(const Batch& now) {
  for (size_t f = 0; f < features.size(); ++f) {
    features[f].input.weights = now.features[f].input.weights;
  }
}

void Batch::announce() { claim_->announce(); }

bool Batch::admit() { return claim_->admit(); }

void Batch::consume() {
  bool ahead = claim_->admitted();
  if (!ahead) claim_->admit_now();
  claim_->consume(ahead);
  bool caught_up = false;
  for (TableBatch& part : parts) {
    if (!grows(part)) continue;
    fill_padding(part, 0);
    if (!part.table->catch_up) continue;
    part.table->catch_up->write(*part.table, part.unique_slots.data(), part.unique);
    caught_up = true;
  }
  if (caught_up) claim_->mark_dirty();
}

bool Batch::find_slots() {
  std::vector<TableBatch*> without_slots;
  for (TableBatch& part : parts) {
    if (!part.reading || part.has_slots || part.frozen) continue;
    if (part.table->tiered()) {
      without_slots.push_back(&part);
    } else {  // what was read from scratch may have a slot all the same
      part.table->find(part.unique_ids.data(), part.unique, part.unique_slots.data());
      part.has_slots = true;
    }
  }
  if (!without_slots.empty()) {
    auto claim = std::make_shared<Claim>(without_slots);
    claim->admit_now();
    claim->leave_out_new();
    claim_ = std::move(claim);
    for (TableBatch* part : without_slots) part->has_slots = true;
  }
  bool all = true;
  for (TableBatch& part : parts) {
    if (!part.reading) continue;
    for (int64_t u = 0; u < part.unique; ++u) {
      if (part.unique_slots[u] >= 0) continue;
      part.unique_slots[u] = -1;
      all = false;
    }
  }
  return all;
}

void Batch::keep_inputs() {
  for (TableBatch& part : parts) {
    if (!part.slots || part.slots == part.owned_slots.data()) continue;
    Buffer<int64_t> slots(part.count);
    std::memcpy(slots.data(), part.slots, part.count * sizeof(int64_t));
    part.owned_slots = std::move(slots);
    part.slots = part.owned_slots.data();
  }
  for (FeatureBatch& feature : features) {
    FeatureInput& input = feature.input;
    if (!input.offsets) continue;
    feature.owned_offsets.resize(input.bags + 1);
    std::memcpy(feature.owned_offsets.data(), input.offsets, (input.bags + 1) * sizeof(int64_t));
    input.offsets = feature.owned_offsets.data();
  }
}

}  // namespace hotbed
