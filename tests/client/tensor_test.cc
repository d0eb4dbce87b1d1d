#include "client/tensor.h"

#include <bit>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace sluice::client {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Bf16, RoundsToNearestTiesToEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000)), 0x3f80);  // a tie, down to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000)), 0x3f82);  // a tie, up to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001)), 0x3f81);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBf16(-kInfinity), 0xff80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001)))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7fffffff)))));
}

TEST(Bf16, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    EXPECT_EQ(FloatToBf16(value), bits);
  }
}

TEST(Fp16, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = Fp16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(value))));
    } else {
      EXPECT_EQ(FloatToFp16(value), bits);
    }
  }
}

// Against the compiler's own conversion.
TEST(Fp16, RoundsAsTheHardwareDoes) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4099) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    const auto expected = static_cast<_Float16>(value);
    ASSERT_EQ(FloatToFp16(value), std::bit_cast<uint16_t>(expected)) << value;
  }
}

TEST(Fp16, Edges) {
  EXPECT_EQ(FloatToFp16(65504.0f), 0x7bff);
  EXPECT_EQ(FloatToFp16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToFp16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFp16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToFp16(std::ldexp(1.0f, -24)), 0x0001);
  EXPECT_EQ(FloatToFp16(std::ldexp(1.0f, -25)), 0x0000);  // a tie, down to even
}

TEST(Tensor, SetAndRead) {
  v1::Tensor tensor;
  const std::vector<uint16_t> bits = ToBits(v1::DTYPE_BF16, {1.0f, -2.0f, 0.5f});
  SetTensor(v1::DTYPE_BF16, {3}, bits, &tensor);
  EXPECT_EQ(tensor.dtype(), v1::DTYPE_BF16);
  ASSERT_EQ(tensor.shape_size(), 1);
  EXPECT_EQ(tensor.shape(0), 3);
  EXPECT_EQ(tensor.data().size(), 6u);
  EXPECT_EQ(std::vector<uint16_t>(Bits(tensor).begin(), Bits(tensor).end()), bits);
  EXPECT_EQ(ToFloats(tensor), (std::vector<float>{1.0f, -2.0f, 0.5f}));
}

TEST(Tensor, KeepsItsMemory) {
  v1::Tensor tensor;
  SetTensor(v1::DTYPE_BF16, {}, std::vector<uint16_t>(1000), &tensor);
  const void* before = tensor.data().data();
  SetTensor(v1::DTYPE_BF16, {}, std::vector<uint16_t>(900), &tensor);
  EXPECT_EQ(tensor.data().data(), before);
}

TEST(Tensor, FloatsOfF32) {
  const std::vector<float> values = {1.5f, -kInfinity};
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.set_data(values.data(), values.size() * sizeof(float));
  EXPECT_EQ(ToFloats(tensor), values);
  EXPECT_EQ(Floats(tensor).size(), 2u);
}

TEST(Tensor, DtypeBytes) {
  EXPECT_EQ(DtypeBytes(v1::DTYPE_BF16), 2);
  EXPECT_EQ(DtypeBytes(v1::DTYPE_F32), 4);
  EXPECT_EQ(DtypeBytes(v1::DTYPE_UNSPECIFIED), 0);
}

}  // namespace
}  // namespace sluice::client
