// What a table knows of its changes.
#include <algorithm>

#include "base/forks.hpp"
#include "base/integers.hpp"
#include "table/table.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

namespace {

const char* const kWholeSaves = "Save whole checkpoints, which need not know what has changed.";
// Ids that went are known until they are more than the rows, and so many.
constexpr int64_t kErased = 4096;

}  // namespace

uint64_t Table::mark_changes() {
  WholeInForks whole;
  if (tiered_) {
    uint64_t mark = allocated_ ? space_->mark_changes() : 0;
    if (!mark) return 0;
    if (!changes_) changes_ = std::make_unique<RowChanges>(what_for("changes"), kWholeSaves);
    changes_->adopt(mark);
    return mark;
  }
  if (released_) return 0;
  if (!changes_) {
    auto made = std::make_unique<RowChanges>(what_for("changes"), kWholeSaves);
    try {
      take(size_, sum(state_bytes(size_), made->plane().page_bytes(size_)));
      made->plane().ensure(size_);
    } catch (const std::exception&) {  // neither in the budget nor in memory
      settle_share();
      return 0;
    }
    changes_ = std::move(made);
  }
  return changes_->mark(size_);
}

void Table::keep(const int64_t* slots, int64_t n) const {
  if (keeper_) keeper_->keep(slots, n);
}

void Table::begin_snapshot(std::shared_ptr<RowKeeper> keeper) { keeper_ = std::move(keeper); }

void Table::end_snapshot(const RowKeeper* keeper) {
  if (keeper_.get() == keeper) keeper_.reset();
}

bool Table::wait_for_snapshot(bool all, std::chrono::milliseconds most) const {
  auto keeper = keeper_;
  return !keeper || keeper->wait(all, most);
}

void Table::lose_snapshot() {
  if (keeper_) keeper_->lose();
}

void Table::forget_changes() {
  if (changes_) changes_->forget(has_rows() ? size_ : 0);
}

// More of them than rows take more than a whole save.
void Table::forget_erased() {
  if (changes_ && !changes_->is_read() && changes_->erased() > std::max(size(), kErased)) {
    forget_changes();
  }
}

bool Table::knows_changes(uint64_t mark) const {
  if (!changes_ || !changes_->knows(mark)) return false;
  return !tiered_ || (allocated_ && space_->knows_changes(mark));
}

void Table::forget_changes_before(uint64_t mark) {
  if (changes_) changes_->forget_before(mark);
}

}  // namespace hotbed
