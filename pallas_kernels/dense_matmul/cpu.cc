// dense_matmul on CPUs: y[t, o] = sum_i x[t, i] w[o, i], of float32 or bf16 numbers, summed in float32.
#include <algorithm>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

struct Product {
  const void* x;  // [rows, inputs]
  const void* w;  // [outputs, inputs]
  void* y;        // [rows, outputs]
  int64_t rows, inputs, outputs;
  bool is_bf16;  // x and w
  bool to_bf16;  // y
};

constexpr int kFour = 4;    // outputs that are summed together
constexpr int kBlock = 128;  // outputs that meet rows of x while these lie in the nearest cache

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../dense_matmul/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

ffi::Error dense_matmul(ffi::BufferR0<ffi::S32>, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const auto is_matrix = [](const ffi::AnyBuffer& array) { return array.dimensions().size() == 2; };
  if (!is_matrix(x) || !is_matrix(w) || !is_matrix(*y)) return invalid("dense_matmul: an operand is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = w.dimensions()[0];
  const Timed timed([&] { return "dense_matmul [" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]"; });
  const auto is_known = [](ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; };
  const bool fits = w.dimensions()[1] == inputs && y->dimensions()[0] == rows && y->dimensions()[1] == outputs &&
                    x.element_type() == w.element_type() && is_known(x.element_type()) && is_known(y->element_type());
  if (!fits) return invalid("dense_matmul: the operands do not fit each other");
  const Product product{x.untyped_data(), w.untyped_data(), y->untyped_data(), rows, inputs, outputs,
                        x.element_type() == ffi::BF16, y->element_type() == ffi::BF16};
  // Many rows use what is loaded of x for a whole block; few leave smaller parts, so that threads end together.
  const int64_t grain = rows > 16 ? kBlock / kFour : 4;
  Team::get().ranges((outputs + kFour - 1) / kFour, grain, [&](int64_t first, int64_t last, int) {
    JAXSERVE_DISPATCH(outputs_of, product, kFour * first, std::min(kFour * last, outputs));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dense_matmul, jaxserve::dense_matmul,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Ret<jaxserve::ffi::AnyBuffer>());
