// What bounds a step of one token, for benchmarks: its weights read, and a bare product with as many of them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "isa.h"
#include "team.h"

namespace jaxserve {
namespace {

constexpr int64_t kInputs = 128, kOutputs = 64, kColumns = kInputs / 8;

// A group of inputs of 64 outputs, w = scale * (code - 8). A column is eight inputs of each output in four bytes: the first
// four in their low halves, the others in their high ones. So a word of x meets sixteen outputs in one multiply-add.
struct Group {
  uint8_t codes[kColumns][kOutputs][4];
  float scale[kOutputs];
};

#if defined(__x86_64__)

// Bytes ahead of the codes in use that are asked for: the machine's own prefetching stops at the ends of its small pages.
constexpr int64_t kAhead = 8192;

// y [64] of `groups` groups; `raised` holds for each of them -8 times the sum of its x, since codes are multiplied as 0 to 15.
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void block(const Group* group, int64_t groups, const int8_t* x,
                                                                  const int32_t* raised, float* y) {
  constexpr int kVectors = kOutputs / 16;
  const __m512i low_halves = _mm512_set1_epi8(15);
  __m512 total[kVectors] = {};
  for (int64_t g = 0; g < groups; ++g, ++group) {
    __m512i dot[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) dot[v] = _mm512_set1_epi32(raised[g]);
    for (int64_t column = 0; column < kColumns; ++column, x += 8) {
      int32_t words[2];
      std::memcpy(words, x, 8);
      const __m512i first = _mm512_set1_epi32(words[0]), second = _mm512_set1_epi32(words[1]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* const from = group->codes[column][16 * v];
        _mm_prefetch(from + kAhead, _MM_HINT_T0);
        const __m512i codes = _mm512_loadu_si512(from);
        dot[v] = _mm512_dpbusd_epi32(dot[v], _mm512_and_si512(codes, low_halves), first);
        dot[v] = _mm512_dpbusd_epi32(dot[v], _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_halves), second);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[v]), _mm512_loadu_ps(group->scale + 16 * v), total[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(y + 16 * v, total[v]);
}

#endif

}  // namespace
}  // namespace jaxserve

// For Python: reads some memory with all threads and does nothing else. Returns the sum of its words.
extern "C" uint64_t jaxserve_read_memory(const uint64_t* data, int64_t words) {
  std::atomic<uint64_t> total{0};
  jaxserve::Team::get().ranges(words / 8, 2048, [&](int64_t first, int64_t last, int) {
    uint64_t sums[8] = {};
    for (int64_t line = first; line < last; ++line) {
      __builtin_prefetch(data + 8 * std::min(line + 64, words / 8 - 1));
      for (int i = 0; i < 8; ++i) sums[i] += data[8 * line + i];
    }
    for (const uint64_t sum : sums) total.fetch_add(sum, std::memory_order_relaxed);
  });
  return total.load();
}

// For Python: y [blocks, 64] = w x with w in `blocks` times `groups` groups and x int8 [groups * 128], by all threads. Sums of
// a group are of whole numbers, those of groups of floats. Returns 0, and does nothing, on a machine without AVX512-VNNI.
extern "C" int jaxserve_int4_product(const void* w, const int8_t* x, float* y, int64_t blocks, int64_t groups) {
#if defined(__x86_64__)
  using namespace jaxserve;
  if (isa() != Isa::kAvx512) return 0;
  std::vector<int32_t> raised(groups);
  for (int64_t i = 0; i < groups * kInputs; ++i) raised[i / kInputs] -= 8 * x[i];
  Team::get().ranges(blocks, 8, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) {
      block(static_cast<const Group*>(w) + i * groups, groups, x, raised.data(), y + i * kOutputs);
    }
  });
  return 1;
#else
  return 0;
#endif
}
