// kv_write on CPUs: rows of keys and values put into their slots of the caches, in place.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "../_native/handler.h"
#include "../_native/profile.h"
#include "../_native/team.h"
#include "pool.h"

namespace jaxserve {
namespace {

enum class Store { kPlain, kInt8, kInt4, kFp8 };

// Rounds to nearest, ties to even; |value| <= 448.
uint8_t float_to_fp8(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint8_t sign = uint8_t(bits >> 24) & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7f;
  if (bits >= 0x3c800000) return sign | uint8_t(((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3));
  float shifted;  // subnormal: in 2^14 + x the last bit is worth as much as the last one of the code
  std::memcpy(&shifted, &bits, 4);
  shifted += 16384.0f;
  std::memcpy(&bits, &shifted, 4);
  return sign | uint8_t(bits - 0x46800000);
}

// The arrays of the keys, or of the values, of one cache.
struct Cache {
  Store store;
  ffi::AnyBuffer data;
  Pool pool;
  uint16_t* scale;
  uint16_t* minimum;
};

// H numbers x as the codes and numbers of row `row` (see KvFormat).
template <typename Load>
void quantize(const Cache& cache, int64_t row, int64_t size, Load x) {
  uint8_t* const codes = static_cast<uint8_t*>(cache.data.untyped_data()) + row * (cache.store == Store::kInt4 ? size / 2 : size);
  float low = x(0), high = x(0);
  float nan = 0;
  for (int64_t h = 0; h < size; ++h) {
    low = std::min(low, x(h)), high = std::max(high, x(h));
    nan += x(h) - x(h);  // one that is not finite shows in the whole row
  }
  low += nan, high += nan;
  const float largest = cache.store == Store::kInt8 ? 255 : cache.store == Store::kInt4 ? 15 : 448;
  if (cache.store == Store::kFp8) high = std::max(-low, high), low = 0;
  cache.scale[row] = float_to_f16((high - low) / largest);
  const float scale = f16_to_float(cache.scale[row]), divisor = scale == 0 ? 1.0f : scale;
  if (cache.store == Store::kFp8) {
    for (int64_t h = 0; h < size; ++h) codes[h] = float_to_fp8(std::clamp(x(h) / divisor, -largest, largest));
    return;
  }
  cache.minimum[row] = float_to_f16(low);
  const float minimum = f16_to_float(cache.minimum[row]);
  const auto code = [&](int64_t h) -> uint8_t {
    const float steps = (x(h) - minimum) / divisor;
    if (!(steps > 0)) return 0;
    return static_cast<uint8_t>((std::min(steps, largest) + 12582912.0f) - 12582912.0f);  // to nearest, ties to even
  };
  if (cache.store == Store::kInt8) {
    for (int64_t h = 0; h < size; ++h) codes[h] = code(h);
  } else {
    for (int64_t h = 0; h < size; h += 2) codes[h / 2] = uint8_t(code(h) | code(h + 1) << 4);
  }
}

// Tokens whose slots are asked for at once, and from how many on the threads share them: handing over a few takes longer than
// writing them. Two tokens never have the same slot.
constexpr int64_t kAskedFor = 64, kShared = 64;

// Slots lie anywhere in memory, so their lines are asked for before the first is written. Inlined, for GCC takes a function that
// only prefetches for one that does nothing.
__attribute__((always_inline)) inline void ask_for(const Cache& cache, const ffi::Buffer<ffi::S32>& slots) {
  const Pool& pool = cache.pool;
  const int64_t tokens = std::min<int64_t>(slots.element_count(), kAskedFor);
  const int64_t bytes = pool.heads * pool.width * ffi::ByteWidth(cache.data.element_type());
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t slot = slots.typed_data()[t];
    if (!pool.fits || slot < 0 || slot >= pool.slots) continue;
    const char* const to = static_cast<const char*>(cache.data.untyped_data()) + (pool.first_slot + slot) * bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(to + at, 1, 2);
  }
}

// rows [T, K, H] into `cache` at `slots` of its layer, rounded to what it is kept in.
ffi::Error write(const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& slots, const Cache& cache) {
  const Pool& pool = cache.pool;
  const auto shape = rows.dimensions();
  const int64_t tokens = slots.element_count();
  const bool fits = pool.fits && shape.size() == 3 && tokens > 0 && shape[0] == tokens && shape[1] == pool.heads &&
                    shape[2] == pool.width * (cache.store == Store::kInt4 ? 2 : 1);
  if (!fits) return invalid("kv_write: the operands do not fit each other");
  const int64_t heads = shape[1], head_dim = shape[2], size = heads * head_dim;
  const bool from_bf16 = rows.element_type() == ffi::BF16, to_bf16 = cache.data.element_type() == ffi::BF16;
  const auto* const narrow = static_cast<const uint16_t*>(rows.untyped_data());
  const auto* const wide = static_cast<const float*>(rows.untyped_data());
  const std::size_t bytes = size * (to_bf16 ? 2 : 4);
  char* const data = static_cast<char*>(cache.data.untyped_data());
  const auto slot_of = [&](int64_t t) -> int64_t {
    const int32_t slot = slots.typed_data()[t];
    return slot < 0 || slot >= pool.slots ? -1 : pool.first_slot + slot;
  };
  auto write_tokens = [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t slot = slot_of(t);
      if (slot < 0) continue;
      void* const to = data + slot * bytes;
      if (cache.store != Store::kPlain) {
        for (int64_t n = 0; n < heads; ++n) {
          const int64_t at = (t * heads + n) * head_dim, row = slot * heads + n;
          if (from_bf16) quantize(cache, row, head_dim, [&](int64_t h) { return bf16_to_float(narrow[at + h]); });
          else quantize(cache, row, head_dim, [&](int64_t h) { return wide[at + h]; });
        }
      } else if (from_bf16 == to_bf16) {
        std::memcpy(to, static_cast<const char*>(rows.untyped_data()) + t * bytes, bytes);
      } else if (to_bf16) {
        std::transform(wide + t * size, wide + (t + 1) * size, static_cast<uint16_t*>(to), [](float x) { return float_to_bf16(x); });
      } else {
        std::transform(narrow + t * size, narrow + (t + 1) * size, static_cast<float*>(to), bf16_to_float);
      }
    }
  };
  if (tokens < kShared) write_tokens(0, tokens, 0);
  else Team::get().ranges(tokens, 8, write_tokens);
  return ffi::Error::Success();
}

ffi::Error kv_write(ffi::BufferR0<ffi::S32> layer, ffi::RemainingArgs arrays, ffi::RemainingRets results, std::string_view format) {
  const Timed timed([] { return std::string("kv_write"); });
  const Store store = format == "int8" ? Store::kInt8 : format == "int4" ? Store::kInt4 : format == "fp8" ? Store::kFp8 : Store::kPlain;
  const std::size_t each = store == Store::kPlain ? 1 : store == Store::kFp8 ? 2 : 3;
  if (arrays.size() != 2 * each + 3 || results.size() != 2 * each) return invalid("kv_write: an operand is missing");
  const auto slots = arrays.get<ffi::Buffer<ffi::S32>>(2 * each + 2);
  if (!slots) return invalid("kv_write: slots are no int32");
  for (std::size_t half = 0; half < 2; ++half) {
    const ffi::AnyBuffer data = *arrays.get<ffi::AnyBuffer>(half * each);
    ask_for({store, data, Pool(data, *layer.typed_data()), nullptr, nullptr}, *slots);
  }
  for (std::size_t half = 0; half < 2; ++half) {
    const std::size_t at = half * each;
    const ffi::AnyBuffer data = *arrays.get<ffi::AnyBuffer>(at);
    Cache cache{store, data, Pool(data, *layer.typed_data()), nullptr, nullptr};
    for (std::size_t i = 0; i < each; ++i) {
      const ffi::AnyBuffer array = *arrays.get<ffi::AnyBuffer>(at + i);
      if (array.untyped_data() != (*results.get<ffi::AnyBuffer>(at + i))->untyped_data()) {
        return invalid("kv_write: the caches are not written in place");
      }
      if (i == 0) continue;
      if (array.element_type() != ffi::F16 || static_cast<int64_t>(array.element_count()) != cache.pool.rows()) {
        return invalid("kv_write: the arrays of a cache do not fit each other");
      }
      (i == 1 ? cache.scale : cache.minimum) = static_cast<uint16_t*>(array.untyped_data());
    }
    ffi::Error error = write(*arrays.get<ffi::AnyBuffer>(2 * each + half), *slots, cache);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_kv_write, jaxserve::kv_write,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("format"));
