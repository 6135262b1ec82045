// One store of a row log: records of one size, of one or several tables, as a tier.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "base/tier.hpp"
#include "log/log_format.hpp"
#include "log/log_index.hpp"
#include "log/log_reports.hpp"
#include "log/log_writer.hpp"

namespace hotbed {

class RowLogCore;

// Records go into a buffer, get their locations at once, and are written when the buffer is full. A
// record that is written again dies where it was. Compaction moves what lives in the segment with
// the least into segments of its own, so that rows that are seldom written gather there.
//
// A location found under the lock stays readable without it: a reader keeps the segments (and the
// buffers) of that moment alive, and a file that is removed stays while a descriptor is open.
//
// Threading: every public member may be called by several threads at once. Reads run beside
// everything else and hold no lock while they wait for the disk; writes and erasures run one after
// another.
class LogTier : public Tier {
 public:
  LogTier(RowLogCore& core, size_t store, const LogStore& described);
  ~LogTier() override;

  int64_t record_bytes() const override { return layout_.record_bytes; }

  // Throws TierError where a block cannot be read or is not what was written, naming file and
  // offset, and std::invalid_argument for tables and ids that there are not. `records` and `found`
  // are undefined then.
  void read(std::span<const RowKey> keys, uint8_t* records, bool* found) override;

  void holds(std::span<const RowKey> keys, bool* found) const override;
  // By segment, the oldest first. Compaction rests while it lives, and rows may be written.
  std::unique_ptr<RecordScan> scan(std::span<const int32_t> tables, uint64_t since = 0) override;
  std::unique_ptr<TierSnapshot> snapshot(std::span<const int32_t> tables, uint64_t since) override;
  bool has_snapshots() const override { return true; }
  std::optional<uint64_t> moment() const override;

  // Throws TierError (a full disk, say) with the tier as it was, also OutOfMemory.
  void write(std::span<const RowKey> keys, const uint8_t* records) override;

  void erase(std::span<const RowKey> keys) override;
  int64_t rows(int32_t table) const override;
  void ids(int32_t table, int64_t* out) const override;
  uint64_t memory_bytes() const override;
  uint64_t index_bytes() const override;
  uint64_t most_bytes_beside_index(uint64_t budget) const override;
  void sync() override;
  TierTraffic traffic() const override;

  // As of RowLog, of the log that this is a part of.
  bool link(const std::string& folder) override;
  bool adopt(const std::string& folder) override;

  const LogStore& described() const { return described_; }
  const BlockLayout& layout() const { return layout_; }
  StoreStatistics statistics() const;

  // Moves the live records of one segment, if that gains space, and removes it. False if there was
  // nothing to gain. Throws TierError; nothing is lost then.
  bool compact_step();

  // Whether files take more space than they should, as far as compaction can help.
  bool compaction_due() const;

 private:
  friend class RowLogCore;
  uint64_t segment_bytes() const;
  using Segments = std::vector<std::shared_ptr<LogSegment>>;  // by slot; null where free

  // A place to append at. Changed by one thread at a time: under append_mutex_ or compact_mutex_.
  struct Stream {
    std::shared_ptr<LogSegment> segment;
    uint32_t next_block = 0;  // of the segment, behind the buffer
    std::shared_ptr<LogBuffer> buffer;
    uint32_t block = 0;   // the one being filled, in the buffer
    uint32_t filled = 0;  // records in it
    std::deque<std::shared_ptr<LogSegment>> spare;
  };

  // One read of blocks that follow each other; the wanted records [begin, end) lie in them.
  struct Request {
    const LogSegment* segment;
    uint32_t first_block, blocks;
    size_t begin, end;
  };
  struct Reading;
  struct Moving;
  class Scan;
  struct Recovering;

  // --- log_tier.cpp ---
  uint64_t room(const Stream& stream) const;
  uint64_t segments_for(const Stream& stream, uint64_t records) const;
  void make_room(Stream& stream, uint64_t records);
  std::shared_ptr<LogSegment> create_segment();
  uint64_t room_in_buffer(Stream& stream);
  uint8_t* begin_block(Stream& stream, BlockKind kind);
  void end_block(Stream& stream);
  void open_segment(Stream& stream);
  void open_buffer(Stream& stream);
  void seal(Stream& stream);
  uint32_t place(Stream& stream, const RecordHeader& header, const uint8_t* record);
  void place_erasures(Stream& stream, std::vector<Erasure>& erasures, bool all);
  void written(const std::shared_ptr<LogBuffer>& buffer);
  void await_space(std::unique_lock<std::mutex>& appending, uint64_t records);
  void died(uint32_t location);
  void seal_for_sync();
  std::vector<std::shared_ptr<LogSegment>> take_unsynced();
  uint64_t segment_limit() const;
  uint64_t live_bytes() const;
  bool wants_compaction() const;

  // --- log_read.cpp ---
  uint64_t take_from_buffers(Reading& reading);
  void fetch(Reading& reading);
  Request next_request(const Reading& reading, size_t begin, uint32_t most_blocks) const;
  bool unpack(Reading& reading, const Request& request, const uint8_t* blocks);
  void read_again(Reading& reading, const Request& request, IoQueue& queue);

  // --- log_compaction.cpp ---
  std::shared_ptr<LogSegment> choose_victim();
  bool empty_segment(LogSegment& victim);
  void take_block(Moving& moving, uint32_t number, const uint8_t* block);
  void move_batch(Moving& moving);
  void remove_segment(const std::shared_ptr<LogSegment>& victim);

  // --- log_link.cpp ---
  void end_segment(Stream& stream);
  std::vector<std::shared_ptr<LogSegment>> end_segments();
  void forget_all();

  // --- log_recovery.cpp ---
  void recover(const SegmentFiles& files, const BlocksOfSegments* linked, RecoveryReport& report);
  void scan(Recovering& recovering, LogSegment& segment);
  void take_recovered(Recovering& recovering, LogSegment& segment, uint64_t offset,
                      const uint8_t* block);

  RowLogCore& core_;
  const uint8_t store_;
  const LogStore described_;
  const BlockLayout layout_;
  const uint32_t segment_blocks_;
  const uint64_t segment_records_;

  // Locks are taken in the order in which they stand here.
  std::mutex compact_mutex_;
  mutable std::mutex append_mutex_;
  Stream fresh_;                         // of write(), under append_mutex_
  std::vector<Erasure> to_erase_;        // not yet in a block, under append_mutex_
  Stream moved_;                         // of compaction, under compact_mutex_
  std::vector<Erasure> erasures_moved_;  // under compact_mutex_

  mutable std::shared_mutex state_;
  LogIndex index_;
  std::shared_ptr<const Segments> segments_;
  std::vector<std::shared_ptr<LogBuffer>> buffers_;  // filling, sealed or failed
  uint64_t next_number_ = 1;
  uint64_t sequence_ = 0;
  uint64_t live_ = 0;
  uint64_t segment_count_ = 0;
  std::vector<Scan*> scans_;      // alive
  bool nothing_to_gain_ = false;  // compaction said so, since the last segment was created
  std::condition_variable_any space_;
  StoreStatistics counted_;
};

}  // namespace hotbed
