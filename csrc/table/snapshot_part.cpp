#include "table/snapshot_part.hpp"

#include <algorithm>
#include <utility>

#include "base/forks.hpp"

namespace hotbed {

namespace {

// Rows that are kept together.
constexpr int64_t kKeptAtOnce = 4096, kLeastAtOnce = 256;

}  // namespace

bool SnapshotRoom::is_here() const { return process == forks(); }

TableKeeper::TableKeeper(std::shared_ptr<SnapshotRoom> room, Table& table, size_t place,
                         int64_t rows)
    : room_(std::move(room)),
      table_(table),
      place_(place),
      layout_(layout_of(table)),
      at_once_(std::min(rows, kKeptAtOnce)) {}

void TableKeeper::keep(const int64_t* slots, int64_t n) {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  if (room_->copied) return;
  try {
    choose(slots, n);
    keep_chosen();
  } catch (const std::exception&) {  // no memory
    room_->broken = true;
  }
}

RecordParts& TableKeeper::kept_with_room(int64_t more) {
  if (kept_.empty() || kept_.back()->count == kept_.back()->most) {
    // Each page that nobody has had takes a while, so no more than these need.
    int64_t room = std::clamp(more, std::min(kLeastAtOnce, at_once_), at_once_);
    kept_.push_back(std::make_unique<RecordParts>(layout_, room));
  }
  return *kept_.back();
}

void TableKeeper::keep_chosen() {
  auto count = static_cast<int64_t>(chosen_.size());
  for (int64_t begin = 0; begin < count;) {
    RecordParts& part = kept_with_room(count - begin);
    int64_t some = std::min(count - begin, part.most - part.count);
    part.add_from(table_, chosen_.data() + begin, some);
    begin += some;
  }
  chosen_.clear();
  room_->bytes += static_cast<uint64_t>(count * layout_.bytes());
}

std::unique_ptr<RecordParts> TableKeeper::take_kept() {
  if (kept_.empty()) return nullptr;
  auto found = std::move(kept_.front());
  kept_.pop_front();
  room_->bytes -= static_cast<uint64_t>(found->count * layout_.bytes());
  room_->moved.notify_all();
  return found;
}

bool TableKeeper::wait(bool all, std::chrono::milliseconds most) {
  if (!room_->is_here()) return true;
  auto begin = std::chrono::steady_clock::now();
  std::unique_lock guard(room_->mutex);
  auto ready = [&] { return room_->copied || (!all && room_->bytes <= room_->most); };
  if (ready()) return true;
  bool is_ready = room_->moved.wait_for(guard, most, ready);
  room_->waited += std::chrono::steady_clock::now() - begin;
  return is_ready;
}

void TableKeeper::lose() {
  if (!room_->is_here()) return;
  std::lock_guard guard(room_->mutex);
  room_->broken = room_->broken || !room_->copied;
}

std::unique_lock<std::mutex> TableKeeper::pause() const {
  return room_->is_here() ? std::unique_lock(room_->mutex) : std::unique_lock<std::mutex>();
}

}  // namespace hotbed
