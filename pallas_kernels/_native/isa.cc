#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace jaxserve {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vnni");
  const Isa best = avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kGeneric;
#else
  const Isa best = Isa::kGeneric;
#endif
  const char* forced = std::getenv("JAXSERVE_CPU_ISA");
  if (forced == nullptr) return best;
  Isa wanted = Isa::kGeneric;
  if (!std::strcmp(forced, "avx512")) wanted = Isa::kAvx512;
  if (!std::strcmp(forced, "avx2")) wanted = Isa::kAvx2;
  return wanted < best ? wanted : best;  // never one that the machine lacks
}

}  // namespace

Isa isa() {
  static const Isa chosen = detect();
  return chosen;
}

}  // namespace jaxserve

// For Python: 0 generic, 1 AVX2, 2 AVX512.
extern "C" int jaxserve_isa() { return static_cast<int>(jaxserve::isa()); }
