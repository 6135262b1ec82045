#include "storage/storage.hpp"

#include <algorithm>
#include <numeric>

#include "base/integers.hpp"
#include "log/log_sizes.hpp"
#include "table/record_stream.hpp"

namespace hotbed {

namespace {

// What moving rows takes beside them: records under way.
constexpr uint64_t kStagingShare = RowSpace::kStagingShare;  // of the budget, within limits
constexpr uint64_t kLeastStaging = 4096;
constexpr uint64_t kMostStaging = 96 << 20;

// What a residency's index takes for each row that it holds, beyond its fixed bytes.
uint64_t index_bytes_a_slot(const std::vector<int64_t>& table_rows) {
  constexpr uint64_t kKeyIndex = 24;
  bool keyed = std::any_of(table_rows.begin(), table_rows.end(), [](int64_t n) { return n < 0; });
  return keyed ? kKeyIndex : 0;
}

// Bookkeeping of a residency; of its memory only whole huge pages, so that a small one counts by
// its slots.
uint64_t bookkeeping_bytes(const std::vector<int64_t>& table_rows, int64_t capacity) {
  constexpr uint64_t kSlot = 28;  // metadata, id and ghost
  constexpr uint64_t kScores = FrequencyClock::kScores * sizeof(uint32_t);
  uint64_t memory = Residency::fixed_bytes(table_rows, capacity) - kScores;
  uint64_t whole = memory / Mapping::kHugePage * Mapping::kHugePage + kScores;
  auto slots = static_cast<uint64_t>(capacity);
  return std::max(whole, slots * kSlot) + slots * index_bytes_a_slot(table_rows);
}

// Planes and bookkeeping of so many rows.
uint64_t bytes_of(const TableGroup& group, uint64_t row_bytes, int64_t rows) {
  return static_cast<uint64_t>(rows) * row_bytes + bookkeeping_bytes(group.rows, rows);
}

// The largest number of rows that take at most `bytes`.
int64_t rows_within(const TableGroup& group, uint64_t row_bytes, uint64_t bytes) {
  int64_t low = 0;
  int64_t high = std::min<int64_t>(group.most_rows(), static_cast<int64_t>(bytes / row_bytes));
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    if (bytes_of(group, row_bytes, middle) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// By which a batch lets bookkeeping grow: a part of the budget, within a limit.
constexpr uint64_t kGrowthShare = 32;
constexpr uint64_t kMostOfABatch = 2u << 20;
constexpr uint64_t kDoubling = 128 << 10, kDoublingShare = 12;
constexpr uint64_t kWorthwhile = 256;  // growth by such a part of the budget narrows slots

// What grows is seen a batch late, and where it is worth the while; the indices of small dynamic
// tables double at once.
uint64_t growth_unseen(const std::vector<TableGroup>& groups, uint64_t budget) {
  uint64_t keyed = 0;
  for (const TableGroup& group : groups) keyed += std::ranges::count(group.rows, -1);
  uint64_t doubling = std::min(budget / kDoublingShare, keyed * kDoubling);
  return std::max(std::min(budget / kGrowthShare, kMostOfABatch), budget / kWorthwhile) + doubling;
}

uint64_t staging(uint64_t budget) {
  return std::clamp(budget / kStagingShare, kLeastStaging, kMostStaging);
}

// What bookkeeping comes to take beyond that of slots, of which there are so many: counts of uses,
// indices with few keys, keys of static tables that have no array, scratch space.
uint64_t more_to_come(const std::vector<TableGroup>& groups, uint64_t slots, uint64_t budget) {
  constexpr uint64_t kTable = 32 << 10, kLeastKeys = 24 << 10, kLeast = 48 << 10, kSlot = 64;
  uint64_t tables = 0;
  for (const TableGroup& group : groups) tables += group.tables.size();
  return tables * (kTable + kLeastKeys) + slots * kSlot + budget / 32 + kLeast;
}

// How many rows each group gets of a budget of which `taken` bytes are gone: one at least, or none
// gets any. Beyond that tables get equally many, as a batch has about as many of every table, and
// what the small ones leave the others share.
template <class RowBytes>
std::vector<int64_t> divide(const std::vector<TableGroup>& groups, RowBytes row_bytes,
                            uint64_t budget, uint64_t taken) {
  std::vector<int64_t> rows(groups.size());
  taken += staging(budget);
  if (taken >= budget) return rows;
  uint64_t left = budget - taken;
  std::vector<uint64_t> least(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    least[g] = bytes_of(groups[g], row_bytes(groups[g]), 1);
    if (least[g] > left) return rows;
    left -= least[g];
  }
  std::vector<size_t> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  auto rows_a_table = [&](size_t g) {
    return groups[g].most_rows() / static_cast<int64_t>(groups[g].tables.size());
  };
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return rows_a_table(a) < rows_a_table(b); });
  auto weight = [&](size_t g) {  // of a row in each of its tables
    constexpr int64_t kMany = 1 << 20;
    uint64_t many = bytes_of(groups[g], row_bytes(groups[g]), kMany) - least[g];
    return static_cast<double>(many * groups[g].tables.size());
  };
  double weight_left = 0;
  for (size_t g : order) weight_left += weight(g);
  for (size_t g : order) {
    auto share = std::min(left, static_cast<uint64_t>(static_cast<double>(left) *
                                                      std::min(1.0, weight(g) / weight_left)));
    rows[g] = rows_within(groups[g], row_bytes(groups[g]), least[g] + share);
    left -= bytes_of(groups[g], row_bytes(groups[g]), rows[g]) - least[g];
    weight_left -= weight(g);
  }
  return rows;
}

// The least budget of which every group gets the rows that it wants, or all it may have; `taken`
// tells what is gone of a budget.
template <class RowBytes, class Taken>
uint64_t least_budget(const std::vector<TableGroup>& groups, RowBytes row_bytes, Taken taken,
                      const std::vector<int64_t>& wanted) {
  auto suffices = [&](uint64_t budget) {
    std::vector<int64_t> rows = divide(groups, row_bytes, budget, taken(budget));
    for (size_t g = 0; g < groups.size(); ++g) {
      if (rows[g] < std::min(wanted[g], groups[g].most_rows())) return false;
    }
    return true;
  };
  uint64_t low = 0, high = kLeastStaging;  // the former does not suffice
  while (!suffices(high)) {
    low = high;
    high *= 2;
  }
  while (low + 1 < high) {
    uint64_t middle = low + (high - low) / 2;
    (suffices(middle) ? high : low) = middle;
  }
  return high;
}

// What a budget is spent on of which the groups want so many rows.
template <class RowBytes>
BudgetParts parts_of(uint64_t budget, const std::vector<TableGroup>& groups, RowBytes row_bytes,
                     const std::vector<int64_t>& wanted, BudgetParts parts) {
  for (size_t g = 0; g < groups.size(); ++g) {
    int64_t rows = std::min(wanted[g], groups[g].most_rows());
    uint64_t bytes = static_cast<uint64_t>(rows) * row_bytes(groups[g]);
    parts.rows += bytes;
    parts.bookkeeping += bytes_of(groups[g], row_bytes(groups[g]), rows) - bytes;
  }
  parts.moving = staging(budget);
  parts.other_rows = budget - std::min(budget, parts.total());
  return parts;
}

uint64_t slot_bytes(const TableGroup& group) { return RowSpace::slot_bytes(group.layout); }
uint64_t record_bytes(const TableGroup& group) {
  return static_cast<uint64_t>(group.layout.bytes());
}

std::vector<TableGroup> group_by_layout(const std::vector<std::shared_ptr<Table>>& tables) {
  std::vector<TableGroup> groups;
  for (const auto& table : tables) {
    RecordLayout layout = layout_of(*table);
    auto at = std::find_if(groups.begin(), groups.end(), [&](const TableGroup& group) {
      return group.layout == layout && group.tables.size() < Residency::kMostTables;
    });
    if (at == groups.end()) at = groups.insert(at, TableGroup{layout, {}, {}});
    at->tables.push_back(table.get());
    at->rows.push_back(table->dynamic() ? -1 : table->size());
  }
  return groups;
}

// Weights stay; so does the rest if it means the same (`whole`), else it is as it would start.
void move_rows(const std::shared_ptr<RowSpace>& from, int32_t old_number, RowSpace& to,
               int32_t number, bool whole) {
  const RecordLayout& layout = from->layout();
  std::vector<int32_t> numbers{old_number};
  RecordsByTable stream(layout, from, from->scan(numbers), rows_at_once(8192, layout.bytes()));
  while (RecordParts* rows = stream.next(old_number)) {
    std::vector<void*> states = rows->states_at();
    to.write(number, rows->ids.data(), rows->count, rows->weights.data(),
             whole ? states.data() : nullptr, whole ? rows->last.data() : nullptr);
  }
}

void add(TierTraffic& all, TierTraffic one) {
  all.rows_read += one.rows_read;
  all.rows_written += one.rows_written;
}

}  // namespace

int64_t TableGroup::most_rows() const {
  constexpr int64_t kMost = KeyIndex::kSlotLimit / 2;
  int64_t total = 0;
  for (int64_t n : rows) {
    if (n < 0 || n > kMost - total) return kMost;
    total += n;
  }
  return std::max<int64_t>(total, 1);  // a part of a table may have no row
}

BudgetTooSmall::BudgetTooSmall(bool of_host, const BudgetParts& parts, uint64_t budget_bytes)
    : std::runtime_error("needs at least " + std::to_string(parts.total()) +
                         " bytes, and the budget is " + std::to_string(budget_bytes)),
      host(of_host),
      needed(parts) {}

Allowance::Allowance(std::vector<TableGroup> groups, uint64_t (*row_bytes)(const TableGroup&),
                     uint64_t budget, const std::vector<std::shared_ptr<Tier>>& lowest)
    : groups_(std::move(groups)), row_bytes_(row_bytes), budget_(budget) {
  for (const auto& tier : lowest) {
    if (tier) lowest_.push_back(tier);
  }
  more_.resize(groups_.size());
  seen_ = index_bytes();
  rows_ = divide(groups_, row_bytes_, budget_, beside_rows(budget_) + seen_);
}

// Of the lowest tiers, within such a budget.
uint64_t Allowance::buffers(uint64_t budget) const {
  uint64_t bytes = 0;
  for (const auto& tier : lowest_) bytes += tier->most_bytes_beside_index(budget);
  return bytes;
}

uint64_t Allowance::beside_rows(uint64_t budget) const {
  return buffers(budget) + (lowest_.empty() ? 0 : growth_unseen(groups_, budget));
}

uint64_t Allowance::index_bytes() const {
  uint64_t bytes = 0;
  for (const auto& tier : lowest_) bytes += tier->index_bytes();
  return bytes;
}

int64_t Allowance::rows(size_t group, uint64_t bookkeeping) {
  uint64_t index = index_bytes();
  std::lock_guard lock(mutex_);
  uint64_t reckoned = bookkeeping_bytes(groups_[group].rows, rows_[group]);
  more_[group] = std::max(more_[group], bookkeeping - std::min(bookkeeping, reckoned));
  uint64_t bytes = index + more();
  // Not for every page that an index grows by.
  if (bytes > seen_ + budget_ / kWorthwhile) {
    seen_ = bytes;
    std::vector<int64_t> now = divide(groups_, row_bytes_, budget_, beside_rows(budget_) + bytes);
    for (size_t g = 0; g < now.size(); ++g) rows_[g] = std::min(rows_[g], now[g]);
  }
  return rows_[group];
}

// Ids that look-ahead has announced are part of it, and shall not take the rows' place.
uint64_t Allowance::more() const {
  return std::min(std::accumulate(more_.begin(), more_.end(), uint64_t{0}), budget_ / 2);
}

// With such an index; `stream`: with what a stream of batches comes to take that is not taken yet.
BudgetParts Allowance::least_with(uint64_t index, const std::vector<int64_t>& wanted,
                                  bool stream) const {
  BudgetParts parts;
  parts.index = index;
  uint64_t more_by_now, slots = 0;
  {
    std::lock_guard lock(mutex_);
    more_by_now = more();
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    slots += static_cast<uint64_t>(std::min(wanted[g], groups_[g].most_rows()));
  }
  auto announced = [&](uint64_t budget) {
    uint64_t bytes = more_by_now;
    if (stream) bytes = std::max(bytes, more_to_come(groups_, slots, budget));
    return bytes + (lowest_.empty() ? 0 : growth_unseen(groups_, budget));
  };
  uint64_t budget = hotbed::least_budget(
      groups_, row_bytes_, [&](uint64_t b) { return buffers(b) + index + announced(b); }, wanted);
  parts.announced = announced(budget);
  parts.buffers = buffers(budget);
  return parts_of(budget, groups_, row_bytes_, wanted, parts);
}

BudgetParts Allowance::least_budget(const std::vector<int64_t>& wanted) const {
  return least_with(index_bytes(), wanted, false);
}

BudgetParts Allowance::roomy_budget(const std::vector<int64_t>& wanted) const {
  BudgetParts least = least_budget(wanted);
  uint64_t index = index_bytes(), fixed = 0;
  bool grows = false;
  for (const TableGroup& group : groups_) {
    for (int64_t rows : group.rows) {
      if (rows < 0) grows = true;
      if (rows > 0) fixed += static_cast<uint64_t>(rows) * sizeof(uint32_t);
    }
  }
  if (lowest_.empty()) return least;
  if (!grows) return least_with(index, wanted, true);
  fixed = std::min(fixed, index);
  uint64_t room = std::max(2 * (index - fixed), least.total() - index);
  return least_with(fixed + room, wanted, true);
}

BudgetParts required_budget(const std::vector<std::shared_ptr<Table>>& tables,
                            const std::vector<int64_t>& rows, int64_t batches, bool ssd) {
  constexpr uint64_t kAnnouncedId = 72;    // its copy, next use, key, and place until it has a slot
  constexpr uint64_t kAnnouncedShare = 5;  // of the budget, that they may come to
  constexpr uint64_t kKey = 32;            // of an index that has just grown
  constexpr uint64_t kScratch = 128;       // of a row of a batch
  constexpr uint64_t kLeastKeys = 24 << 10;
  std::vector<TableGroup> groups = group_by_layout(tables);
  std::vector<int64_t> wanted(groups.size(), 0), record_bytes;
  BudgetParts parts;
  uint64_t slots = 0, of_batch = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    record_bytes.push_back(groups[g].layout.bytes());
    for (size_t t = 0; t < groups[g].tables.size(); ++t) {
      auto at = std::find_if(tables.begin(), tables.end(),
                             [&](const auto& table) { return table.get() == groups[g].tables[t]; });
      int64_t of_table = rows[static_cast<size_t>(at - tables.begin())], most = groups[g].rows[t];
      int64_t held = most < 0 ? of_table * batches : std::min(of_table * batches, most);
      of_batch += static_cast<uint64_t>(of_table);
      wanted[g] += held;
      if (most >= 0) parts.bookkeeping += static_cast<uint64_t>(held) * kKey;
      if (!ssd) continue;
      parts.index += most < 0 ? kLeastKeys + static_cast<uint64_t>((*at)->size() + held) * kKey
                              : static_cast<uint64_t>(most) * sizeof(uint32_t);
    }
    wanted[g] = std::max<int64_t>(1, wanted[g]);
    slots += static_cast<uint64_t>(wanted[g]);
  }
  auto buffers = [&](uint64_t budget) { return ssd ? LogSizes(budget, record_bytes).bytes : 0; };
  auto announced = [&](uint64_t budget) {
    uint64_t bytes = more_to_come(groups, slots, budget) + of_batch * kScratch;
    if (ssd) bytes += growth_unseen(groups, budget);
    if (batches == 1) return bytes;
    uint64_t least = of_batch * static_cast<uint64_t>(batches) * kAnnouncedId;
    return bytes + std::max(least, budget / kAnnouncedShare);
  };
  uint64_t fixed = parts.index + parts.bookkeeping;
  uint64_t budget = least_budget(
      groups, slot_bytes, [&](uint64_t b) { return fixed + buffers(b) + announced(b); }, wanted);
  parts.buffers = buffers(budget);
  parts.announced = announced(budget);
  return parts_of(budget, groups, slot_bytes, wanted, parts);
}

