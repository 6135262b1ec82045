#include "tiers/row_changes.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace hotbed {

uint64_t RowChanges::next_generation() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void RowChanges::touch(const int64_t* slots, int64_t n) {
  uint8_t* epochs = data();
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] >= 0) epochs[slots[i]] = epoch_;
  }
}

void RowChanges::touch_range(int64_t first, int64_t count) {
  if (count > 0) std::memset(data() + first, epoch_, static_cast<size_t>(count));
}

uint64_t RowChanges::mark(int64_t rows) {
  if (epoch_ == UINT8_MAX && readers_) return 0;
  if (epoch_ == UINT8_MAX) forget(rows);
  return generation_ << 8 | epoch_++;
}

void RowChanges::adopt(uint64_t mark) {
  auto ended = static_cast<uint8_t>(mark);
  if (mark >> 8 != generation_) {
    generation_ = mark >> 8;
    oldest_ = ended;
    erased_ = {};
  }
  epoch_ = static_cast<uint8_t>(ended + 1);
}

void RowChanges::forget(int64_t rows) {
  generation_ = next_generation();
  epoch_ = 1;
  oldest_ = 0;
  erased_ = {};
  if (rows > 0) std::memset(data(), 0, static_cast<size_t>(rows));
}

void RowChanges::forget_before(uint64_t mark) {
  if (!knows(mark)) return;
  std::erase_if(erased_,
                [&](const Erased& one) { return one.epoch <= static_cast<uint8_t>(mark); });
  erased_.shrink_to_fit();
}

std::vector<int64_t> RowChanges::erased_since(uint64_t mark) const {
  std::vector<int64_t> ids;
  for (const Erased& one : erased_) {
    if (one.epoch > static_cast<uint8_t>(mark)) ids.push_back(one.id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace hotbed
