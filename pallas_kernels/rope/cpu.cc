// rope and rope_qkv on CPUs: heads turned by the angles of their token's position, and others taken along.
#include <cmath>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

// Neighbouring heads of every token, which go to an array [T, heads, width] of their own.
struct Part {
  void* y;
  const void* bias;  // [heads, width], added first; null if there is none
  int64_t heads;
  bool is_turned;
};

// Tokens [T, heads, width] that are cut into parts, heads in order.
struct Rope {
  const void* x;
  bool is_bf16;  // x, and all that parts name
  const int32_t* positions;
  ffi::Span<const float> inv_freq;  // of the pairs, [dim / 2]
  bool interleaved;
  int64_t width;
  int64_t heads;  // of all parts
  const Part* parts;
  int64_t count;  // of parts
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../rope/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

// From how many numbers on the threads share the tokens: handing over fewer takes longer than turning them.
constexpr int64_t kShared = 8192;

ffi::Error turn_tokens(const Rope& rope, int64_t tokens) {
  auto some = [&](int64_t first, int64_t last, int) { JAXSERVE_DISPATCH(turn, rope, first, last); };
  if (tokens * rope.heads * rope.width < kShared) some(0, tokens, 0);
  else Team::get().ranges(tokens, 4, some);
  return ffi::Error::Success();
}

bool is_float(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 || x.element_type() == ffi::BF16; }

bool is_like(const ffi::AnyBuffer& y, const ffi::AnyBuffer& x, int64_t tokens, int64_t width) {
  const auto shape = y.dimensions();
  return shape.size() == 3 && shape[0] == tokens && shape[2] == width && y.element_type() == x.element_type();
}

ffi::Error rope(ffi::BufferR0<ffi::S32>, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> positions, ffi::Result<ffi::AnyBuffer> y,
                ffi::Span<const float> inv_freq, bool interleaved) {
  const Timed timed([] { return std::string("rope"); });
  const int64_t tokens = positions.element_count();
  const auto shape = y->dimensions();
  const bool fits = is_float(x) && x.element_count() == y->element_count() && shape.size() == 3 && is_like(*y, x, tokens, shape[2]) &&
                    2 * static_cast<int64_t>(inv_freq.size()) <= shape[2];
  if (!fits) return invalid("rope: the operands do not fit each other");
  const Part part{y->untyped_data(), nullptr, shape[1], true};
  return turn_tokens({x.untyped_data(), x.element_type() == ffi::BF16, positions.typed_data(), inv_freq, interleaved, shape[2],
                      part.heads, &part, 1},
                     tokens);
}

// The layer's part of a bias [L, size] or [size]; null if it does not fit.
const void* bias_of(const ffi::AnyBuffer& bias, const ffi::AnyBuffer& x, int32_t layer, int64_t size) {
  const bool fits = bias.element_type() == x.element_type() && layer >= 0 && bias.dimensions().size() > 0 &&
                    bias.dimensions().back() == size && (layer + 1) * size <= static_cast<int64_t>(bias.element_count());
  return fits ? static_cast<const char*>(bias.untyped_data()) + layer * size * ffi::ByteWidth(x.element_type()) : nullptr;
}

ffi::Error rope_qkv(ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> positions, ffi::RemainingArgs biases,
                    ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v,
                    ffi::Span<const float> inv_freq, bool interleaved) {
  const Timed timed([] { return std::string("rope_qkv"); });
  const int64_t tokens = positions.element_count(), width = q->dimensions().back();
  const ffi::AnyBuffer* const results[] = {&*q, &*k, &*v};
  Part parts[3];
  int64_t heads = 0;
  bool fits = is_float(x) && 2 * static_cast<int64_t>(inv_freq.size()) <= width && (biases.size() == 0 || biases.size() == 3);
  for (int i = 0; i < 3 && fits; ++i) {
    fits = is_like(*results[i], x, tokens, width);
    if (!fits) break;
    parts[i] = {results[i]->untyped_data(), nullptr, results[i]->dimensions()[1], i < 2};
    heads += parts[i].heads;
    if (biases.size() == 0) continue;
    parts[i].bias = bias_of(*biases.get<ffi::AnyBuffer>(i), x, *layer.typed_data(), parts[i].heads * width);
    fits = parts[i].bias != nullptr;
  }
  if (!fits || static_cast<int64_t>(x.element_count()) != tokens * heads * width) {
    return invalid("rope_qkv: the operands do not fit each other");
  }
  return turn_tokens({x.untyped_data(), x.element_type() == ffi::BF16, positions.typed_data(), inv_freq, interleaved, width, heads,
                      parts, 3},
                     tokens);
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rope, jaxserve::rope,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<jaxserve::ffi::Span<const float>>("inv_freq")
                                  .Attr<bool>("interleaved"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rope_qkv, jaxserve::rope_qkv,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::Buffer<jaxserve::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<jaxserve::ffi::Span<const float>>("inv_freq")
                                  .Attr<bool>("interleaved"));
