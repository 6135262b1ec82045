#include "serve/sorted_ids.hpp"

#include <algorithm>

namespace hotbed {

namespace {

constexpr int64_t kBlock = 64;
// Ids that are searched for at once, so that their reads of memory overlap.
constexpr int64_t kTogether = 64;

// Moves each of n starts, from where `length` ids lie, to the last one that is at most what is
// wanted, or leaves it. A branch on what is compared would
// be mispredicted every other time.
inline void narrow(const int64_t* wanted, int64_t n, int64_t length, const int64_t** starts) {
  while (length > 1) {
    int64_t half = length / 2;
    for (int64_t i = 0; i < n; ++i) {
      auto beyond = -static_cast<int64_t>(starts[i][half] <= wanted[i]);  // all bits, or none
      starts[i] += half & beyond;
    }
    length -= half;
  }
}

}  // namespace

SortedIds::SortedIds(const int64_t* ids, int64_t count) : ids_(ids), count_(count) {
  first_.reserve(static_cast<size_t>((count + kBlock - 1) / kBlock));
  for (int64_t i = 0; i < count; i += kBlock) first_.push_back(ids[i]);
}

void SortedIds::find(const int64_t* wanted, int64_t n, int64_t* at) const {
  if (count_ == 0) {
    std::fill(at, at + n, -1);
    return;
  }
  const int64_t* starts[kTogether];
  for (int64_t done = 0; done < n; done += kTogether) {
    const int64_t* some = wanted + done;
    int64_t here = std::min(kTogether, n - done);
    std::fill(starts, starts + here, first_.data());
    narrow(some, here, static_cast<int64_t>(first_.size()), starts);
    for (int64_t i = 0; i < here; ++i) {
      int64_t block = starts[i] - first_.data();
      // The last block may begin inside the one before it, so that all are equally long.
      starts[i] = ids_ + std::max<int64_t>(0, std::min(block * kBlock, count_ - kBlock));
      __builtin_prefetch(starts[i] + kBlock / 2);
    }
    narrow(some, here, std::min(kBlock, count_), starts);
    for (int64_t i = 0; i < here; ++i) {
      at[done + i] = *starts[i] == some[i] ? starts[i] - ids_ : -1;
    }
  }
}

}  // namespace hotbed