Storage::Storage(StorageBudgets budgets, MakeLowest make_lowest)
    : budgets_(budgets), make_lowest_(std::move(make_lowest)) {}

void Storage::lay_out(const std::vector<std::shared_ptr<Table>>& tables, bool again) {
  bool settled = !again && std::none_of(tables.begin(), tables.end(),
                                        [](const auto& table) { return table->unallocated(); });
  if (settled) return;
  std::vector<TableGroup> groups = group_by_layout(tables);
  // The lowest tiers first: their indices lie in memory, the host's where there is one.
  release_empty(tables);
  std::vector<RecordGroup> stores;
  for (const TableGroup& group : groups) stores.push_back({group.layout.bytes(), group.tables});
  std::vector<std::shared_ptr<Tier>> below = make_lowest_(stores);
  const std::vector<std::shared_ptr<Tier>> lowest = below, none;
  auto share = [&](auto row_bytes, uint64_t budget, const auto& tiers, bool of_host) {
    auto allowance = std::make_shared<Allowance>(groups, row_bytes, budget, tiers);
    if (!allowance->rows(0)) {
      std::vector<int64_t> one_each(groups.size(), 1);
      throw BudgetTooSmall(of_host, allowance->least_budget(one_each), budget);
    }
    return allowance;
  };
  auto of_compute = share(slot_bytes, budgets_.compute, budgets_.host ? none : lowest, false);
  std::vector<std::shared_ptr<HostTier>> hosts;
  if (budgets_.host) {
    auto of_host = share(record_bytes, budgets_.host, lowest, true);
    for (size_t g = 0; g < groups.size(); ++g) {
      hosts.push_back(std::make_shared<HostTier>(groups[g].layout.bytes(), groups[g].rows,
                                                 of_host->rows(g), below[g]));
      if (below[g]) hosts.back()->allow([of_host, g](uint64_t b) { return of_host->rows(g, b); });
      below[g] = hosts.back();
    }
  }
  std::vector<std::shared_ptr<RowSpace>> spaces;
  for (size_t g = 0; g < groups.size(); ++g) {
    std::shared_ptr<RowPlanes> planes;
    if (make_planes_) planes = make_planes_(groups[g].layout, of_compute->rows(g));
    std::vector<const SpaceTable*> members(groups[g].tables.begin(), groups[g].tables.end());
    spaces.push_back(std::make_shared<RowSpace>(groups[g].layout, std::move(members),
                                                of_compute->rows(g), below[g], std::move(planes)));
    if (!budgets_.host) {
      spaces.back()->allow([of_compute, g](uint64_t b) { return of_compute->rows(g, b); });
    }
  }
  // Rows first: if one of them finds no room, tables stay where they are.
  auto for_tables = [&](auto call) {
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t t = 0; t < groups[g].tables.size(); ++t) {
        call(*groups[g].tables[t], spaces[g], static_cast<int32_t>(t));
      }
    }
  };
  for_tables([](Table& table, const std::shared_ptr<RowSpace>& space, int32_t number) {
    if (!table.space()) return;
    move_rows(table.space(), table.number(), *space, number, !table.unallocated());
  });
  for_tables([](Table& table, const std::shared_ptr<RowSpace>& space, int32_t number) {
    table.live_in(space, number);
  });
  groups_ = std::move(groups);
  allowance_ = std::move(of_compute);
  spaces_ = std::move(spaces);
  hosts_ = std::move(hosts);
  lowest_ = lowest;
}

