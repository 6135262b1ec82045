// How often rows are used, lately more than long ago: one small number a row that needs no ageing.
#pragma once

#include <array>
#include <cstdint>

#include "base/prefetch.hpp"
#include "base/random.hpp"
#include "base/tier.hpp"

namespace hotbed {

// A score is 8 log2 of the sum over a row's uses of 2^(time of the use), time being counted in
// half-lives: the combined recency and frequency of LRFU (Lee et al., IEEE Transactions on
// Computers 50, 2001) in logarithms. Letting time pass divides all sums alike, so scores of rows
// that are not used need no change, and any two scores compare. Score 0: never used.
//
// Threads: one user at a time.
class FrequencyClock {
 public:
  static constexpr uint16_t kScores = 4096;  // scores are below
  static constexpr uint16_t kStep = 1024;    // what lower() takes off

  // `half_life`: so many uses, of any rows, halve the weight of a use. At least 1/64 of the
  // largest number given to advance().
  explicit FrequencyClock(double half_life);

  // The score of a row with this score once it is used again. Fractions are rounded at random, so
  // that rows with high counts rise too.
  uint16_t after_use(uint16_t score) {
    uint32_t old = static_cast<uint32_t>(score) << kFraction;
    uint32_t high = old > now_ ? old : now_;
    uint32_t apart = (old > now_ ? old - now_ : now_ - old) >> kFraction;
    uint32_t gain = apart < kGains ? gains_[apart] : 0;
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    uint32_t rounded =
        (high + gain + static_cast<uint32_t>(random_ >> (64 - kFraction))) >> kFraction;
    return static_cast<uint16_t>(rounded < kScores ? rounded : kScores - 1);
  }

  // What a score stands for now: the sum over the uses of 2^-(half-lives since). 0 of score 0.
  double uses(uint16_t score) const;

  // So many rows were used. True: every score must now be replaced by lower() of it.
  bool advance(int64_t uses);

  // Rows that were last used hundreds of half-lives ago count as never used.
  static uint16_t lower(uint16_t score) { return score > kStep ? score - kStep : 0; }

 private:
  static constexpr int kFraction = 16;  // bits of now_ and gains_ behind the point
  static constexpr uint32_t kGains = 192;

  double steps_a_use_;
  double time_ = kStep;
  uint32_t now_ = kStep << kFraction;
  uint64_t random_ = 1;
  std::array<uint32_t, kGains> gains_;  // 8 log2(1 + 2^(-apart/8))
};

// The scores of rows that were evicted, so that one that returns is known: a set-associative table
// of 4-byte entries, 16 to a cache line, in which the lowest score makes way. A row may be taken
// for another with a probability of about 2^-16, which costs nothing but a worse choice.
//
// Threads: one user at a time.
class Ghosts {
 public:
  // Rounded up to whole lines; 0 remembers nothing.
  explicit Ghosts(int64_t entries) : lines_((entries + kLine - 1) / kLine) {}

  uint64_t bytes() const { return static_cast<uint64_t>(lines_) * kLine * sizeof(uint32_t); }
  // bytes() of zeros, aligned to 64, to be kept by the caller.
  void place(uint32_t* entries) { entries_ = entries; }

  HOTBED_INLINE void prefetch(const RowKey& row) const {
    if (lines_) __builtin_prefetch(line(hash_of(row)), 1);
  }
  void put(const RowKey& row, uint16_t score);
  // The score of a row, now forgotten here, or 0.
  uint16_t take(const RowKey& row);
  // FrequencyClock::lower() of everything.
  void lower();
  void clear();
  // How often entries were written so far.
  uint64_t written() const { return written_; }

 private:
  static constexpr int kLine = 16;
  static constexpr int kScoreBits = 12;
  static_assert(FrequencyClock::kScores == 1 << kScoreBits);

  static uint64_t hash_of(const RowKey& row) {
    return mix(static_cast<uint64_t>(row.id) + kGolden * (static_cast<uint64_t>(row.table) + 1));
  }
  uint32_t* line(uint64_t hash) const {
    return entries_ + ((hash >> 32) * static_cast<uint64_t>(lines_) >> 32) * kLine;
  }
  static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash) >> kScoreBits; }

  int64_t lines_;
  uint64_t written_ = 0;
  uint32_t* entries_ = nullptr;  // tag << kScoreBits | score; score 0: none
};

}  // namespace hotbed
