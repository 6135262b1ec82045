#include <atomic>
#include <cstdlib>

#include "kernels/kernels.hpp"

namespace hotbed {

namespace base {
extern const Kernels table;
}
#ifdef HOTBED_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

const Kernels* find(const std::string& isa) {
#ifdef HOTBED_X86
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
  if ((isa == "avx512" || isa == "best") && has_avx512) return &avx512::table;
  if ((isa == "avx2" || isa == "best") && has_avx2) return &avx2::table;
#endif
  if (isa == "base" || isa == "best") return &base::table;
  return nullptr;
}

const Kernels* at_start() {
  const char* wanted = std::getenv("HOTBED_ISA");
  const Kernels* found = wanted ? find(wanted) : nullptr;
  return found ? found : find("best");
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> value{at_start()};
  return value;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool use_kernels(const std::string& isa) {
  const Kernels* found = find(isa);
  if (found) current() = found;
  return found != nullptr;
}

}  // namespace hotbed
