// paged_attention on CPUs: softmax attention over the paged cache with an online softmax, one token's heads at a time.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"
#include "../kv_write/pool.h"

namespace jaxserve {
namespace {

enum class Store { kF32, kBF16, kInt8, kInt4, kFp8 };

// Keys or values [pages, B, K, H] as `store` says; codes have a scale, and integers a minimum, a row (see KvFormat).
struct Cache {
  Store store;
  const void* data;
  const uint16_t* scale;
  const uint16_t* minimum;
  int64_t page, heads, head_dim;

  int64_t row_bytes() const {
    const int64_t bits = store == Store::kF32 ? 32 : store == Store::kBF16 ? 16 : store == Store::kInt4 ? 4 : 8;
    return head_dim * bits / 8;
  }
};

// What a code of float8_e4m3fn stands for.
struct Fp8Table {
  float numbers[256];
  Fp8Table() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
      numbers[code] = (code & 127) == 127 ? NAN : code < 128 ? size : -size;
    }
  }
};
const Fp8Table fp8;

// The query heads of one token, `heads` for each of some key heads from `key_head` on, at the positions first <= j <= last.
struct Query {
  const int32_t* table;
  int64_t key_head, key_heads, heads, first, last;
  float softcap;
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../paged_attention/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

// The keys or the values of a layer among the operands, of which there are `each`; `at` is the first. Data is null if they
// do not fit.
Cache cache_of(const ffi::RemainingArgs& arrays, std::size_t at, std::size_t each, Store store, int64_t head_dim, int64_t layer) {
  const auto codes = arrays.get<ffi::AnyBuffer>(at);
  if (!codes) return {};
  const Pool pool(*codes, layer);
  if (!pool.fits || pool.width != (store == Store::kInt4 ? head_dim / 2 : head_dim)) return {};
  if (each == 1 && codes->element_type() == ffi::BF16) store = Store::kBF16;
  const int64_t row = pool.first_slot * pool.heads, bytes = store == Store::kF32 ? 4 : store == Store::kBF16 ? 2 : 1;
  const auto* const data = static_cast<const uint8_t*>(codes->untyped_data()) + row * pool.width * bytes;
  Cache cache{store, data, nullptr, nullptr, pool.page, pool.heads, head_dim};
  for (std::size_t i = 1; i < each; ++i) {
    const auto numbers = arrays.get<ffi::Buffer<ffi::F16>>(at + i);
    if (!numbers || static_cast<int64_t>(numbers->element_count()) != pool.rows()) return {};
    (i == 1 ? cache.scale : cache.minimum) = static_cast<const uint16_t*>(numbers->untyped_data()) + row;
  }
  return cache;
}

ffi::Error paged_attention(ffi::BufferR0<ffi::S32> layer_index, ffi::AnyBuffer q, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> o, float scale,
                           int64_t window, float softcap, std::string_view format) {
  const Timed timed([] { return std::string("paged_attention"); });
  const Store store = format == "int8" ? Store::kInt8 : format == "int4" ? Store::kInt4 : format == "fp8" ? Store::kFp8 : Store::kF32;
  const std::size_t each = store == Store::kF32 ? 1 : store == Store::kFp8 ? 2 : 3;
  if (rest.size() != 2 * each + 3 || q.dimensions().size() != 3) return invalid("paged_attention: an operand is missing");
  const auto shape = q.dimensions();
  const int64_t layer = *layer_index.typed_data();
  const Cache keys = cache_of(rest, 0, each, store, shape[2], layer), values = cache_of(rest, each, each, store, shape[2], layer);
  const auto found_tables = rest.get<ffi::Buffer<ffi::S32>>(2 * each), found_starts = rest.get<ffi::Buffer<ffi::S32>>(2 * each + 1);
  const auto found_lengths = rest.get<ffi::Buffer<ffi::S32>>(2 * each + 2);
  if (!keys.data || !values.data || !found_tables || !found_starts || !found_lengths) {
    return invalid("paged_attention: an operand has a type or a shape of its own");
  }
  const auto &tables = *found_tables, &starts = *found_starts, &lengths = *found_lengths;
  const Pool pool(*rest.get<ffi::AnyBuffer>(0), layer);
  const int64_t seqs = lengths.element_count(), pages_per_seq = seqs ? tables.element_count() / seqs : 0;
  const bool fits = rest.get<ffi::AnyBuffer>(each)->dimensions() == rest.get<ffi::AnyBuffer>(0)->dimensions() && pool.heads > 0 &&
                    shape[1] % pool.heads == 0 &&
                    static_cast<int64_t>(starts.element_count()) == seqs + 1 && o->element_count() == q.element_count();
  if (!fits) return invalid("paged_attention: the operands do not fit each other");

  const int64_t tokens = shape[0], query_heads = shape[1], head_dim = shape[2], key_heads = pool.heads;
  const int64_t heads = query_heads / key_heads, width = (head_dim + 15) / 16 * 16;
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

  // With tokens enough for all threads, one takes all heads of a token: their keys lie side by side.
  Team& team = Team::get();
  const int64_t together = tokens >= 2 * team.size() ? key_heads : 1, rows = together * heads;
  const int64_t floats = 2 * rows * width + JAXSERVE_DISPATCH(attend_floats, heads, together, width);
  team.each(tokens * key_heads / together, [&](int64_t item, int) {
    const int64_t token = item * together / key_heads, key_head = item * together % key_heads;
    const int64_t at = (token * query_heads + key_head * heads) * head_dim;
    float* const padded_q = static_cast<float*>(Team::scratch(floats * sizeof(float), 1));
    float* const out = padded_q + rows * width;
    const int64_t s = std::upper_bound(start, start + seqs + 1, token) - start - 1;
    if (s < seqs) {
      for (int64_t n = 0; n < rows; ++n) {
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
      const Query query{tables.typed_data() + s * pages_per_seq, key_head, together, heads, first, last, softcap};
      JAXSERVE_DISPATCH(attend, query, keys, values, padded_q, out, out + rows * width);
    } else {
      std::fill(out, out + rows * width, 0.0f);  // padding
    }
    for (int64_t n = 0; n < rows; ++n) {
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
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<std::string_view>("format"));
