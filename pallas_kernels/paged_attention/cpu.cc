// paged_attention on CPUs: softmax attention over the paged cache with an online softmax, one token's heads at a time.
#include <algorithm>
#include <cmath>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/team.h"
#include "../kv_write/pool.h"

namespace jaxserve {
namespace {

// Keys or values [pages, B, K, H].
struct Cache {
  const void* data;
  bool bf16;
  int64_t page, heads, head_dim;
};

// The query heads of one token that read key head `key_head` at the positions first <= j <= last.
struct Query {
  const int32_t* table;
  int64_t key_head, heads, first, last;
  float softcap;
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../paged_attention/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

ffi::Error paged_attention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> lengths, ffi::Result<ffi::AnyBuffer> o,
                           float scale, int64_t window, float softcap, int64_t layer) {
  const auto shape = q.dimensions();
  const Pool pool(k, layer);
  const int64_t seqs = lengths.element_count(), pages_per_seq = seqs ? tables.element_count() / seqs : 0;
  const bool fits = shape.size() == 3 && pool.fits && k.element_count() == v.element_count() &&
                    shape[2] == pool.head_dim && pool.heads > 0 && shape[1] % pool.heads == 0 &&
                    static_cast<int64_t>(starts.element_count()) == seqs + 1 && o->element_count() == q.element_count();
  if (!fits) return invalid("paged_attention: the operands do not fit each other");

  const int64_t tokens = shape[0], query_heads = shape[1], head_dim = shape[2], key_heads = pool.heads;
  const int64_t heads = query_heads / key_heads, width = (head_dim + 15) / 16 * 16;
  const auto cache = [&](const ffi::AnyBuffer& array) {
    const bool bf16 = array.element_type() == ffi::BF16;
    const char* const first = static_cast<const char*>(array.untyped_data()) + layer * pool.size() * (bf16 ? 2 : 4);
    return Cache{first, bf16, pool.page, key_heads, head_dim};
  };
  const Cache keys = cache(k), values = cache(v);
  const bool wide = q.element_type() == ffi::F32;
  const int32_t* const start = starts.typed_data();

  // No page outside the pool is read, whatever the table says.
  for (int64_t s = 0; s < seqs; ++s) {
    if (start[s + 1] <= start[s]) continue;
    const int64_t used = (lengths.typed_data()[s] + pool.page - 1) / pool.page;
    const int64_t earliest = lengths.typed_data()[s] - (start[s + 1] - start[s]);
    const int64_t unread = window > 0 ? std::max<int64_t>(earliest - window + 1, 0) / pool.page : 0;
    const int32_t* const table = tables.typed_data() + s * pages_per_seq;
    if (used > pages_per_seq) return invalid("paged_attention: a context is longer than its block table");
    for (int64_t p = unread; p < used; ++p) {
      if (table[p] < 0 || table[p] >= pool.pages) return invalid("paged_attention: a block table names a page outside the pool");
    }
  }

  Team::get().each(tokens * key_heads, [&](int64_t item, int) {
    const int64_t token = item / key_heads, key_head = item % key_heads;
    const int64_t at = (token * query_heads + key_head * heads) * head_dim;
    float* const padded_q = static_cast<float*>(Team::scratch((heads * (2 * width + 2) + 32 * width) * sizeof(float), 1));
    float* const out = padded_q + heads * width;
    const int64_t s = std::upper_bound(start, start + seqs + 1, token) - start - 1;
    if (s < seqs) {
      for (int64_t n = 0; n < heads; ++n) {
        for (int64_t h = 0; h < width; ++h) {
          const int64_t from = at + n * head_dim + h;
          const float value = h >= head_dim ? 0.0f
                              : wide        ? static_cast<const float*>(q.untyped_data())[from]
                                            : bf16_to_float(static_cast<const uint16_t*>(q.untyped_data())[from]);
          padded_q[n * width + h] = value * scale;
        }
      }
      const int64_t last = lengths.typed_data()[s] - start[s + 1] + token;
      const int64_t first = window > 0 ? std::max<int64_t>(last - window + 1, 0) : 0;
      const Query query{tables.typed_data() + s * pages_per_seq, key_head, heads, first, last, softcap};
      JAXSERVE_DISPATCH(attend, query, keys, values, padded_q, out, out + heads * width);
    } else {
      std::fill(out, out + heads * width, 0.0f);  // padding
    }
    for (int64_t n = 0; n < heads; ++n) {
      for (int64_t h = 0; h < head_dim; ++h) {
        const int64_t to = at + n * head_dim + h;
        const float value = out[n * width + h];
        if (wide) static_cast<float*>(o->untyped_data())[to] = value;
        else static_cast<uint16_t*>(o->untyped_data())[to] = float_to_bf16(value);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, jaxserve::paged_attention,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("layer"));
