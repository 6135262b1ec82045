#include "testing/io_faults.hpp"

#include <algorithm>
#include <cerrno>

namespace hotbed {

namespace {

template <class Map>
auto taken_or(const Map& map, uint64_t key, typename Map::mapped_type otherwise) {
  auto found = map.find(key);
  return found == map.end() ? otherwise : found->second;
}

}  // namespace

IoFaults& IoFaults::fail_read(uint64_t nth, int error) {
  std::lock_guard lock(mutex_);
  failing_reads_[nth] = error;
  return *this;
}

IoFaults& IoFaults::fail_write(uint64_t nth, int error) {
  std::lock_guard lock(mutex_);
  failing_writes_[nth] = error;
  return *this;
}

IoFaults& IoFaults::fail_sync(uint64_t nth, int error) {
  std::lock_guard lock(mutex_);
  failing_syncs_[nth] = error;
  return *this;
}

IoFaults& IoFaults::shorten_read(uint64_t nth, uint32_t bytes) {
  std::lock_guard lock(mutex_);
  short_reads_[nth] = bytes;
  return *this;
}

IoFaults& IoFaults::shorten_write(uint64_t nth, uint32_t bytes) {
  std::lock_guard lock(mutex_);
  short_writes_[nth] = bytes;
  return *this;
}

IoFaults& IoFaults::flip_bit(uint64_t nth, uint64_t bit) {
  std::lock_guard lock(mutex_);
  flips_[nth] = bit;
  return *this;
}

IoFaults& IoFaults::full_after_writing(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  writing_room_ = bytes;
  return *this;
}

IoFaults& IoFaults::full_after_preallocating(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  preallocating_room_ = bytes;
  return *this;
}

IoFaults& IoFaults::make_room() {
  std::lock_guard lock(mutex_);
  writing_room_ = preallocating_room_ = kEndless;
  return *this;
}

IoFaults& IoFaults::record() {
  std::lock_guard lock(mutex_);
  recording_ = true;
  return *this;
}

void IoFaults::mark(uint64_t number) {
  note({.kind = IoEvent::Kind::mark, .path = {}, .target = {}, .offset = number, .data = {}});
}

std::vector<IoEvent> IoFaults::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

uint64_t IoFaults::reads() const {
  std::lock_guard lock(mutex_);
  return reads_;
}

uint64_t IoFaults::writes() const {
  std::lock_guard lock(mutex_);
  return writes_;
}

IoFaults::Verdict IoFaults::before_transfer(const std::string& path, bool write, uint64_t offset,
                                            const uint8_t* data, uint32_t bytes) {
  std::lock_guard lock(mutex_);
  Verdict verdict{.bytes = bytes, .nth = write ? ++writes_ : ++reads_};
  verdict.error = taken_or(write ? failing_writes_ : failing_reads_, verdict.nth, 0);
  uint32_t most = taken_or(write ? short_writes_ : short_reads_, verdict.nth, bytes);
  verdict.bytes = std::min(verdict.bytes, most);
  if (!write || verdict.error) return verdict;
  if (writing_room_ != kEndless) {
    if (writing_room_ == 0) {
      verdict.error = ENOSPC;
      return verdict;
    }
    verdict.bytes = static_cast<uint32_t>(std::min<uint64_t>(verdict.bytes, writing_room_));
    writing_room_ -= verdict.bytes;
  }
  if (recording_) {
    verdict.event = events_.size();
    events_.push_back({.kind = IoEvent::Kind::write_started,
                       .path = path,
                       .target = {},
                       .offset = offset,
                       .data = {data, data + verdict.bytes}});
  }
  return verdict;
}

void IoFaults::after_transfer(const Verdict& verdict, bool write, uint8_t* data, uint32_t bytes) {
  std::lock_guard lock(mutex_);
  if (write) {
    if (recording_) {
      events_.push_back({.kind = IoEvent::Kind::write_finished,
                         .path = {},
                         .target = {},
                         .data = {},
                         .pair = verdict.event});
    }
    return;
  }
  auto flip = flips_.find(verdict.nth);
  if (flip == flips_.end()) return;
  uint64_t bit = flip->second;
  if (bit / 8 < bytes) data[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
}

int IoFaults::before_preallocation(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (preallocating_room_ == kEndless) return 0;
  if (preallocating_room_ < bytes) return ENOSPC;
  preallocating_room_ -= bytes;
  return 0;
}

int IoFaults::before_sync() {
  std::lock_guard lock(mutex_);
  return taken_or(failing_syncs_, ++syncs_, 0);
}

size_t IoFaults::note(IoEvent event) {
  std::lock_guard lock(mutex_);
  if (!recording_) return 0;
  events_.push_back(std::move(event));
  return events_.size() - 1;
}

}  // namespace hotbed
