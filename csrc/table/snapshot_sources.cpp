#include "table/snapshot_sources.hpp"

#include <algorithm>
#include <utility>

namespace hotbed {

namespace {

constexpr int64_t kBits = 64;
// Slots that are looked at before those that change rows have their turn.
constexpr int64_t kSlotsAtOnce = 1 << 20;
// Rows that are read together, at least where a chunk may have twice as many.
constexpr int64_t kLeastAtOnce = 64;

// Of many tables fewer, as each may hold twice as many that nobody has taken.
int64_t share_of(int64_t most, int64_t tables) {
  int64_t least = std::min(kLeastAtOnce, most / 2);
  return std::max<int64_t>({1, least, 2 * most / std::max<int64_t>(4, tables)});
}

}  // namespace

// --- In memory. ---

MemorySnapshot::MemorySnapshot(std::shared_ptr<SnapshotRoom> room, Table& table, size_t place,
                               int64_t most, uint64_t since)
    : TableKeeper(std::move(room), table, place, table.has_rows() ? table.size() : 0),
      most_(most),
      limit_(table.has_rows() ? table.size() : 0),
      since_(since),
      copied_(static_cast<size_t>((limit_ + kBits - 1) / kBits)) {}

void MemorySnapshot::begin() {
  if (since_) {  // epochs go on meanwhile, and begin anew for nobody
    table_.changes()->begin_reading();
    reads_changes_ = true;
  }
  table_.begin_snapshot(shared_from_this());
}

void MemorySnapshot::end() {
  table_.end_snapshot(this);
  const RowChanges* changes = table_.changes();
  if (std::exchange(reads_changes_, false) && changes) changes->end_reading();
}

bool MemorySnapshot::wanted(int64_t slot) const {
  if (copied_[static_cast<size_t>(slot / kBits)] >> (slot % kBits) & 1) return false;
  return !since_ || table_.changes()->changed(slot, since_);
}

void MemorySnapshot::choose(const int64_t* slots, int64_t n) {
  note_forgotten();
  for (int64_t i = 0; i < n; ++i) {
    int64_t slot = slots ? slots[i] : i;
    if (slot < at_ || slot >= limit_) continue;
    if (wanted(slot)) chosen_.push_back(slot);
    copied_[static_cast<size_t>(slot / kBits)] |= uint64_t{1} << (slot % kBits);
  }
}

// Where it is not known any more which rows are wanted.
void MemorySnapshot::note_forgotten() {
  room_->broken = room_->broken || (since_ && !table_.knows_changes(since_));
}

bool MemorySnapshot::next(std::unique_lock<std::mutex>& /*lock*/, Rows& rows) {
  if (at_ >= limit_) return false;
  note_forgotten();
  if (room_->broken) return false;
  auto found = std::make_unique<RecordParts>(layout_, std::min(most_, limit_ - at_));
  chosen_.clear();
  for (; at_ < limit_ && static_cast<int64_t>(chosen_.size()) < found->most; ++at_) {
    if (wanted(at_)) chosen_.push_back(at_);
  }
  found->add_from(table_, chosen_.data(), static_cast<int64_t>(chosen_.size()));
  chosen_.clear();
  rows = {place_, std::move(found)};
  return true;
}

// --- In a row space. ---

class SpaceSnapshot::OfTable final : public TableKeeper {
 public:
  OfTable(std::shared_ptr<SpaceSnapshot> all, Table& table, size_t place)
      : TableKeeper(all->room_, table, place, INT64_MAX),
        number_(table.number()),
        all_(std::move(all)) {}

 private:
  friend class SpaceSnapshot;

  void choose(const int64_t* slots, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) all_->take(*this, slots ? slots[i] : i);
    all_->leave_out_chosen(*this);
  }

  const int32_t number_;
  const std::shared_ptr<SpaceSnapshot> all_;
  std::unique_ptr<RecordParts> parts_;  // read, and not taken yet
};

SpaceSnapshot::SpaceSnapshot(std::shared_ptr<SnapshotRoom> room, const Members& tables,
                             int64_t most)
    : room_(std::move(room)),
      space_(tables.begin()->second->space()),
      at_once_(share_of(most, static_cast<int64_t>(tables.size()))),
      keys_(static_cast<size_t>(at_once_)),
      records_(at_once_ * space_->layout().bytes()) {}

std::map<size_t, std::shared_ptr<TableKeeper>> SpaceSnapshot::begin(const Members& tables,
                                                                    uint64_t since) {
  std::map<size_t, std::shared_ptr<TableKeeper>> keepers;
  std::vector<int32_t> numbers;
  for (const auto& [place, table] : tables) {
    auto keeper = std::make_shared<OfTable>(shared_from_this(), *table, place);
    auto number = static_cast<size_t>(keeper->number_);
    if (number >= tables_.size()) tables_.resize(number + 1);
    tables_[number] = keeper;
    members_.push_back(keeper.get());
    numbers.push_back(keeper->number_);
    keepers[place] = std::move(keeper);
  }
  space_->begin_snapshot(shared_from_this(), numbers, since);
  for (const OfTable* one : members_) {
    one->table_.begin_snapshot(tables_[static_cast<size_t>(one->number_)]);
  }
  return keepers;
}

