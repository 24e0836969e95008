// quantized_matmul on CPUs: y[t, o] = sum_g (scale[o, g] * sum_i x[t, i] q[o, i] + offset[o, g] * sum_i x[t, i]), where i
// runs over the inputs of group g, and offset is the minimum, or -scale * zero, or nothing.
//
// The codes are never scaled one by one: they are exact in the type that x has, and what they sum to is scaled once a group.
//
// Of int8 activations: y[t, o] = unit[t] * channel[o] * sum_g factor[o, g] * sum_i x[t, i] (q[o, i] - zero[o, g]), in int32 up
// to the two scales, where factor is a second level of scales, or 1.
//
// Numbers of e4m3, of weights and of activations, are exact in bf16 and in float32, and so are their products in float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"

namespace jaxserve {
namespace {

enum class Offset { kNone, kZero, kMinimum };
enum class Type { kF32, kF16, kBF16, kU8 };

constexpr int size_of(Type type) { return type == Type::kU8 ? 1 : type == Type::kF32 ? 4 : 2; }

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
  const void* channel;  // [O] of channel_type where activations are int8
  Type channel_type;

  bool e4m3;    // whether codes are numbers of float8_e4m3fn, and not integers
  bool rounds;  // whether activations are rounded to such numbers, too
  bool panels;  // whether it lies in panels of sixteen outputs (layout.py), and not row after row

  int64_t row_bytes() const { return inputs * bits / 8; }
  int64_t padded_group() const { return round_up(group, 32); }
  int64_t column() const { return 32 / bits; }  // inputs in four bytes of codes
  int64_t columns() const { return (inputs + column() - 1) / column(); }
  Type offset_type() const { return offset == Offset::kZero ? Type::kU8 : scale_type; }

  // Where the fields of an output begin; of a panel, those of its first.
  const uint8_t* codes_at(int64_t output) const { return codes + output * row_bytes(); }
  const void* scale_at(int64_t output) const { return at(scale, output * groups * size_of(scale_type)); }
  const void* offset_at(int64_t output) const { return at(offsets, output * groups * size_of(offset_type())); }
  // The same without the first outputs: [L, O, ...] without the first layers, if they are those of some layers.
  Weight from_output(int64_t output) const {
    Weight rest = *this;
    rest.codes = codes_at(output);
    rest.scale = scale_at(output);
    rest.offsets = offset_at(output);
    rest.channel = at(channel, output * size_of(channel_type));
    return rest;
  }

 private:
  static const void* at(const void* field, int64_t bytes) { return field ? static_cast<const char*>(field) + bytes : nullptr; }
};

// How activations are laid out: float32 to meet one output at a time (kernel.inc), or to meet sixteen of them (panel.inc),
// as bf16, for weights of integers or of e4m3, or as whole numbers of a few bytes, limbs. The same of int8: to meet one
// output, or sixteen.
enum class Kind { kRows, kBf16, kE4m3, kLimbs, kByteRows, kBytes };

// Bytes of a number: rounded to 2^-23 of the largest of its group, as float32 would have it. Two bytes, 2^-16, move logits
// by 1e-3 where all weights have 8 bits.
constexpr int kLimbs = 3;

// Rows whose numbers lie side by side, one beside the other, for panels: eight, or what is left of all rows.
constexpr int kSide = 8;
struct Rows {
  int64_t first;
  int count;
};

// Activations in a layout, and for every row and group of inputs: the sum of x; and of limbs, the size of a unit and where
// their sums begin. Of int8: where sums begin, or the sum of x where the weight has zero points; one unit for all groups.
struct Activations {
  int64_t rows, padded_groups;
  Kind kind;
  void* x;
  float* sums;      // [rows, G], of kRows [rows, padded groups]
  float* unit;      // of limbs [rows, G], else [rows]: what numbers of x are multiples of, or 1
  int32_t* raised;  // [rows, G, limbs]

  // Those to which row `row` belongs.
  Rows beside(int64_t row) const {
    const int64_t first = row / kSide * kSide;
    return {first, static_cast<int>(std::min<int64_t>(rows - first, kSide))};
  }
};

// The result [rows, O].
struct Result {
  void* y;
  bool is_bf16;
  int64_t outputs;
  int64_t first = 0;  // output that is called 0

  Result from_output(int64_t output) const { return {y, is_bf16, outputs, first + output}; }

