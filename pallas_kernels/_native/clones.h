// Compiles the file JAXSERVE_KERNEL once for each instruction set, into the namespaces jaxserve::avx512, avx2 and generic.
//
// The whole file is compiled under each target, helpers included: a function compiled for the plain target keeps its narrow
// vectors when it is inlined into one for a wider target. JAXSERVE_AVX512 and JAXSERVE_AVX2 say which it is: the compiler's own
// macros do not, since GCC before 13 reads a whole C++ file for the plain target before it looks at any pragma.

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni,f16c,fma")
#define JAXSERVE_AVX512 1
namespace jaxserve::avx512 {
namespace {
#include JAXSERVE_KERNEL
}  // namespace
}  // namespace jaxserve::avx512
#undef JAXSERVE_AVX512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#define JAXSERVE_AVX2 1
namespace jaxserve::avx2 {
namespace {
#include JAXSERVE_KERNEL
}  // namespace
}  // namespace jaxserve::avx2
#undef JAXSERVE_AVX2
#pragma GCC pop_options

#endif

namespace jaxserve::generic {
namespace {
#include JAXSERVE_KERNEL
}  // namespace
}  // namespace jaxserve::generic

#if defined(__x86_64__)
// Calls FUNCTION as it was compiled for the instruction set in use.
#define JAXSERVE_DISPATCH(FUNCTION, ...)                                     \
  (::jaxserve::isa() == ::jaxserve::Isa::kAvx512 ? avx512::FUNCTION(__VA_ARGS__) \
   : ::jaxserve::isa() == ::jaxserve::Isa::kAvx2 ? avx2::FUNCTION(__VA_ARGS__)   \
                                                 : generic::FUNCTION(__VA_ARGS__))
#else
#define JAXSERVE_DISPATCH(FUNCTION, ...) generic::FUNCTION(__VA_ARGS__)
#endif
