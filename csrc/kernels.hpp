// The vector code, compiled once per instruction set and chosen at run time.
//
// Every kernel works on a range [begin, end) of its task's rows, on the calling thread; splitting
// work over threads is the caller's business (pool.cpp, reduce.cpp, update.cpp). All instruction
// sets give the same bits: no contraction, no reassociation, and where columns are summed, sixteen
// running sums in fixed order (see kernels/lanes.inl).
#pragma once

#include <string>

#include "common.hpp"

namespace hotbed {

struct Kernels {
  const char* isa;
};

// The best set this processor has, or the one named by use_kernels or by the variable HOTBED_ISA.
const Kernels& kernels();

// "base", "avx2", "avx512" or "best"; false where the build or the processor lacks it.
bool use_kernels(const std::string& isa);

}  // namespace hotbed
