// What tables may take together where their rows have nowhere to go but memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace hotbed {

// Bytes that several tables share. Threads: any number.
class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t bytes) : limit_(bytes) {}

  uint64_t limit() const { return limit_; }
  uint64_t used() const;

 private:
  friend class BudgetShare;

  const uint64_t limit_;
  uint64_t used_ = 0;
};

// What one table has of a budget, until it goes. Without a budget it may have any number of bytes.
//
// Threads: one at a time; shares of one budget beside each other.
class BudgetShare {
 public:
  explicit BudgetShare(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  BudgetShare(const BudgetShare&) = delete;
  BudgetShare& operator=(const BudgetShare&) = delete;
  ~BudgetShare();

  struct Growth {
    BudgetShare* share;
    const std::string& table;
    int64_t rows;
    uint64_t bytes;  // that the share is to have
  };
  // Throws TierError, naming the table that wants most, where the shares cannot all grow so.
  static void check(std::span<const Growth> growths);

  // Has so many bytes from now on. Throws as check(), with the share as it was, where it grows.
  void become(uint64_t bytes, const std::string& table, int64_t rows);
  // Gives back what it has beyond so many.
  void shrink(uint64_t bytes);

 private:
  std::shared_ptr<MemoryBudget> budget_;
  uint64_t bytes_ = 0;
};

}  // namespace hotbed
