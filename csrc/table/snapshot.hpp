// The rows of tables as they were at one moment, read while they change.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "table/record_stream.hpp"
#include "table/table.hpp"

namespace hotbed {

// What the snapshots of several tables share: a thread that copies rows, and those that change them
// and copy what they find there first, one at a time.
struct SnapshotRoom {
  SnapshotRoom(uint64_t most_bytes, uint64_t in_process) : most(most_bytes), process(in_process) {}

  // Whether this is the process that began: others have no thread that copies.
  bool is_here() const;

  const uint64_t most;  // bytes of rows that were kept and not taken yet, beside those of a batch
  const uint64_t process;
  std::mutex mutex;  // of all that follows, and of the planes while rows are copied
  std::condition_variable moved;
  uint64_t bytes = 0;
  bool copied = false;  // all rows, or nobody wants them any more
  bool broken = false;  // some changed unseen
  std::chrono::nanoseconds waited{0};
};

// One table's part of it: rows in slots below those at the beginning, each copied once, either by
// whoever is about to change it or in the order of slots.
class TableSnapshot final : public RowKeeper {
 public:
  // `since`: as of a RecordStream.
  TableSnapshot(std::shared_ptr<SnapshotRoom> room, const Table& table, int64_t most,
                uint64_t since);

  void keep(const Table& table, const int64_t* slots, int64_t n) override;
  bool wait(bool all, std::chrono::milliseconds most) override;
  void lose() override;
  std::unique_lock<std::mutex> pause() const override;

 private:
  friend class Snapshot;

  bool wanted(const Table& table, int64_t slot) const;
  void note_forgotten(const Table& table);
  // The next rows by slot, or none.
  std::unique_ptr<RecordParts> next(const Table& table);

  std::shared_ptr<SnapshotRoom> room_;
  const RecordLayout layout_;
  const int64_t most_, limit_;
  const uint64_t since_;
  int64_t at_ = 0;                // rows below are copied
  std::vector<uint64_t> copied_;  // a bit a slot
  std::vector<int64_t> chosen_;
  std::deque<std::unique_ptr<RecordParts>> kept_;
};

// Begun while somebody holds the tables, which have their rows in planes of their own, and ended
// while somebody has them alone; in between rows are taken on any thread, and nobody holds anything
// for it.
class Snapshot {
 public:
  // A chunk has at most `most` rows. `since`: as of a RecordStream; rows are as they are stored.
  // `bytes`: of rows that wait to be taken.
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
  std::vector<std::shared_ptr<TableSnapshot>> parts_;
  std::vector<const Table*> reading_;
};

}  // namespace hotbed
