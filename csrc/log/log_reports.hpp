// What a store of a row log has done, and what opening it has found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hotbed {

struct StoreStatistics {
  uint64_t rows_read = 0;                       // found, by read()
  uint64_t rows_from_memory = 0;                // of those, out of buffers
  uint64_t blocks_read = 0;                     // by read(), each once a call
  uint64_t requests = 0;                        // to the disk, by read()
  uint64_t rereads = 0;                         // blocks read again because they looked wrong
  uint64_t rows_written = 0;                    // by write()
  uint64_t rows_moved = 0;                      // by compaction
  uint64_t compactions = 0;                     // segments emptied and removed
  uint64_t stalls = 0;                          // writes that waited for compaction
  uint64_t live_records = 0, dead_records = 0;  // dead: all places of segments that are not live
  uint64_t segments = 0;
  uint64_t bytes = 0;       // of files
  uint64_t live_bytes = 0;  // blocks that the live records would fill
  uint64_t damaged_segments = 0;
  std::string compaction_failure;  // of the last step that failed
};

// A block that recovery left out.
struct DroppedBlock {
  std::string path;
  uint64_t offset;
  std::string reason;
};

// What opening a log that exists found in its files.
struct RecoveryReport {
  static constexpr size_t kMostListed = 1000;

  uint64_t segments = 0;
  uint64_t blocks = 0;      // good ones
  uint64_t records = 0;     // in them
  uint64_t superseded = 0;  // records of which there is a newer one, or an erasure
  uint64_t erasures = 0;
  uint64_t dropped = 0;                      // blocks that are torn or do not belong there
  std::vector<DroppedBlock> dropped_blocks;  // the first kMostListed
};

}  // namespace hotbed
