// The rows of tables as they were at one moment, read while they change.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "table/snapshot_part.hpp"

namespace hotbed {

// Begun while somebody holds the tables and ended while somebody has them alone; in between rows
// are taken on any thread, and nobody holds anything for it.
class Snapshot {
 public:
  // Whether rows of these tables can be read while others change them.
  static bool can_read(const std::vector<std::shared_ptr<Table>>& tables);

  // Of tables that can be read. A chunk has at most `most` rows. `since`: as of a RecordStream;
  // rows are as they are stored. `bytes`: of rows that wait to be taken. Throws TierError,
  // OutOfMemory.
  Snapshot(std::vector<std::shared_ptr<Table>> tables, int64_t most, uint64_t bytes,
           std::vector<uint64_t> since = {});
  ~Snapshot();

  // As RecordStream::next(), to be kept. Throws TierError where rows changed unseen.
  std::unique_ptr<RecordParts> next(size_t& table);
  // Nobody wants the rest; changes wait no more.
  void stop();
  // Tables forget it.
  void end();

  // How long changes have waited.
  std::chrono::nanoseconds waited() const;

 private:
  const std::vector<std::shared_ptr<Table>> tables_;
  std::shared_ptr<SnapshotRoom> room_;
  std::vector<std::shared_ptr<TableKeeper>> keepers_;
  std::vector<std::shared_ptr<SnapshotSource>> sources_;
  size_t reading_ = 0;  // of the sources
};

}  // namespace hotbed
