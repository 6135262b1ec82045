#include "table/snapshot.hpp"

#include <algorithm>
#include <utility>

#include "base/forks.hpp"

namespace hotbed {

namespace {

// Rows that are kept together.
constexpr int64_t kKeptAtOnce = 4096;
constexpr int64_t kBits = 64;

}  // namespace

bool SnapshotRoom::is_here() const { return process == forks(); }

TableSnapshot::TableSnapshot(std::shared_ptr<SnapshotRoom> room, const Table& table, int64_t most,
                             uint64_t since)
    : room_(std::move(room)),
      layout_(layout_of(table)),
      most_(most),
      limit_(table.has_rows() ? table.size() : 0),
      since_(since),
      copied_(static_cast<size_t>((limit_ + kBits - 1) / kBits)) {}

bool TableSnapshot::wanted(const Table& table, int64_t slot) const {
  if (copied_[static_cast<size_t>(slot / kBits)] >> (slot % kBits) & 1) return false;
  return !since_ || table.changes()->changed(slot, since_);
}

void TableSnapshot::keep(const Table& table, const int64_t* slots, int64_t n) {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  if (room_->copied) return;
  note_forgotten(table);
  chosen_.clear();
  for (int64_t i = 0; i < n; ++i) {
    int64_t slot = slots ? slots[i] : i;
    if (slot < at_ || slot >= limit_) continue;
    if (wanted(table, slot)) chosen_.push_back(slot);
    copied_[static_cast<size_t>(slot / kBits)] |= uint64_t{1} << (slot % kBits);
  }
  auto count = static_cast<int64_t>(chosen_.size());
  for (int64_t begin = 0; begin < count;) {
    if (kept_.empty() || kept_.back()->count == kept_.back()->most) {
      kept_.push_back(std::make_unique<RecordParts>(layout_, std::min(limit_, kKeptAtOnce)));
    }
    RecordParts& part = *kept_.back();
    int64_t some = std::min(count - begin, part.most - part.count);
    part.add_from(table, chosen_.data() + begin, some);
    begin += some;
  }
  room_->bytes += static_cast<uint64_t>(count * layout_.bytes());
}

// Where it is not known any more which rows are wanted.
void TableSnapshot::note_forgotten(const Table& table) {
  room_->broken = room_->broken || (since_ && !table.knows_changes(since_));
}

bool TableSnapshot::wait(bool all, std::chrono::milliseconds most) {
  if (!room_->is_here()) return true;
  auto begin = std::chrono::steady_clock::now();
  std::unique_lock guard(room_->mutex);
  auto ready = [&] { return room_->copied || (!all && room_->bytes <= room_->most); };
  if (ready()) return true;
  bool is_ready = room_->moved.wait_for(guard, most, ready);
  room_->waited += std::chrono::steady_clock::now() - begin;
  return is_ready;
}

void TableSnapshot::lose() {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  room_->broken = room_->broken || !room_->copied;
}

std::unique_lock<std::mutex> TableSnapshot::pause() const {
  return room_->is_here() ? std::unique_lock(room_->mutex) : std::unique_lock<std::mutex>();
}

std::unique_ptr<RecordParts> TableSnapshot::next(const Table& table) {
  if (!kept_.empty()) {
    auto found = std::move(kept_.front());
    kept_.pop_front();
    room_->bytes -= static_cast<uint64_t>(found->count * layout_.bytes());
    room_->moved.notify_all();
    return found;
  }
  if (at_ >= limit_) return nullptr;
  note_forgotten(table);
  if (room_->broken) return nullptr;
  auto found = std::make_unique<RecordParts>(layout_, std::min(most_, limit_ - at_));
  chosen_.clear();
  for (; at_ < limit_ && static_cast<int64_t>(chosen_.size()) < found->most; ++at_) {
    if (wanted(table, at_)) chosen_.push_back(at_);
  }
  found->add_from(table, chosen_.data(), static_cast<int64_t>(chosen_.size()));
  return found;
}

Snapshot::Snapshot(std::vector<std::shared_ptr<Table>> tables, int64_t most, uint64_t bytes,
                   std::vector<uint64_t> since)
    : tables_(std::move(tables)), room_(std::make_shared<SnapshotRoom>(bytes, forks())) {
  since.resize(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    parts_.push_back(std::make_shared<TableSnapshot>(room_, *tables_[t], most, since[t]));
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (since[t]) {  // epochs go on meanwhile, and begin anew for nobody
      tables_[t]->changes()->begin_reading();
      reading_.push_back(tables_[t].get());
    }
    tables_[t]->begin_snapshot(parts_[t]);
  }
}

Snapshot::~Snapshot() { stop(); }

std::unique_ptr<RecordParts> Snapshot::next(size_t& at) {
  std::lock_guard guard(room_->mutex);
  if (room_->copied && !room_->broken) return nullptr;
  bool more = true;
  while (more && !room_->broken) {
    more = false;
    for (size_t t = 0; t < tables_.size(); ++t) {  // what waits goes first
      if (parts_[t]->kept_.empty()) continue;
      at = t;
      return parts_[t]->next(*tables_[t]);
    }
    for (size_t t = 0; t < tables_.size() && !more; ++t) {
      auto found = parts_[t]->next(*tables_[t]);
      at = t;
      if (found && found->count) return found;
      more = found != nullptr;
    }
  }
  if (room_->broken) {
    throw TierError(
        "Rows were replaced while they were saved in the background, or what has changed of them "
        "is not known any more. Save again.");
  }
  room_->copied = true;
  room_->moved.notify_all();
  return nullptr;
}

void Snapshot::stop() {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  room_->copied = true;
  room_->moved.notify_all();
}

void Snapshot::end() {
  stop();
  for (size_t t = 0; t < tables_.size(); ++t) tables_[t]->end_snapshot(parts_[t].get());
  for (const Table* table : std::exchange(reading_, {})) {
    if (const RowChanges* changes = table->changes()) changes->end_reading();
  }
}

std::chrono::nanoseconds Snapshot::waited() const {
  if (!room_->is_here()) return {};
  std::lock_guard guard(room_->mutex);
  return room_->waited;
}

}  // namespace hotbed
