// What the handlers of our custom calls share.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

namespace ffi = ::xla::ffi;

inline ffi::Error invalid(std::string message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message)); }

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  // Exponent and mantissa shifted into place; the multiplication sets the exponent's bias right, subnormals included.
  const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;  // infinity and NaN
  wide |= uint32_t(bits & 0x8000) << 16;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest, ties to even; what is too large becomes infinity.
inline uint16_t float_to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits >= 0x38800000) return sign | uint16_t((bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13);
  float shifted;  // subnormal: in 0.5 + x the last bit is worth as much as the last one of float16
  std::memcpy(&shifted, &bits, 4);
  shifted += 0.5f;
  std::memcpy(&bits, &shifted, 4);
  return sign | uint16_t(bits - 0x3f000000);
}

}  // namespace jaxserve
