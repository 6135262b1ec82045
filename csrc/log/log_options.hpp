// How a row log is kept.
#pragma once

#include <cstdint>

#include "log/io_engine.hpp"

namespace hotbed {

struct LogOptions {
  // Of a file. Space is given back by whole segments.
  uint64_t segment_bytes = 64ull << 20;
  // Files hold at most this many bytes for each byte of live blocks, and kSlackSegments segments
  // (and what one write brings) on top. Lower costs more moving.
  double space_ratio = 1.5;
  // Memory for blocks that are being filled or written, and how much of it goes to the disk at
  // once; a block at least.
  uint64_t append_bytes = 8ull << 20;
  uint64_t buffer_bytes = 512ull << 10;
  // Compaction runs in a thread of the log; otherwise only when compact_step() is called.
  bool background = true;
  // Segments are preallocated where the file system can, so that a full disk shows before a write
  // is accepted.
  bool preallocate = true;
  // Discards a log that lies in the folder. Otherwise a folder with a log is refused.
  bool reset = false;
  IoOptions io;
};

constexpr uint64_t kSlackSegments = 4;
constexpr double kLeastSpaceRatio = 1.15;

}  // namespace hotbed
