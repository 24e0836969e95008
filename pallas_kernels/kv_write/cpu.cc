// kv_write on CPUs: rows of keys and values copied into their slots of the caches, in place.
#include <algorithm>

#include "../_native/handler.h"
#include "pool.h"

namespace jaxserve {
namespace {

// rows [T, K, H] into cache [(L,) pages * B, K, H] at `slots` of `layer`, rounded to the cache's type.
ffi::Error write(ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> slots, ffi::AnyBuffer& cache, int64_t layer) {
  const Pool pool(cache, layer);
  const int64_t tokens = slots.element_count(), size = pool.heads * pool.head_dim, places = pool.pages * pool.page;
  if (!pool.fits || tokens == 0 || static_cast<int64_t>(rows.element_count()) != tokens * size) {
    return invalid("kv_write: the operands do not fit each other");
  }
  const bool from_bf16 = rows.element_type() == ffi::BF16, to_bf16 = cache.element_type() == ffi::BF16;
  const std::size_t bytes = size * (to_bf16 ? 2 : 4);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = slots.typed_data()[t];
    if (slot < 0 || slot >= places) continue;
    void* const to = static_cast<char*>(cache.untyped_data()) + (pool.layer * places + slot) * bytes;
    if (from_bf16 == to_bf16) {
      std::memcpy(to, static_cast<const char*>(rows.untyped_data()) + t * bytes, bytes);
    } else if (to_bf16) {
      const float* from = static_cast<const float*>(rows.untyped_data()) + t * size;
      std::transform(from, from + size, static_cast<uint16_t*>(to), float_to_bf16);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(rows.untyped_data()) + t * size;
      std::transform(from, from + size, static_cast<float*>(to), bf16_to_float);
    }
  }
  return ffi::Error::Success();
}

ffi::Error kv_write(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
                    int64_t layer) {
  if (k_cache.untyped_data() != k_out->untyped_data() || v_cache.untyped_data() != v_out->untyped_data()) {
    return invalid("kv_write: the caches are not written in place");
  }
  ffi::Error error = write(k, slots, *k_out, layer);
  return error.failure() ? error : write(v, slots, *v_out, layer);
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_kv_write, jaxserve::kv_write,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<int64_t>("layer"));
