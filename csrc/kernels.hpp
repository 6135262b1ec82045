// The vector code, compiled once per instruction set and chosen at run time.
//
// Every kernel works on a range [begin, end) of its task's rows, on the calling thread; splitting
// work over threads is the caller's business (pool.cpp, reduce.cpp, update.cpp). All instruction
// sets give the same bits: no contraction, no reassociation, and where columns are summed, sixteen
// running sums in fixed order (see kernels/lanes.inl).
#pragma once

#include <string>

#include "common.hpp"
#include "initial.hpp"
#include "rules.hpp"

namespace hotbed {

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
  // rules.inl: optimizer rules over the rows of one table (update.cpp).
  void (*update_rows)(const RowUpdate& task, int64_t begin, int64_t end, void* scratch);
  int64_t (*first_non_finite)(const void* values, bool is_double, int64_t count);
};

// The best set this processor has, or the one named by use_kernels or by the variable HOTBED_ISA.
const Kernels& kernels();

// "base", "avx2", "avx512" or "best"; false where the build or the processor lacks it.
bool use_kernels(const std::string& isa);

}  // namespace hotbed
