#include "storage.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hotbed {

namespace {

// What moving rows takes beside them: records under way, ids of announced batches.
constexpr uint64_t kStagingShare = 16;  // a sixteenth of the budget, within limits
constexpr uint64_t kLeastStaging = 4096;
constexpr uint64_t kMostStaging = 96 << 20;

// What a residency's index takes for each row that it holds, beyond its fixed bytes.
uint64_t index_bytes_a_slot(const std::vector<int64_t>& table_rows) {
  constexpr uint64_t kKeyIndex = 24;
  bool keyed = std::any_of(table_rows.begin(), table_rows.end(), [](int64_t n) { return n < 0; });
  return keyed ? kKeyIndex : 0;
}

// Bookkeeping of a residency, without what only rounds its memory up to whole pages.
uint64_t bookkeeping_bytes(const std::vector<int64_t>& table_rows, int64_t capacity) {
  constexpr uint64_t kSlot = 28;  // metadata, id and ghost
  uint64_t fixed = Residency::fixed_bytes(table_rows, capacity);
  uint64_t page = Mapping::kGrain;
  uint64_t exact = fixed > page ? fixed - page : 0;
  auto slots = static_cast<uint64_t>(capacity);
  return std::max(exact, slots * kSlot) + slots * index_bytes_a_slot(table_rows);
}

struct Group {
  RecordLayout layout;
  std::vector<Table*> tables;
  std::vector<int64_t> rows() const {
    std::vector<int64_t> all;
    for (const Table* table : tables) all.push_back(table->dynamic() ? -1 : table->size());
    return all;
  }
  // Rows that there may be at most; dynamic tables have no bound.
  int64_t most_rows() const {
    int64_t total = 0;
    for (const Table* table : tables) {
      if (table->dynamic()) return std::numeric_limits<int64_t>::max() / 4096;
      total += table->size();
    }
    return total;
  }
};

// The largest capacity whose planes and bookkeeping take at most `bytes`.
int64_t capacity_within(const Group& group, uint64_t slot_bytes, uint64_t bytes) {
  auto takes = [&](int64_t capacity) {
    uint64_t planes = static_cast<uint64_t>(capacity) * slot_bytes;
    return planes + bookkeeping_bytes(group.rows(), capacity);
  };
  int64_t low = 0, high = group.most_rows();
  high = std::min<int64_t>(high, static_cast<int64_t>(bytes / slot_bytes));
  high = std::min<int64_t>(high, KeyIndex::kSlotLimit / 2);
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    if (takes(middle) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Weights stay; so does the rest if it means the same (`whole`), else it is as it would start.
void move_rows(Table& table, RowSpace& from, int32_t old_number, bool whole) {
  constexpr size_t kAtOnce = 8192;
  const RecordLayout& layout = from.layout();
  std::vector<int64_t> ids = from.stored_ids(old_number);
  Buffer<uint8_t> weights(kAtOnce * layout.weight_bytes());
  std::vector<Buffer<uint8_t>> states(layout.state_widths.size());
  std::vector<void*> at;
  for (size_t k = 0; k < states.size(); ++k) {
    states[k].resize(kAtOnce * layout.state_bytes(k));
    at.push_back(states[k].data());
  }
  std::vector<int64_t> last(kAtOnce);
  std::unique_ptr<bool[]> found(new bool[kAtOnce]);
  for (size_t begin = 0; begin < ids.size(); begin += kAtOnce) {
    auto n = static_cast<int64_t>(std::min(kAtOnce, ids.size() - begin));
    const int64_t* some = ids.data() + begin;
    from.read(old_number, some, n, weights.data(), at.data(), last.data(), found.get());
    table.space()->write(table.number(), some, n, weights.data(), whole ? at.data() : nullptr,
                         whole ? last.data() : nullptr);
  }
}

}  // namespace

BudgetTooSmall::BudgetTooSmall(uint64_t needed_bytes, uint64_t budget_bytes)
    : std::runtime_error("needs at least " + std::to_string(needed_bytes) +
                         " bytes, and the budget is " + std::to_string(budget_bytes)),
      needed(needed_bytes),
      budget(budget_bytes) {}

Storage::Storage(StorageBudgets budgets, MakeLowest make_lowest)
    : budgets_(budgets), make_lowest_(std::move(make_lowest)) {}

void Storage::lay_out(const std::vector<std::shared_ptr<Table>>& tables) {
  bool settled = std::none_of(tables.begin(), tables.end(),
                              [](const auto& table) { return table->homeless(); });
  if (settled) return;
  std::vector<Group> groups;
  for (const auto& table : tables) {
    RecordLayout layout = layout_of(*table);
    auto at = std::find_if(groups.begin(), groups.end(),
                           [&](const Group& group) { return group.layout == layout; });
    if (at == groups.end()) at = groups.insert(at, Group{layout, {}});
    at->tables.push_back(table.get());
  }
  // Tiers first: what their indices take is not there for rows.
  std::vector<RecordGroup> records;
  for (const Group& group : groups) records.push_back({group.layout.bytes(), group.tables});
  std::vector<std::shared_ptr<Tier>> lowest = make_lowest_(records, release_empty(tables));
  uint64_t lowest_bytes = 0;
  for (const auto& tier : lowest) {
    if (tier) lowest_bytes += tier->memory_bytes();
  }
  auto staging = [](uint64_t budget) {
    return std::clamp(budget / kStagingShare, kLeastStaging, kMostStaging);
  };
  // Indices of the SSD are the host's where there is one.
  uint64_t compute_taken = staging(budgets_.compute);
  uint64_t host_taken = budgets_.host ? staging(budgets_.host) : 0;
  (budgets_.host ? host_taken : compute_taken) += lowest_bytes;
  if (compute_taken >= budgets_.compute) throw BudgetTooSmall(compute_taken, budgets_.compute);
  if (budgets_.host && host_taken >= budgets_.host) throw BudgetTooSmall(host_taken, budgets_.host);

  // Budgets are divided by the bytes that tables may grow to; what a group cannot use goes on.
  std::vector<size_t> order(groups.size());
  double weight_left = 0;
  std::vector<double> weight(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    order[g] = g;
    double rows = 0;
    for (const Table* table : groups[g].tables) {
      rows += table->dynamic() ? 1e7 : static_cast<double>(table->size());
    }
    weight[g] = rows * static_cast<double>(groups[g].layout.bytes());
    weight_left += weight[g];
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight[a] < weight[b]; });
  uint64_t compute_left = budgets_.compute - compute_taken;
  uint64_t host_left = budgets_.host - std::min(host_taken, budgets_.host);
  std::vector<std::shared_ptr<RowSpace>> spaces;
  std::vector<std::shared_ptr<HostTier>> hosts;
  std::vector<std::shared_ptr<RowSpace>> home(groups.size());
  for (size_t g : order) {
    Group& group = groups[g];
    double share = weight_left > 0 ? weight[g] / weight_left : 1;
    weight_left -= weight[g];
    uint64_t slot = RowSpace::slot_bytes(group.layout);
    auto compute_share = static_cast<uint64_t>(static_cast<double>(compute_left) * share);
    int64_t capacity = capacity_within(group, slot, compute_share);
    if (capacity < 1)
      throw BudgetTooSmall(compute_taken + slot + bookkeeping_bytes(group.rows(), 1),
                           budgets_.compute);
    compute_left -= std::min<uint64_t>(compute_left, static_cast<uint64_t>(capacity) * slot +
                                                         bookkeeping_bytes(group.rows(), capacity));
    std::shared_ptr<Tier> below = lowest[g];
    if (budgets_.host || !below) {
      auto host_share = static_cast<uint64_t>(static_cast<double>(host_left) * share);
      auto record = static_cast<uint64_t>(group.layout.bytes());
      int64_t records = capacity_within(group, record, host_share);
      if (records < 1) throw BudgetTooSmall(host_taken + record, budgets_.host);
      host_left -= std::min<uint64_t>(host_left, static_cast<uint64_t>(records) * record +
                                                     bookkeeping_bytes(group.rows(), records));
      hosts.push_back(
          std::make_shared<HostTier>(group.layout.bytes(), group.rows(), records, below));
      below = hosts.back();
    }
    home[g] = std::make_shared<RowSpace>(group.layout, group.tables, capacity, below);
    spaces.push_back(home[g]);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t t = 0; t < groups[g].tables.size(); ++t) {
      Table& table = *groups[g].tables[t];
      std::shared_ptr<RowSpace> old = table.space();
      int32_t old_number = table.number();
      bool whole = !table.homeless();
      table.live_in(home[g], static_cast<int32_t>(t));
      if (old) move_rows(table, *old, old_number, whole);
    }
  }
  spaces_ = std::move(spaces);
  hosts_ = std::move(hosts);
}

// Lets the tiers of the last layout go if no row is in them. Whether rows wait there.
bool Storage::release_empty(const std::vector<std::shared_ptr<Table>>& tables) {
  for (const auto& table : tables) {
    if (!table->stored_ids().empty()) return true;
  }
  for (const auto& table : tables) table->leave();
  spaces_.clear();
  hosts_.clear();
  return false;
}

void Storage::flush() {
  for (const auto& space : spaces_) space->flush();
  for (const auto& host : hosts_) host->flush();
}

uint64_t Storage::memory_bytes() const {
  uint64_t total = 0;
  for (const auto& space : spaces_) total += space->memory_bytes();
  return total;
}

}  // namespace hotbed