// By group.
std::vector<int64_t> Storage::wanted_by(const std::vector<OverBudget::Need>& needs) const {
  std::vector<int64_t> wanted(groups_.size(), 1);
  for (const OverBudget::Need& need : needs) {
    for (size_t s = 0; s < spaces_.size(); ++s) {
      if (spaces_[s].get() == need.space) wanted[s] = std::max<int64_t>(1, need.slots);
    }
  }
  return wanted;
}

// More than there is, where there was too little.
BudgetParts Storage::beyond(BudgetParts parts) const {
  uint64_t total = parts.total();
  if (total <= budgets_.compute) parts.announced += budgets_.compute + 1 - total;
  return parts;
}

BudgetParts Storage::compute_budget_for(const std::vector<OverBudget::Need>& needs) const {
  return beyond(allowance_->least_budget(wanted_by(needs)));
}

BudgetParts Storage::compute_budget_for_stream(std::vector<OverBudget::Need> needs,
                                               int64_t ahead) const {
  for (const auto& space : spaces_) {
    int64_t slots = space->slots_for_stream(ahead);
    auto need = std::find_if(needs.begin(), needs.end(),
                             [&](const OverBudget::Need& one) { return one.space == space.get(); });
    if (need == needs.end()) need = needs.insert(need, {space.get(), 1});
    need->slots = std::max(need->slots, slots);
  }
  return beyond(allowance_->roomy_budget(wanted_by(needs)));
}

