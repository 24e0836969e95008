// sample_logits on CPUs: rows are shared out over the team, and each is computed by one thread, from its own operands alone.
#include <algorithm>
#include <cmath>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"
#include "row.h"

#define JAXSERVE_KERNEL "../sample_logits/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

using Logits = ffi::BufferR2<ffi::F32>;
using Keys = ffi::BufferR2<ffi::U32>;
using Integers = ffi::BufferR1<ffi::S32>;
using Reals = ffi::BufferR1<ffi::F32>;
using Flags = ffi::BufferR1<ffi::PRED>;

ffi::Error sample_logits(ffi::BufferR0<ffi::S32>, Logits logits, Keys keys, Integers positions, Reals temperature,
                         Integers top_k, Reals top_p, Reals min_p, ffi::Result<Integers> tokens, ffi::Result<Flags> finite,
                         int64_t vocab) {
  const Timed timed([] { return std::string("sample_logits"); });
  const int64_t rows = logits.dimensions()[0], columns = logits.dimensions()[1];
  const auto fits = [&](const auto& numbers) { return static_cast<int64_t>(numbers.element_count()) == rows; };
  if (!fits(positions) || !fits(temperature) || !fits(top_k) || !fits(top_p) || !fits(min_p) || !fits(*tokens) ||
      !fits(*finite) || keys.dimensions()[0] != rows || keys.dimensions()[1] != 2 || vocab < 1 || vocab > columns) {
    return invalid("sample_logits: the operands do not fit each other");
  }
  const std::size_t bytes = JAXSERVE_DISPATCH(room_bytes, vocab);
  Team::get().each(rows, [&](int64_t s, int) {
    const Row row{logits.typed_data() + s * columns, vocab,
                  keys.typed_data() + 2 * s,         positions.typed_data()[s],
                  temperature.typed_data()[s],       top_k.typed_data()[s],
                  top_p.typed_data()[s],             min_p.typed_data()[s]};
    void* const memory = Team::scratch(bytes, 1);
    const auto choice = JAXSERVE_DISPATCH(choose_row, row, memory);
    tokens->typed_data()[s] = choice.token;
    finite->typed_data()[s] = choice.finite;
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_sample_logits, jaxserve::sample_logits,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::BufferR2<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::BufferR2<jaxserve::ffi::U32>>()
                                  .Arg<jaxserve::ffi::BufferR1<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::BufferR1<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::BufferR1<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::BufferR1<jaxserve::ffi::F32>>()
                                  .Arg<jaxserve::ffi::BufferR1<jaxserve::ffi::F32>>()
                                  .Ret<jaxserve::ffi::BufferR1<jaxserve::ffi::S32>>()
                                  .Ret<jaxserve::ffi::BufferR1<jaxserve::ffi::PRED>>()
                                  .Attr<int64_t>("vocab"));
