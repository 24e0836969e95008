// rms_norm and add_rms_norm on CPUs: rows scaled to unit root mean square, after a sum if there is one.
#include <cmath>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

// n = h / sqrt(mean(h^2) + eps) * weight of rows [width] of h = x + y; without y (null), h is x and not written.
struct Norm {
  const float* x;
  const float* y;
  const float* weight;
  float* h;
  void* n;
  bool is_bf16;  // n; everything else is float32
  bool plus_one;
  float eps;
  int64_t width;
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../rms_norm/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

// From how many numbers on the threads share the rows: handing over fewer takes longer than their sums.
constexpr int64_t kShared = 8192;

ffi::Error normalize_rows(const Norm& norm, int64_t rows) {
  auto some = [&](int64_t first, int64_t last, int) { JAXSERVE_DISPATCH(normalize, norm, first, last); };
  if (rows * norm.width < kShared) some(0, rows, 0);
  else Team::get().ranges(rows, 4, some);
  return ffi::Error::Success();
}

// The layer's part of the weight [L, D] or [D]; null if it does not fit.
const float* weight_of(const ffi::Buffer<ffi::F32>& weight, int32_t layer, int64_t width) {
  const bool fits = layer >= 0 && width > 0 && weight.element_count() % width == 0 &&
                    (layer + 1) * width <= static_cast<int64_t>(weight.element_count());
  return fits ? weight.typed_data() + layer * width : nullptr;
}

bool is_result_of(const ffi::AnyBuffer& n, const ffi::Buffer<ffi::F32>& x) {
  return n.element_count() == x.element_count() && (n.element_type() == ffi::BF16 || n.element_type() == ffi::F32);
}

ffi::Error rms_norm(ffi::BufferR0<ffi::S32> layer, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                    ffi::Result<ffi::AnyBuffer> n, float eps, bool plus_one) {
  const Timed timed([] { return std::string("rms_norm"); });
  const int64_t width = x.dimensions().back();
  const float* const w = weight_of(weight, *layer.typed_data(), width);
  if (!w || !is_result_of(*n, x)) return invalid("rms_norm: the operands do not fit each other");
  const Norm norm{x.typed_data(), nullptr, w, nullptr, n->untyped_data(), n->element_type() == ffi::BF16, plus_one, eps, width};
  return normalize_rows(norm, x.element_count() / width);
}

ffi::Error add_rms_norm(ffi::BufferR0<ffi::S32> layer, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> weight,
                        ffi::ResultBuffer<ffi::F32> h, ffi::Result<ffi::AnyBuffer> n, float eps, bool plus_one) {
  const Timed timed([] { return std::string("add_rms_norm"); });
  const int64_t width = x.dimensions().back();
  const float* const w = weight_of(weight, *layer.typed_data(), width);
  const bool fits = w && x.element_count() == y.element_count() && x.element_count() == h->element_count() && is_result_of(*n, x);
  if (!fits) return invalid("add_rms_norm: the operands do not fit each other");
  const Norm norm{x.typed_data(),    y.typed_data(),                  w,        h->typed_data(),
                  n->untyped_data(), n->element_type() == ffi::BF16, plus_one, eps,
                  width};
  return normalize_rows(norm, x.element_count() / width);
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rms_norm, jaxserve::rms_norm,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_add_rms_norm, jaxserve::add_rms_norm,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Ret<jaxserve::ffi::Buffer<jaxserve::ffi::F32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));
