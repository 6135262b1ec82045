// Who may touch the rows of a table: many that read, or one that writes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "table/table.hpp"

namespace hotbed {

// A thread's hold on the rows of some tables, all taken together or none, so that nobody waits for
// another who waits for him. A thread that has rows to itself may take them again.
//
// Threads: release() and share() are for the thread that took it. In a forked child nothing is
// held.
class Hold {
 public:
  // `alone`: nobody else reads or writes them.
  Hold(std::vector<std::shared_ptr<Table>> tables, bool alone);
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }
  // For a forward: alone where it may give ids a row, bring rows to slots, or bring them up to
  // date.
  static std::unique_ptr<Hold> of_forward(std::vector<std::shared_ptr<Table>> tables,
                                          bool training);

  // True where it could be had at once.
  bool try_take();
  void take();
  // What was written can be read by others from now on, and is written by nobody.
  void share();
  void release();

 private:
  bool ready(bool nested) const;
  bool take_now();
  void refuse_unless_possible();

  std::vector<std::shared_ptr<Table>> tables_;
  std::vector<RowLock*> mine_;  // those that this thread did not have already
  bool alone_;
  bool taken_ = false;
  uint64_t process_ = 0;
};

}  // namespace hotbed
