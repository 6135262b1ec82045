// Compiled once for each instruction set, with HOTBED_ISA naming it. Only what lies in the inner
// namespace or is `static` may be defined here: anything else would be merged by the linker with
// the copy of another instruction set.
#include "kernels.hpp"

#define HOTBED_STRING_OF(x) #x
#define HOTBED_STRING(x) HOTBED_STRING_OF(x)

namespace hotbed::HOTBED_ISA {

Kernels table() {
  Kernels kernels{};
  kernels.isa = HOTBED_STRING(HOTBED_ISA);
  return kernels;
}

}  // namespace hotbed::HOTBED_ISA
