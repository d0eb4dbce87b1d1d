// BF16 and FP16 bits to float and back, one value at a time; rounding is to nearest even.
//
// Threads: pure functions.

#ifndef KERNELS_OPS_FLOAT16_H_
#define KERNELS_OPS_FLOAT16_H_

#include <bit>
#include <cstdint>

namespace sluice {

inline float FloatFromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Rounds once, from double: going through float first would round twice.
inline uint16_t Bf16FromDouble(double value) {
  // A float is rounded to odd where it is not exact, which keeps the second rounding right.
  float nearest = static_cast<float>(value);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (static_cast<double>(nearest) != value && value == value &&
      (bits & 0x7fffffffu) < 0x7f800000u) {
    const bool away = (static_cast<double>(nearest) > value) == (value > 0);
    if (away) --bits;
    bits |= 1;
  }
  return Bf16FromFloat(std::bit_cast<float>(bits));
}

inline float FloatFromFp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  const uint32_t wide = exponent == 31 ? 0x7f800000u : (exponent + 112) << 23;
  return std::bit_cast<float>(sign | wide | (mantissa << 13));
}

inline uint16_t Fp16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // A subnormal result: adding 0.5 leaves a multiple of 2^-24 in the low bits, rounded by the
    // FPU.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace sluice

#endif  // KERNELS_OPS_FLOAT16_H_
