// Into the private parts of a LogTier, for what no test has the time, or the disk, to bring about.
#pragma once

#include <algorithm>
#include <mutex>

#include "log/log_tier.hpp"

namespace hotbed {

// Leaves out so many blocks of the open segment, as though they had been written.
void skip_blocks(LogTier& tier, uint32_t blocks);

// Names of private members are open to whoever instantiates a template explicitly.
template <auto kMutex, auto kFresh, auto kBlocks, auto kMakeRoom, auto kSeal, auto kOpen>
struct LogTierAccess {
  static void skip(LogTier& tier, auto& fresh, uint32_t blocks) {
    std::lock_guard appending(tier.*kMutex);
    (tier.*kMakeRoom)(fresh, 1);
    (tier.*kSeal)(fresh);
    (tier.*kOpen)(fresh);
    fresh.next_block = std::min(tier.*kBlocks - 1, fresh.next_block + blocks);
  }
  friend void skip_blocks(LogTier& tier, uint32_t blocks) { skip(tier, tier.*kFresh, blocks); }
};
template struct LogTierAccess<&LogTier::append_mutex_, &LogTier::fresh_, &LogTier::segment_blocks_,
                              &LogTier::make_room, &LogTier::seal, &LogTier::open_segment>;

}  // namespace hotbed
