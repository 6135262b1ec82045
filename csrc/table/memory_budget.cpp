#include "table/memory_budget.hpp"

#include <algorithm>
#include <map>

#include "base/errors.hpp"
#include "base/forks.hpp"
#include "base/integers.hpp"

namespace hotbed {

namespace {

// One for all budgets: what they guard takes nanoseconds.
std::mutex& mutex = *new ForkMutex;

std::string with_commas(uint64_t number) {
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

TierError refusal(uint64_t limit, const BudgetShare::Growth& growth, uint64_t total) {
  std::string others = total > growth.bytes ? ", with all tables " + with_commas(total) : "";
  return TierError("Table '" + growth.table + "' needs " + with_commas(growth.bytes) +
                       " bytes for " + with_commas(static_cast<uint64_t>(growth.rows)) +
                       " rows with their optimizer states and index" + others +
                       ". Raise Storage(host=" + with_commas(limit) + ") to at least " +
                       with_commas(total) +
                       " bytes, or give an ssd= path for the rows that do not fit.",
                   {}, total);
}

}  // namespace

uint64_t MemoryBudget::used() const {
  std::lock_guard lock(mutex);
  return used_;
}

BudgetShare::~BudgetShare() {
  if (!budget_) return;
  std::lock_guard lock(mutex);
  budget_->used_ -= bytes_;
}

void BudgetShare::check(std::span<const Growth> growths) {
  std::map<MemoryBudget*, uint64_t> totals;
  for (const Growth& growth : growths) {
    MemoryBudget* budget = growth.share->budget_.get();
    if (!budget) continue;
    auto at = totals.emplace(budget, budget->used()).first;
    at->second = sum(at->second - growth.share->bytes_, growth.bytes);
  }
  for (auto [budget, total] : totals) {
    if (total <= budget->limit_) continue;
    const Growth* most = nullptr;
    for (const Growth& growth : growths) {
      if (growth.share->budget_.get() != budget) continue;
      if (!most || growth.bytes > most->bytes) most = &growth;
    }
    throw refusal(budget->limit_, *most, total);
  }
}

void BudgetShare::become(uint64_t bytes, const std::string& table, int64_t rows) {
  if (!budget_) return;
  std::lock_guard lock(mutex);
  uint64_t total = sum(budget_->used_ - bytes_, bytes);
  if (bytes > bytes_ && total > budget_->limit_) {
    throw refusal(budget_->limit_, {this, table, rows, bytes}, total);
  }
  budget_->used_ = total;
  bytes_ = bytes;
}

void BudgetShare::shrink(uint64_t bytes) {
  if (!budget_ || bytes >= bytes_) return;
  std::lock_guard lock(mutex);
  budget_->used_ -= bytes_ - bytes;
  bytes_ = bytes;
}

}  // namespace hotbed
