#include "kernels/ops/float16.h"

#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace sluice {
namespace {

bool IsNan(uint16_t bits, int exponent_mask, int mantissa_mask) {
  return (bits & exponent_mask) == exponent_mask && (bits & mantissa_mask) != 0;
}

TEST(Float16, EveryValueComesBack) {
  for (int i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    if (!IsNan(bits, 0x7f80, 0x7f)) {
      EXPECT_EQ(Bf16FromFloat(FloatFromBf16(bits)), bits);
      EXPECT_EQ(Bf16FromDouble(FloatFromBf16(bits)), bits);
    } else {
      EXPECT_TRUE(std::isnan(FloatFromBf16(bits)));
      EXPECT_TRUE(IsNan(Bf16FromFloat(FloatFromBf16(bits)), 0x7f80, 0x7f));
    }
    if (!IsNan(bits, 0x7c00, 0x3ff)) {
      EXPECT_EQ(Fp16FromFloat(FloatFromFp16(bits)), bits);
    } else {
      EXPECT_TRUE(std::isnan(FloatFromFp16(bits)));
      EXPECT_TRUE(IsNan(Fp16FromFloat(FloatFromFp16(bits)), 0x7c00, 0x3ff));
    }
  }
}

TEST(Float16, Fp16ValuesAreThoseOfTheFormat) {
  EXPECT_EQ(FloatFromFp16(0x3c00), 1.0f);
  EXPECT_EQ(FloatFromFp16(0xc000), -2.0f);
  EXPECT_EQ(FloatFromFp16(0x7bff), 65504.0f);
  EXPECT_EQ(FloatFromFp16(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(FloatFromFp16(0x0400), std::ldexp(1.0f, -14));
  EXPECT_EQ(FloatFromFp16(0xfc00), -std::numeric_limits<float>::infinity());
}

// Halfway between neighbours goes to the even one; a little to either side goes to the nearer.
template <class Narrow, class Widen>
void CheckRounding(Narrow narrow, Widen widen, uint16_t last_finite) {
  for (int i = 0; i < last_finite; ++i) {
    const double low = widen(static_cast<uint16_t>(i));
    const double high = widen(static_cast<uint16_t>(i + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      const int sign_bit = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(narrow(sign * middle), sign_bit | (i + i % 2)) << i;
      ASSERT_EQ(narrow(sign * std::nextafter(middle, 0.0f)), sign_bit | i) << i;
      ASSERT_EQ(narrow(sign * std::nextafter(middle, INFINITY)), sign_bit | (i + 1)) << i;
    }
  }
}

TEST(Float16, RoundsToNearestEven) {
  CheckRounding(Bf16FromFloat, FloatFromBf16, 0x7f7f);
  CheckRounding(Fp16FromFloat, FloatFromFp16, 0x7bff);
  EXPECT_EQ(Bf16FromFloat(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(Fp16FromFloat(65519.9f), 0x7bff);
  EXPECT_EQ(Fp16FromFloat(65520.0f), 0x7c00);
  EXPECT_EQ(Fp16FromFloat(1e30f), 0x7c00);
}

TEST(Float16, DoubleIsRoundedOnce) {
  // Just above the middle of two BF16 values, by less than a float can show.
  const double middle = 1.0 + std::ldexp(1.0, -8);
  EXPECT_EQ(Bf16FromDouble(middle), 0x3f80);
  EXPECT_EQ(Bf16FromDouble(middle + std::ldexp(1.0, -40)), 0x3f81);
  EXPECT_EQ(Bf16FromDouble(middle - std::ldexp(1.0, -40)), 0x3f80);
  EXPECT_EQ(Bf16FromDouble(-middle - std::ldexp(1.0, -40)), 0xbf81);
  const double above = 1.0 + 3 * std::ldexp(1.0, -8);
  EXPECT_EQ(Bf16FromDouble(above), 0x3f82);
  EXPECT_EQ(Bf16FromDouble(above - std::ldexp(1.0, -40)), 0x3f81);
  EXPECT_EQ(Bf16FromDouble(1e300), 0x7f80);
  EXPECT_EQ(Bf16FromDouble(0.0), 0);
}

}  // namespace
}  // namespace sluice
