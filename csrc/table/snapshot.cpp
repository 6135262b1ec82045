#include "table/snapshot.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/forks.hpp"
#include "table/snapshot_sources.hpp"

namespace hotbed {

bool Snapshot::can_read(const std::vector<std::shared_ptr<Table>>& tables) {
  return std::all_of(tables.begin(), tables.end(), [](const auto& table) {
    if (!table->space()) return true;
    return !table->unallocated() && table->space()->has_snapshots();
  });
}

Snapshot::Snapshot(std::vector<std::shared_ptr<Table>> tables, int64_t most, uint64_t bytes,
                   std::vector<uint64_t> since)
    : tables_(std::move(tables)),
      room_(std::make_shared<SnapshotRoom>(bytes, forks())),
      keepers_(tables_.size()) {
  since.resize(tables_.size());
  std::map<std::pair<RowSpace*, uint64_t>, SpaceSnapshot::Members> spaces;
  try {
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (RowSpace* space = tables_[t]->space().get()) {
        spaces[{space, since[t]}][t] = tables_[t];
        continue;
      }
      auto part = std::make_shared<MemorySnapshot>(room_, *tables_[t], t, most, since[t]);
      keepers_[t] = part;
      sources_.push_back(part);
      part->begin();
    }
    for (const auto& [of, members] : spaces) {
      auto part = std::make_shared<SpaceSnapshot>(room_, members, most);
      sources_.push_back(part);
      for (auto& [place, keeper] : part->begin(members, of.second)) keepers_[place] = keeper;
    }
  } catch (...) {
    end();
    throw;
  }
}

Snapshot::~Snapshot() { stop(); }

std::unique_ptr<RecordParts> Snapshot::next(size_t& at) {
  std::unique_lock lock(room_->mutex);
  if (room_->copied && !room_->broken) return nullptr;
  while (!room_->broken) {
    for (const auto& keeper : keepers_) {  // what waits goes first
      if (!keeper) continue;
      if (auto found = keeper->take_kept()) {
        at = keeper->place_;
        return found;
      }
    }
    if (room_->copied || reading_ == sources_.size()) break;
    SnapshotSource::Rows rows;
    bool more = sources_[reading_]->next(lock, rows);
    at = rows.place;
    if (rows.parts && rows.parts->count) return std::move(rows.parts);
    reading_ += !more && !room_->broken;
  }
  if (room_->broken) {
    throw TierError(
        "Rows were replaced while they were saved in the background, or what has changed of them "
        "is not known any more, or no memory was left for them. Save again.");
  }
  room_->copied = true;
  room_->moved.notify_all();
  return nullptr;
}

void Snapshot::stop() {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  room_->copied = true;
  for (const auto& source : sources_) source->stop();
  room_->moved.notify_all();
}

void Snapshot::end() {
  stop();
  for (const auto& source : sources_) source->end();
}

std::chrono::nanoseconds Snapshot::waited() const {
  if (!room_->is_here()) return {};
  std::lock_guard guard(room_->mutex);
  return room_->waited;
}

}  // namespace hotbed
