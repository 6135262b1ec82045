// The vector code, compiled once per instruction set and chosen at run time.
//
// Every kernel works on a range [begin, end) of its task's rows, on the calling thread; splitting
// work over threads is the caller's business (pool.cpp, reduce.cpp, update.cpp). All instruction
// sets give the same bits: no contraction, no reassociation, and where columns are summed, sixteen
// running sums in fixed order (see kernels/lanes.inl).
#pragma once

#include <string>

#include "base/dtype.hpp"
#include "kernels/initial_spec.hpp"
#include "kernels/missed_steps.hpp"
#include "kernels/rule.hpp"
#include "kernels/stored_rows.hpp"

namespace hotbed {

// One feature's part of the forward pass, as the kernel sees it.
struct GatherTask {
  const uint8_t* rows;
  const uint8_t* scratch;
  DType dtype;
  int64_t dim;
  const int64_t* slots;
  const int64_t* offsets;
  int64_t fixed;
  const void* weights;
  Combiner combiner;
  int64_t padding_slot;
  bool may_skip;  // some slot may be padding, or lie in scratch
  bool stream;    // the outputs of this call exceed the caches
  void* out;
  int64_t out_stride;
  void* inverse;    // or nullptr
  int32_t* argmax;  // combiner max only
  int64_t base;     // position of slots[0] within its table
};

// One feature's gradient, as the kernel sees it. data == nullptr: the feature took no part.
struct GradientSource {
  const void* data;
  int64_t stride;
  const void* weights;    // per position of the feature, or nullptr
  const void* inverse;    // per bag, or nullptr
  const int32_t* argmax;  // per bag and column, or nullptr
  int64_t base;           // first position of the feature within its table
};

struct ReduceTask {
  const int32_t* groups;  // in_order: the unique slot of each position, -1: none
  bool wide;              // double instead of float
  int64_t dim;
  const int32_t* starts;
  const int32_t* order;
  const int32_t* bag_of;       // nullptr: bag = position
  const uint16_t* feature_of;  // nullptr: there is one feature
  const GradientSource* sources;
  bool plain;    // one feature, neither weights nor inverse nor argmax
  void* values;  // unique x dim
};

struct Kernels {
  const char* isa;

  // First values of rows (kernels/initial.inl); `spec` comes from initial_spec. Arguments as of
  // hotbed::initial_rows.
  void (*initial_rows)(const InitialSpec& spec, const int64_t* ids, int64_t first_id, int64_t n,
                       int64_t dim, DType dtype, void* rows);

  // Codecs over n values (kernels/codec.inl); float32 is copied, float64 is not for them. The
  // stochastic one takes one random word a value.
  void (*encode_values)(DType dtype, const float* values, int64_t n, void* out);
  void (*encode_values_stochastic)(DType dtype, const float* values, const uint32_t* random,
                                   int64_t n, void* out);
  void (*decode_values)(DType dtype, const void* values, int64_t n, float* out);
  // int8.inl: one row. At random it rounds up with the probability of what is cut off, which is
  // decided by the seed and the row.
  void (*encode_int8)(const float* row, int64_t width, bool at_random, uint64_t seed, void* out);
  void (*decode_int8)(const void* in, int64_t width, float* row);
  // rules.inl: optimizer rules over the rows of one table (update.cpp).
  void (*update_rows)(const RowUpdate& task, int64_t begin, int64_t end, void* scratch);
  int64_t (*first_non_finite)(const void* values, bool is_double, int64_t count);
  // catch_up.inl: the effect of missed steps on one row (catch_up.cpp).
  void (*catch_up_row)(const RuleOptions& options, const MissedSteps& missed, DType dtype,
                       int64_t dim, void* weights, void* const* states, uint64_t stream,
                       void* scratch);
  // pool.hpp: bags [begin, end) of one feature.
  void (*gather)(const GatherTask& task, int64_t begin, int64_t end);
  // One row as `dim` numbers of the compute type; a slot below 0 lies in scratch.
  void (*read_row)(const uint8_t* rows, const uint8_t* scratch, DType dtype, int64_t dim,
                   int64_t slot, void* out);

  // reduce.hpp: unique slots [begin, end) of one table, by the transposed index.
  void (*reduce)(const ReduceTask& task, int64_t begin, int64_t end);
  // The same for a whole table of `positions` positions, in the order of the batch.
  void (*reduce_in_order)(const ReduceTask& task, int64_t positions);

  // stored_rows.inl: bags [begin, end) of one lookup of rows that lie in files.
  void (*pool_stored)(const StoredTask& task, int64_t begin, int64_t end);
};

// The best set this processor has, or the one named by use_kernels or by the variable HOTBED_ISA.
const Kernels& kernels();

// "base", "avx2", "avx512" or "best"; false where the build or the processor lacks it.
bool use_kernels(const std::string& isa);

}  // namespace hotbed
