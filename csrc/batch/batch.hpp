// Resolve: the ids of one batch become slots, and positions that share a slot are brought together.
//
// A Batch lives from the forward that made it to the backward that uses it. After resolve() it
// reads the caller's offsets and weights only in pool(); what backward needs it owns.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "base/memory.hpp"
#include "batch/claim.hpp"
#include "batch/table_batch.hpp"
#include "table/table.hpp"

namespace hotbed {

// One feature's input as the caller gives it.
struct FeatureInput {
  int table;  // index into the tables of the batch
  Combiner combiner;
  const void* ids;  // `count` of int32 (id_bytes 4) or int64 (8)
  int id_bytes;
  int64_t count;
  const int64_t* offsets;  // bags + 1 of them, or nullptr: every bag has `fixed` ids
  int64_t fixed;
  int64_t bags;
  const void* weights;  // `count` of the table's compute type, or nullptr
};

// What is wrong with an input; feature < 0 means nothing is.
struct InputFault {
  enum Kind : int {
    none = 0,
    id_range = 1,
    offsets_start = 2,
    offsets_falling = 3,
    offsets_end = 4
  };
  Kind kind = none;
  int feature = -1;
  int64_t bag = 0;    // the sample
  int64_t value = 0;  // the id, or the offset
  int64_t bound = 0;  // rows, or the number of values, or the offset before
};

struct FeatureBatch {
  FeatureInput input;
  int64_t base = 0;  // first position within its table
  Buffer<int64_t> owned_offsets;
  bool scaled = false;      // inverse holds what a bag's sum is multiplied by in backward
  Buffer<uint8_t> inverse;  // bags of compute type: 1/length, 1/sum of weights, ...
  Buffer<int32_t> argmax;   // combiner max: bags x dim, the position chosen, or -1
};

class Batch {
 public:
  Batch(std::vector<std::shared_ptr<Table>> tables, std::vector<FeatureInput> inputs);
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // Looks for faults without changing anything. Must come, and find none, before resolve().
  InputFault check() const;

  // Gives every position its slot. `insert`: absent ids of dynamic tables that are not frozen get
  // rows; otherwise they are read from scratch and nothing is stored. `transpose`: a gradient will
  // come. Throws OutOfMemory with every table as it was.
  void resolve(bool insert, bool transpose);

  // Look-ahead: resolve(true, true) in steps, on a thread of its own. group() reads the ids; what
  // announce() has made known comes again in admit(), which is false where rows do not fit yet;
  // consume() is for the training thread, admits what is not, and must be the last.
  void group();
  void announce();
  bool admit();
  void consume();
  bool admitted() const { return claim_ && claim_->admitted(); }

  // The first feature of `now`, a batch over the same tables that nobody has checked, which asks
  // for something else than group() has read here; -1: none does. (Ids of frozen tables are read
  // again where they were.)
  int64_t first_difference(const Batch& now) const;
  // Weights come from where that batch has them.
  void use_weights_of(const Batch& now);

  // Before a gradient of a batch that was only read: finds the slots of its rows, which those of
  // tiered tables keep while the claim lives, without storing any. False where some ids have no
  // row. Throws OverBudget, TierError.
  bool find_slots();

  // What keeps the rows of tiered tables in their slots; null where there is none. Whoever keeps a
  // gradient of this batch keeps it too.
  const std::shared_ptr<Claim>& claim() const { return claim_; }

  // Copies what backward would otherwise read from the caller's arrays of ids and offsets. After
  // resolve(), where gradients of weights will be asked for.
  void keep_inputs();

  std::vector<std::shared_ptr<Table>> tables;
  std::vector<FeatureBatch> features;
  std::vector<TableBatch> parts;  // one per table
  int64_t positions = 0;          // of all tables

 private:
  void unpool_unpooled();
  void refuse_growth();
  void resolve_part(TableBatch& part, bool insert, bool transpose);
  const int64_t* ids_of(const TableBatch& part, Buffer<int64_t>& copy) const;
  bool grows(const TableBatch& part) const;
  template <class F>
  std::exception_ptr in_parallel(F f);
  void count_trained();

  std::shared_ptr<Claim> claim_;
};

}  // namespace hotbed
