// A batch's hold on the slots of tiered tables.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "batch/table_batch.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

// Announced, then admitted, then consumed; when it goes, its rows may be evicted, and what was
// announced and not admitted is forgotten. Claims are admitted in the order of announcement.
//
// Threads: one at a time; the destructor may run on any.
class Claim {
 public:
  // Over the parts whose tables live in row spaces and take part. The parts' unique_ids are read by
  // announce() and admit_now(), their unique_slots written when they are admitted.
  explicit Claim(const std::vector<TableBatch*>& parts);
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  ~Claim();

  bool admitted() const { return admitted_; }

  void announce();
  // False where some of it does not fit yet beside what is pinned, or where another claim that was
  // announced before it is not admitted; what does fit stays pinned. Throws TierError, after which
  // admit_now() is its way.
  bool admit();
  // Admits all of it, out of turn if need be, or throws OverBudget or TierError; may be tried
  // again.
  void admit_now();
  // The slots of rows that exist nowhere yet become -1.
  void leave_out_new();
  // A forward uses it. `ahead`: it need not have waited.
  void consume(bool ahead);
  // All its rows were written.
  void mark_dirty();

 private:
  struct Share {
    std::shared_ptr<RowSpace> space;
    std::vector<TableBatch*> parts;
    int64_t batch = 0;
    bool admitted = false;
    std::vector<TableIds> ids() const;
    void hand_out(const std::vector<int64_t>& slots) const;
    int64_t count() const;
    void retract();
  };

  std::vector<OverBudget::Need> needs(const Share& first) const;

  std::vector<Share> shares_;
  bool admitted_ = false;
};

}  // namespace hotbed
