// gated_activation on CPUs: the activation of one half of each row times the other half.
#include <algorithm>
#include <string_view>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

enum class Activation { kSilu, kGeluTanh };

// y [rows, width] of x [rows, 2 width].
struct Gated {
  const float* x;
  void* y;
  bool is_bf16;  // y
  Activation activation;
  int64_t width;
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../gated_activation/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

// From how many results on the threads share the rows: handing over fewer takes longer than computing them.
constexpr int64_t kShared = 4096;

ffi::Error gated_activation(ffi::BufferR0<ffi::S32>, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::AnyBuffer> y, std::string_view activation) {
  const Timed timed([] { return std::string("gated_activation"); });
  const int64_t width = y->dimensions().back(), rows = y->element_count() / std::max<int64_t>(width, 1);
  const bool fits = x.dimensions().back() == 2 * width && x.element_count() == 2 * y->element_count() &&
                    (y->element_type() == ffi::BF16 || y->element_type() == ffi::F32);
  if (!fits) return invalid("gated_activation: the operands do not fit each other");
  const Gated gated{x.typed_data(), y->untyped_data(), y->element_type() == ffi::BF16,
                    activation == "silu" ? Activation::kSilu : Activation::kGeluTanh, width};
  auto some = [&](int64_t first, int64_t last, int) { JAXSERVE_DISPATCH(gate, gated, first, last); };
  if (rows * width < kShared) some(0, rows, 0);
  else Team::get().ranges(rows, 1, some);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_gated_activation, jaxserve::gated_activation,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("activation"));
