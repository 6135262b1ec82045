// Full blocks on their way from memory to the segments of a log.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "log/io_engine.hpp"
#include "log/log_format.hpp"

namespace hotbed {

// One file of a store.
struct LogSegment {
  LogSegment(std::shared_ptr<IoFile> opened, uint64_t its_number, uint32_t its_slot)
      : file(std::move(opened)), number(its_number), slot(its_slot) {}

  const std::shared_ptr<IoFile> file;
  const uint64_t number;  // rises with time; never used twice in a store
  const uint32_t slot;    // its locations are slot * (records of a segment) and following

  std::atomic<uint64_t> newest{0};  // sequence number of its records

  // Guarded by the lock of the store.
  uint64_t live = 0;  // records that are the newest of their rows
  uint64_t erasures = 0;
  uint32_t blocks = 0;     // that have something, the first ones
  uint32_t unwritten = 0;  // buffers
  bool open = true;        // records may still be added
  bool unsynced = false;   // written to since the last sync began
  bool damaged = false;    // a block with live records cannot be read
};

// Blocks that follow each other in a segment and are not yet there. Records and provisional headers
// (kind, count, sequence) are put in by one thread; where a record is in place, others may read it.
struct LogBuffer {
  std::shared_ptr<LogSegment> segment;
  uint32_t first_block = 0;
  uint32_t blocks = 0;  // that fit; once sealed, that are used
  uint8_t* data = nullptr;
  const BlockLayout* layout = nullptr;
  BlockHeader header{};  // log, segment and store of its blocks
  std::function<void(const std::shared_ptr<LogBuffer>&)> written;
  uint64_t ticket = 0;
};

struct LogWriterStatistics {
  uint64_t waits = 0;      // for a free buffer
  uint64_t in_flight = 0;  // buffers sealed and not yet written
  uint64_t most_in_flight = 0;
  uint64_t failed = 0;  // buffers that wait for space or a working disk
};

// Writes sealed buffers in a thread of its own. A buffer whose write fails stays in memory, is read
// from there, and is tried again by settle() and wait().
//
// Threading: every member may be called by several threads at once.
class LogWriter {
 public:
  // At most `buffers` buffers of `buffer_bytes` bytes, more only while writes fail.
  LogWriter(IoEngine& engine, uint64_t buffer_bytes, unsigned buffers);
  ~LogWriter();

  // Ends the thread, after everything sealed was tried. Buffers may still come back.
  void stop();

  uint64_t buffer_bytes() const { return buffer_bytes_; }

  // A buffer with memory that is all zeros. Waits for one to be written when all are in use.
  std::shared_ptr<LogBuffer> take();

  // The buffer is complete: checksums are made, and it is written.
  void seal(std::shared_ptr<LogBuffer> buffer);

  // Where writes failed, tries them again. Throws TierError where they fail again.
  void settle();

  // Until everything sealed so far is written. Throws TierError where that fails.
  void wait();

  LogWriterStatistics statistics() const;
  // How many buffers of a size there are where each of `stores` may be filling two.
  static uint64_t buffers(uint64_t append_bytes, uint64_t buffer_bytes, uint64_t stores) {
    return std::max<uint64_t>(2, append_bytes / buffer_bytes) + 2 * stores;
  }
  uint64_t memory_bytes() const;

 private:
  void work();
  void write(IoQueue& queue);
  void await(std::unique_lock<std::mutex>& lock, uint64_t ticket);
  void give_back(LogBuffer* buffer);

  IoEngine& engine_;
  const uint64_t buffer_bytes_;
  const size_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::deque<std::shared_ptr<LogBuffer>> sealed_;
  std::vector<std::shared_ptr<LogBuffer>> failed_;
  std::set<uint64_t> outstanding_;  // tickets sealed and not written
  uint64_t next_ticket_ = 1;
  std::vector<uint8_t*> free_;
  size_t allocated_ = 0;
  bool failing_ = false;
  std::string failure_, failed_path_;
  uint64_t failed_bytes_ = 0;
  bool stopping_ = false;
  bool ready_ = false;  // the thread
  std::exception_ptr unready_;
  LogWriterStatistics statistics_;
  std::thread thread_;
};

}  // namespace hotbed
