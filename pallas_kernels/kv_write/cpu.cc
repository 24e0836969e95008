// kv_write on CPUs: rows of keys and values copied into their slots of the caches, in place.
#include <algorithm>

#include "../_native/handler.h"

namespace jaxserve {
namespace {

// rows [T, K, H] into cache [pages * B, K, H] at `slots`, rounded to the cache's type.
ffi::Error write(ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> slots, ffi::AnyBuffer& cache) {
  const auto pool = cache.dimensions();
  const int64_t tokens = slots.element_count();
  if (pool.size() != 4 || tokens == 0 || static_cast<int64_t>(rows.element_count()) != tokens * pool[2] * pool[3]) {
    return invalid("kv_write: the operands do not fit each other");
  }
  const int64_t size = pool[2] * pool[3], places = pool[0] * pool[1];
  const bool from_bf16 = rows.element_type() == ffi::BF16, to_bf16 = cache.element_type() == ffi::BF16;
  const std::size_t bytes = size * (to_bf16 ? 2 : 4);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = slots.typed_data()[t];
    if (slot < 0 || slot >= places) continue;
    void* const to = static_cast<char*>(cache.untyped_data()) + slot * bytes;
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
                    ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  if (k_cache.untyped_data() != k_out->untyped_data() || v_cache.untyped_data() != v_out->untyped_data()) {
    return invalid("kv_write: the caches are not written in place");
  }
  ffi::Error error = write(k, slots, *k_out);
  return error.failure() ? error : write(v, slots, *v_out);
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
                                  .Ret<jaxserve::ffi::AnyBuffer>());