// Lets the tiers of the last layout go if no row is in them.
void Storage::release_empty(const std::vector<std::shared_ptr<Table>>& tables) {
  for (const auto& table : tables) {
    if (table->space() && table->space()->stores_any(table->number())) return;
  }
  for (const auto& table : tables) table->leave();
  spaces_.clear();
  hosts_.clear();
  lowest_.clear();
  allowance_.reset();
}

void Storage::flush() {
  for (const auto& space : spaces_) space->flush();
  for (const auto& host : hosts_) host->flush();
  for (const auto& tier : lowest_) {
    if (tier) tier->sync();
  }
}

bool Storage::link(const std::string& folder) {
  if (lowest_.empty() || !lowest_[0]) return false;
  flush();
  return lowest_[0]->link(folder);
}

bool Storage::adopt(const std::string& folder) {
  if (!hosts_.empty() || lowest_.empty() || !lowest_[0]) return false;
  for (size_t g = 0; g < spaces_.size(); ++g) {
    for (size_t t = 0; t < groups_[g].tables.size(); ++t) {
      spaces_[g]->erase_all(static_cast<int32_t>(t));
    }
    if (!spaces_[g]->is_empty()) return false;
  }
  if (!lowest_[0]->adopt(folder)) return false;
  for (const auto& space : spaces_) space->note_rows_below();
  return true;
}

