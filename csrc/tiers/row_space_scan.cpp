// All rows of a row space, while they stay or while they move, and which of them have changed.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/forks.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

class RowSpace::Scan : public RecordScan {
 public:
  Scan(RowSpace& space, std::span<const int32_t> tables, uint64_t since)
      : space_(space),
        all_(!since),
        epoch_(static_cast<uint8_t>(since)),
        tables_(tables.begin(), tables.end()),
        who_{std::this_thread::get_id(), forks()} {
    std::scoped_lock lock(space_.moving_, space_.mutex_);
    space_.drain();
    space_.refuse_forgotten(since);
    below_ = space_.below_->scan(tables, all_ ? 0 : space_.moments_[epoch_]);
    held_ = space_.held_back_sorted();
    space_.scanning_.push_back(who_);
  }
  ~Scan() override {
    std::lock_guard lock(space_.moving_);
    auto& all = space_.scanning_;
    auto mine = std::find(all.begin(), all.end(), who_);
    if (mine != all.end()) all.erase(mine);
    space_.scanned_.notify_all();
  }

  int64_t next(int64_t most, RowKey* keys, uint8_t* records) override {
    std::scoped_lock lock(space_.moving_, space_.mutex_);
    space_.drain();
    std::vector<int64_t> slots;
    auto dirty = [&](int64_t slot, RowKey key, bool is_dirty, int64_t i) {
      if (!is_dirty || !tables_.count(key.table)) return false;
      if (!all_ && !space_.residency_.dirty_since(slot, epoch_)) return false;
      keys[i] = key;
      slots.push_back(slot);
      return true;
    };
    int64_t n = space_.residency_.list(slot_, most, dirty);
    space_.gather(slots.data(), n, records);
    if (!n) n = held_back(most, keys, records);
    while (!n) {
      int64_t found = below_->next(most, keys, records);
      if (!found) break;
      n = without_those_above(found, keys, records);
    }
    return n;
  }

 private:
  int64_t held_back(int64_t most, RowKey* keys, uint8_t* records) {
    int64_t n = 0, bytes = space_.record_bytes_;
    for (; at_ < space_.held_back_.size() && n < most; ++at_) {
      if (!tables_.count(space_.held_back_[at_].table)) continue;
      keys[n] = space_.held_back_[at_];
      const uint8_t* from = space_.held_back_records_.data() + static_cast<int64_t>(at_) * bytes;
      std::memcpy(records + n++ * bytes, from, static_cast<size_t>(bytes));
    }
    return n;
  }

  int64_t without_those_above(int64_t found, RowKey* keys, uint8_t* records) {
    const Residency& above = space_.residency_;
    std::vector<int64_t> slots = above.find({keys, static_cast<size_t>(found)});
    return keep_rows(keys, records, found, space_.record_bytes_, [&](int64_t i) {
      int64_t slot = slots[static_cast<size_t>(i)];
      return (slot < 0 || !above.is_dirty(slot)) && !among(held_, keys[i]);
    });
  }

  RowSpace& space_;
  const bool all_;
  const uint8_t epoch_;
  const std::set<int32_t> tables_;
  const Scanning who_;
  std::unique_ptr<RecordScan> below_;
  int64_t slot_ = 0;
  std::vector<RowKey> held_;  // back, sorted
  size_t at_ = 0;             // among those that were held back
};

std::unique_ptr<RecordScan> RowSpace::scan(std::span<const int32_t> tables, uint64_t since) {
  return std::make_unique<Scan>(*this, tables, since);
}

uint64_t RowSpace::mark_changes() {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  std::optional<uint64_t> moment = below_->moment();
  if (!moment) return 0;
  if (mark_ && !residency_.touched()) return mark_;
  if (residency_.last_epoch() && !scanning_.empty()) return 0;
  if (residency_.last_epoch()) generation_ = RowChanges::next_generation();
  uint8_t ended = residency_.end_epoch();
  moments_[ended] = *moment;
  return mark_ = generation_ << 8 | ended;
}

bool RowSpace::knows_changes(uint64_t mark) {
  std::lock_guard lock(mutex_);
  return mark >> 8 == generation_;
}

void RowSpace::keep(const std::vector<int64_t>& slots) const {
  for (const auto& keeper : keepers_) {
    keeper->keep(slots.data(), static_cast<int64_t>(slots.size()));
  }
}

// Under mutex_.
void RowSpace::refuse_forgotten(uint64_t since) const {
  if (!since || since >> 8 == generation_) return;
  throw TierError("It is not known any more what has changed, as others have saved. Save again.");
}

void RowSpace::begin_snapshot(std::shared_ptr<SlotKeeper> keeper, std::span<const int32_t> tables,
                              uint64_t since) {
  std::scoped_lock lock(moving_, mutex_);
  drain();
  refuse_forgotten(since);
  auto epoch = static_cast<uint8_t>(since);
  std::vector<bool> chosen(tables_.size());
  for (int32_t table : tables) chosen[static_cast<size_t>(table)] = true;
  SpaceMoment moment;
  moment.slots = residency_.used();
  moment.in_slots.reserve(static_cast<uint64_t>(moment.slots + 1) * sizeof(uint16_t),
                          "A snapshot of the compute tier", kLowerBudget);
  uint16_t* numbers = moment.numbers();
  residency_.for_each([&](int64_t slot, RowKey key, bool dirty) {
    if (!dirty || !chosen[static_cast<size_t>(key.table)]) return;
    if (since && !residency_.dirty_since(slot, epoch)) return;
    numbers[slot] = static_cast<uint16_t>(key.table + 1);
  });
  for (size_t i = 0; i < held_back_.size(); ++i) {
    if (!chosen[static_cast<size_t>(held_back_[i].table)]) continue;
    const uint8_t* record = held_back_records_.data() + static_cast<int64_t>(i) * record_bytes_;
    moment.held_back.push_back(held_back_[i]);
    moment.held_back_records.insert(moment.held_back_records.end(), record, record + record_bytes_);
  }
  moment.below = below_->snapshot(tables, since ? moments_[epoch] : 0);
  keepers_.reserve(keepers_.size() + 1);
  keeper->begin(std::move(moment));
  keepers_.push_back(std::move(keeper));
}

void RowSpace::end_snapshot(const SlotKeeper* keeper) {
  std::lock_guard lock(moving_);
  std::erase_if(keepers_, [&](const auto& one) { return one.get() == keeper; });
}

}  // namespace hotbed