void SpaceSnapshot::begin(SpaceMoment moment) {
  std::lock_guard guard(room_->mutex);
  moment_ = std::move(moment);
  below_ = std::move(moment_.below);
  keep_held_back();
}

void SpaceSnapshot::end() {
  space_->end_snapshot(this);
  for (OfTable* one : std::exchange(members_, {})) one->table_.end_snapshot(one);
  tables_.clear();  // which have this
}

void SpaceSnapshot::stop() { below_.reset(); }

// Rows that have no place wait like those that were about to change.
void SpaceSnapshot::keep_held_back() {
  const std::vector<RowKey>& keys = moment_.held_back;
  below_->leave_out(keys);
  int64_t bytes = space_->layout().bytes();
  for (size_t i = 0; i < keys.size(); ++i) {
    OfTable& keeper = *tables_[static_cast<size_t>(keys[i].table)];
    keeper.kept_with_room(1).add(
        keys[i].id, moment_.held_back_records.data() + static_cast<int64_t>(i) * bytes);
    room_->bytes += static_cast<uint64_t>(bytes);
  }
  moment_.held_back_records = {};
}

// Whose row is to be copied from a slot; null: none.
SpaceSnapshot::OfTable* SpaceSnapshot::table_in(int64_t slot) const {
  uint16_t number = slot < at_ || slot >= moment_.slots ? 0 : moment_.numbers()[slot];
  return number ? tables_[number - 1u].get() : nullptr;
}

bool SpaceSnapshot::take(OfTable& keeper, int64_t slot) {
  if (table_in(slot) != &keeper) return false;
  moment_.numbers()[slot] = 0;
  keeper.chosen_.push_back(slot);
  return true;
}

void SpaceSnapshot::leave_out_chosen(const OfTable& keeper) {
  if (keeper.chosen_.empty()) return;
  const int64_t* ids = keeper.table_.ids();
  std::vector<RowKey> keys;
  for (int64_t slot : keeper.chosen_) keys.push_back({ids[slot], keeper.number_});
  below_->leave_out(keys);
}

template <class F>
void SpaceSnapshot::change(F f) noexcept {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  if (room_->copied) return;
  try {
    f();
    for (OfTable* one : members_) {
      leave_out_chosen(*one);
      one->keep_chosen();
    }
  } catch (const std::exception&) {  // no memory
    room_->broken = true;
  }
}

void SpaceSnapshot::keep(const int64_t* slots, int64_t n) noexcept {
  change([&] {
    for (int64_t i = 0; i < n; ++i) {
      if (OfTable* one = table_in(slots[i])) take(*one, slots[i]);
    }
  });
}

// They stay in their slots, to be copied later.
void SpaceSnapshot::leave_out(const int64_t* slots, int64_t n) noexcept {
  change([&] {
    std::vector<RowKey> keys;
    for (int64_t i = 0; i < n; ++i) {
      OfTable* one = table_in(slots[i]);
      if (one) keys.push_back({one->table_.ids()[slots[i]], one->number_});
    }
    if (!keys.empty()) below_->leave_out(keys);
  });
}

RecordParts& SpaceSnapshot::part_of(OfTable& one) const {
  if (!one.parts_) one.parts_ = std::make_unique<RecordParts>(one.layout_, 2 * at_once_);
  return *one.parts_;
}

// Those in the slots that follow.
void SpaceSnapshot::copy_slots() {
  int64_t taken = 0, end = std::min(moment_.slots, at_ + kSlotsAtOnce);
  const uint16_t* numbers = moment_.numbers();
  for (; at_ < end && taken < at_once_; ++at_) {
    if (numbers[at_]) taken += take(*tables_[numbers[at_] - 1u], at_);
  }
  for (OfTable* one : members_) {
    if (one->chosen_.empty()) continue;
    leave_out_chosen(*one);
    part_of(*one).add_from(one->table_, one->chosen_.data(),
                           static_cast<int64_t>(one->chosen_.size()));
    one->chosen_.clear();
  }
}

// Rows of a table for which the next ones might find no room, or of `any`.
bool SpaceSnapshot::give(Rows& rows, bool any) {
  for (OfTable* one : members_) {
    if (!one->parts_ || one->parts_->count <= (any ? 0 : at_once_)) continue;
    rows = {one->place_, std::move(one->parts_)};
    return true;
  }
  return false;
}

bool SpaceSnapshot::next(std::unique_lock<std::mutex>& lock, Rows& rows) {
  if (give(rows, false)) return true;
  if (room_->broken) return false;
  if (at_ < moment_.slots) {
    copy_slots();
    return true;
  }
  if (!below_) return give(rows, true);
  // Nobody keeps rows of this space any more, and this thread alone has its parts.
  auto below = below_;
  lock.unlock();
  int64_t n = below->next(at_once_, keys_.data(), records_.data());
  int64_t bytes = space_->layout().bytes();
  for (int64_t i = 0; i < n; ++i) {
    const RowKey& key = keys_[static_cast<size_t>(i)];
    part_of(*tables_[static_cast<size_t>(key.table)]).add(key.id, records_.data() + i * bytes);
  }
  lock.lock();
  if (!n) below_.reset();
  return true;
}

}  // namespace hotbed