size_t Storage::store_of(const Table& table) const {
  auto at = std::find(spaces_.begin(), spaces_.end(), table.space());
  if (at == spaces_.end()) throw std::invalid_argument("the table lies elsewhere");
  return static_cast<size_t>(at - spaces_.begin());
}

int64_t Storage::rows_below(const Table& table) const {
  const auto& tier = lowest_[store_of(table)];
  return tier ? tier->rows(table.number()) : 0;
}

TierTraffic Storage::host_traffic() const {
  TierTraffic all;
  for (const auto& host : hosts_) add(all, host->own_traffic());
  return all;
}

TierTraffic Storage::lowest_traffic() const {
  TierTraffic all;
  for (const auto& tier : lowest_) {
    if (tier) add(all, tier->traffic());
  }
  return all;
}

uint64_t Storage::memory_bytes() const {
  uint64_t total = 0;
  for (const auto& space : spaces_) total += space->memory_bytes();
  return total;
}

uint64_t Storage::memory_bytes(const Table& table) const {
  double own = 0, all = 0, tables = 0;
  bool known = false;
  for (const TableGroup& group : groups_) {
    auto record_bytes = static_cast<double>(group.layout.bytes());
    for (const Table* one : group.tables) {
      double bytes = static_cast<double>(one->size()) * record_bytes;
      all += bytes;
      ++tables;
      if (one != &table) continue;
      own = bytes;
      known = true;
    }
  }
  if (!known) return 0;
  double share = all > 0 ? own / all : 1 / tables;
  return static_cast<uint64_t>(static_cast<double>(memory_bytes()) * share);
}

}  // namespace hotbed
