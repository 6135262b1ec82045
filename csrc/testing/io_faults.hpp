// Faults of disks: makes chosen transfers fail, and records what reached the files in which order.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "log/io_observer.hpp"

namespace hotbed {

// Counts reads and writes from 1, retries included, over all files of an engine.
//
//   faults.fail_read(3).flip_bit(5, 8 * 100 + 2).full_after(1 << 20).record();
//
// Threading: every member may be called by several threads at once.
class IoFaults : public IoObserver {
 public:
  IoFaults& fail_read(uint64_t nth, int error);
  IoFaults& fail_write(uint64_t nth, int error);
  IoFaults& fail_sync(uint64_t nth, int error);
  // The nth read or write moves no more than `bytes`.
  IoFaults& shorten_read(uint64_t nth, uint32_t bytes);
  IoFaults& shorten_write(uint64_t nth, uint32_t bytes);
  // Bit `bit` of what the nth read brings is wrong.
  IoFaults& flip_bit(uint64_t nth, uint64_t bit);
  // ENOSPC once `bytes` more were written, or once so many more were preallocated.
  IoFaults& full_after_writing(uint64_t bytes);
  IoFaults& full_after_preallocating(uint64_t bytes);
  // Lifts every "full".
  IoFaults& make_room();
  // Keeps every event from now on.
  IoFaults& record();
  // Puts a mark among the events.
  void mark(uint64_t number);

  std::vector<IoEvent> events() const;
  uint64_t reads() const;
  uint64_t writes() const;

  Verdict before_transfer(const std::string& path, bool write, uint64_t offset, const uint8_t* data,
                          uint32_t bytes) override;
  void after_transfer(const Verdict& verdict, bool write, uint8_t* data, uint32_t bytes) override;
  int before_preallocation(uint64_t bytes) override;
  int before_sync() override;
  size_t note(IoEvent event) override;

 private:
  static constexpr uint64_t kEndless = UINT64_MAX;

  mutable std::mutex mutex_;
  uint64_t reads_ = 0, writes_ = 0, syncs_ = 0;
  std::map<uint64_t, int> failing_reads_, failing_writes_, failing_syncs_;
  std::map<uint64_t, uint32_t> short_reads_, short_writes_;
  std::map<uint64_t, uint64_t> flips_;
  uint64_t writing_room_ = kEndless, preallocating_room_ = kEndless;
  bool recording_ = false;
  std::vector<IoEvent> events_;
};

}  // namespace hotbed
