// Which instruction set kernels use, and how one source is compiled for each.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxserve {

enum class Isa { kGeneric, kAvx2, kAvx512 };

// The best that the machine has. JAXSERVE_CPU_ISA=avx512|avx2|generic asks for another one.
Isa isa();

}  // namespace jaxserve