  void put(int64_t row, int64_t output, float number) const {
    const int64_t at = row * outputs + first + output;
    if (is_bf16) static_cast<uint16_t*>(y)[at] = float_to_bf16(number);
    else static_cast<float*>(y)[at] = number;
  }
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../quantized_matmul/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

Type type_of(ffi::DataType type) {
  return type == ffi::F16 ? Type::kF16 : type == ffi::BF16 ? Type::kBF16 : Type::kF32;
}

// The product of x [rows, I] with w; `static_unit` is that of int8 activations, where it is given.
void multiply(const Weight& w, const void* x, bool is_bf16, const float* static_unit, int64_t rows, const Result& y) {
  const int64_t padded_groups = round_up(w.groups, 16);
  const Kind kind = JAXSERVE_DISPATCH(kind_of, w, is_bf16);
  // Scratch: x, a row of it in float32 for each thread, and what belongs to its groups.
  Team& team = Team::get();
  const int64_t x_floats = rows * std::max(w.groups * w.padded_group(), w.columns() * w.column());
  const int64_t floats = x_floats + team.size() * w.inputs + rows * (padded_groups + (kLimbs + 1) * w.groups);
  float* const memory = static_cast<float*>(Team::scratch(floats * sizeof(float), 0));
  float* const wide = memory + x_floats;
  float* const sums = wide + team.size() * w.inputs;
  float* const unit = sums + rows * padded_groups;
  auto* const raised = reinterpret_cast<int32_t*>(unit + rows * w.groups);
  const Activations a{rows, padded_groups, kind, memory, sums, unit, raised};

  // Rows that lie side by side are laid out by one thread: two would take lines of memory from each other.
  team.each((rows + kSide - 1) / kSide, [&](int64_t some, int thread) {
    for (int64_t row = kSide * some; row < std::min(kSide * (some + 1), rows); ++row) {
      JAXSERVE_DISPATCH(lay_out, w, x, is_bf16, static_unit, row, a, wide + thread * w.inputs);
    }
  });
  // Whole panels, several at a time.
  team.ranges((w.outputs + 15) / 16, 4, [&](int64_t first, int64_t last, int) {
    JAXSERVE_DISPATCH(outputs, w, a, 16 * first, std::min(16 * last, w.outputs), y);
  });
}

ffi::Error quantized_matmul(ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::RemainingArgs rest,
                            ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t group, std::string_view offset, std::string_view activation,
                            bool level2) {
  const int64_t inputs = x.dimensions().back(), outputs = y->dimensions().back();
  const bool is_e4m3 = codes.element_type() == ffi::F8E4M3FN;
  const Timed timed([&] {
    return "quantized_matmul " + (is_e4m3 ? "e4m3" : "int" + std::to_string(bits)) + " [" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]";
  });
  if (group <= 0) return invalid("quantized_matmul: a group is empty");
  Weight w{static_cast<const uint8_t*>(codes.untyped_data()), scale.untyped_data(), nullptr, outputs, inputs, group,
           (inputs + group - 1) / group, static_cast<int>(bits), Offset::kNone, type_of(scale.element_type()), nullptr, Type::kF32,
           is_e4m3, activation == "e4m3", codes.dimensions().size() > 3};  // [O/16, C, 16, 4], or [O, ...]; of several layers, with an axis more
  std::size_t next = 0;
  if (offset != "none") {
    auto field = rest.get<ffi::AnyBuffer>(next++);
    if (!field) return invalid("quantized_matmul: the array of offsets is missing");
    w.offsets = field->untyped_data();
    w.offset = offset == "zero" ? Offset::kZero : Offset::kMinimum;
    if (field->element_count() != scale.element_count()) return invalid("quantized_matmul: offsets and scales differ in shape");
  }
  const int64_t layers = codes.element_count() * 8 / std::max<int64_t>(outputs * inputs * bits, 1);
  const float* static_unit = nullptr;
  if (level2) {
    auto field = rest.get<ffi::AnyBuffer>(next++);
    if (!field || static_cast<int64_t>(field->element_count()) != layers * outputs) return invalid("quantized_matmul: no scale an output");
    w.channel = field->untyped_data();
    w.channel_type = type_of(field->element_type());
    w.scale_type = Type::kU8;
  } else if (activation == "int8" || activation == "int8-static") {
    if (w.groups != 1) return invalid("quantized_matmul: int8 activations take one scale an output");
    w.channel = w.scale;
    w.channel_type = w.scale_type;
    w.scale = nullptr;
  }
  if (activation == "int8-static") {
    auto field = rest.get<ffi::Buffer<ffi::F32>>(next++);
    if (!field || field->element_count() != 1) return invalid("quantized_matmul: the scale of the activations is missing");
    static_unit = field->typed_data();
  }
  const int64_t at = *layer.typed_data();
  const bool fits = at >= 0 && at < layers && static_cast<int64_t>(codes.element_count()) * 8 == layers * outputs * inputs * bits &&
                    static_cast<int64_t>(scale.element_count()) == layers * outputs * w.groups;
  if (!fits) return invalid("quantized_matmul: the arrays of the weight do not fit x and the result");
  if (w.panels && (outputs % 16 || inputs % w.column())) return invalid("quantized_matmul: the weight cannot lie in panels");
  w = w.from_output(at * outputs);

  multiply(w, x.untyped_data(), x.element_type() == ffi::BF16, static_unit, x.element_count() / inputs,
           Result{y->untyped_data(), y->element_type() == ffi::BF16, outputs});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_quantized_matmul, jaxserve::quantized_matmul,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group")
                                  .Attr<std::string_view>("offset")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("level2"));
