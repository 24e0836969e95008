// quantized_matmul on CPUs: y[t, o] = sum_g (scale[o, g] * sum_i x[t, i] q[o, i] + offset[o, g] * sum_i x[t, i]), where i
// runs over the inputs of group g, and offset is the minimum, or -scale * zero, or nothing.
//
// The codes are never scaled one by one: they are exact in the type that x has, and what they sum to is scaled once a group.
#include <algorithm>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

enum class Offset { kNone, kZero, kMinimum };
enum class Type { kF32, kF16, kBF16, kU8 };

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A weight [O, I] as QuantFormat describes it.
struct Weight {
  const uint8_t* codes;
  const void* scale;
  const void* offsets;
  int64_t outputs, inputs, group, groups;
  int bits;
  Offset offset;
  Type scale_type;

  int64_t row_bytes() const { return inputs * bits / 8; }
  int64_t padded_group() const { return round_up(group, 32); }
  int64_t padded_groups() const { return round_up(groups, 16); }
  // Points to one layer of a stack [L, O, ...].
  void take_layer(int64_t layer) {
    const int64_t field = layer * outputs * groups * (scale_type == Type::kF32 ? 4 : 2);
    codes += layer * outputs * row_bytes();
    scale = static_cast<const char*>(scale) + field;
    if (offset != Offset::kNone) offsets = static_cast<const char*>(offsets) + (offset == Offset::kZero ? layer * outputs * groups : field);
  }
};

// Activations [rows, G, padded group] in the order in which the kernel meets its weights, and their sums [rows, padded G].
struct Activations {
  int64_t rows;
  bool bf16;
  void* x;
  float* sums;
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../quantized_matmul/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

float float_at(const ffi::AnyBuffer& x, int64_t index) {
  return x.element_type() == ffi::F32 ? static_cast<const float*>(x.untyped_data())[index]
                                      : bf16_to_float(static_cast<const uint16_t*>(x.untyped_data())[index]);
}

// Row `row` of x as the kernel wants it.
void lay_out(const Weight& w, const ffi::AnyBuffer& x, int64_t row, const Activations& a) {
  const int64_t padded = w.padded_group();
  float* sums = a.sums + row * w.padded_groups();
  std::fill(sums, sums + w.padded_groups(), 0.0f);
  for (int64_t g = 0; g < w.groups; ++g) {
    const int64_t first = g * w.group, size = std::min(w.group, w.inputs - first), at = (row * w.groups + g) * padded;
    float total = 0;
    if (a.bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + row * w.inputs + first;
      uint16_t* to = static_cast<uint16_t*>(a.x) + at;
      std::copy(from, from + size, to);
      std::fill(to + size, to + padded, uint16_t{0});
      for (int64_t i = 0; i < size; ++i) total += bf16_to_float(from[i]);
    } else {
      float* to = static_cast<float*>(a.x) + at;
      std::fill(to, to + padded, 0.0f);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t within = i % 32, place = w.bits == 4 ? within / 2 + within % 2 * 16 : within;
        const float value = float_at(x, row * w.inputs + first + i);
        to[i - within + place] = value;
        total += value;
      }
    }
    sums[g] = total;
  }
}

Type type_of(ffi::DataType type) {
  return type == ffi::F16 ? Type::kF16 : type == ffi::BF16 ? Type::kBF16 : Type::kF32;
}

ffi::Error quantized_matmul(ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t group, std::string_view offset, int64_t layer) {
  const auto shape = codes.dimensions(), groups = scale.dimensions();
  const int64_t inputs = x.dimensions().back(), outputs = y->dimensions().back();
  Weight w{static_cast<const uint8_t*>(codes.untyped_data()), scale.untyped_data(), nullptr, outputs, inputs, group,
           groups.back(), static_cast<int>(bits), Offset::kNone, type_of(scale.element_type())};
  if (offset != "none") {
    auto field = rest.get<ffi::AnyBuffer>(0);
    if (!field) return invalid("quantized_matmul: the array of offsets is missing");
    w.offsets = field->untyped_data();
    w.offset = offset == "zero" ? Offset::kZero : Offset::kMinimum;
    if (field->element_count() != scale.element_count()) return invalid("quantized_matmul: offsets and scales differ in shape");
  }
  const std::size_t stacked = shape.size() == 3;
  const bool fits = shape.size() == 2 + stacked && groups.size() == shape.size() && group > 0 && layer >= 0 &&
                    layer < (stacked ? std::min(shape[0], groups[0]) : 1) && shape[stacked] == outputs &&
                    groups[stacked] == outputs && shape.back() * 8 == inputs * bits && w.groups == (inputs + group - 1) / group;
  if (!fits) return invalid("quantized_matmul: the arrays of the weight do not fit x and the result");

  w.take_layer(layer);

  const int64_t rows = x.element_count() / inputs, row = w.groups * w.padded_group();
  const bool bf16 = x.element_type() == ffi::BF16 && JAXSERVE_DISPATCH(takes_bf16);
  // Scratch: x, its sums, and the result in float32 if it is to be rounded. float32's size does for both kinds of x.
  const bool direct = y->element_type() == ffi::F32;
  const int64_t floats = rows * (row + w.padded_groups()) + (direct ? 0 : rows * outputs);
  float* memory = static_cast<float*>(Team::scratch(floats * sizeof(float), 0));
  const Activations a{rows, bf16, memory, memory + rows * row};
  float* result = direct ? static_cast<float*>(y->untyped_data()) : a.sums + rows * w.padded_groups();

  Team& team = Team::get();
  if (rows < 4) {
    for (int64_t r = 0; r < rows; ++r) lay_out(w, x, r, a);
  } else {
    team.each(rows, [&](int64_t r, int) { lay_out(w, x, r, a); });
  }
  // Items small enough to share out evenly, large enough that taking one costs nothing.
  const int64_t step = std::clamp<int64_t>(outputs / (8 * team.size()), 8, 64), items = (outputs + step - 1) / step;
  team.each(items, [&](int64_t item, int) {
    const int64_t first = item * step, last = std::min(first + step, outputs);
    JAXSERVE_DISPATCH(outputs, w, a, first, last, result);
  });
  if (!direct) {
    uint16_t* to = static_cast<uint16_t*>(y->untyped_data());
    for (int64_t i = 0; i < rows * outputs; ++i) to[i] = float_to_bf16(result[i]);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_quantized_matmul, jaxserve::quantized_matmul,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("offset")
                                  .Attr<int64_t>("layer"));
