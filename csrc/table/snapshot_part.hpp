// What a snapshot of tables consists of: where rows are read, and who keeps those that change.
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

// What the parts of a snapshot share: a thread that copies rows, and those that change them and
// copy what they find there first, one at a time.
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
  bool broken = false;  // some changed unseen, or found no memory
  std::chrono::nanoseconds waited{0};
};

// One table's part: copies rows that are about to change.
class TableKeeper : public RowKeeper {
 public:
  // `place`: the table's, in the snapshot.
  TableKeeper(std::shared_ptr<SnapshotRoom> room, Table& table, size_t place, int64_t rows);

  void keep(const int64_t* slots, int64_t n) override;
  bool wait(bool all, std::chrono::milliseconds most) override;
  void lose() override;
  std::unique_lock<std::mutex> pause() const override;

 protected:
  friend class Snapshot;
  friend class SpaceSnapshot;

  // Under the mutex of the room, as is all that follows. Of rows in these slots (null: in the first
  // n) those that are to be copied, and are so now.
  virtual void choose(const int64_t* slots, int64_t n) = 0;
  // `more`: rows that are to be kept, for which there may be room.
  RecordParts& kept_with_room(int64_t more);
  void keep_chosen();
  std::unique_ptr<RecordParts> take_kept();

  const std::shared_ptr<SnapshotRoom> room_;
  Table& table_;  // which has this, or the snapshot has both
  const size_t place_;
  const RecordLayout layout_;
  const int64_t at_once_;  // rows that are kept together
  std::vector<int64_t> chosen_;

 private:
  std::deque<std::unique_ptr<RecordParts>> kept_;
};

// Where the rows of some tables lie together, read in the order in which they lie.
class SnapshotSource {
 public:
  struct Rows {
    size_t place = 0;  // of their table
    std::unique_ptr<RecordParts> parts;
  };

  virtual ~SnapshotSource() = default;
  // Whether there are more: the next rows of one table, or none yet. Under `lock` of the room,
  // which others may have in between.
  virtual bool next(std::unique_lock<std::mutex>& lock, Rows& rows) = 0;
  // Nobody wants the rest.
  virtual void stop() = 0;
  // Nothing is kept any more; while somebody has the tables alone.
  virtual void end() = 0;
};

}  // namespace hotbed
