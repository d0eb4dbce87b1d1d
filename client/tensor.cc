#include "client/tensor.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace sluice::client {

static_assert(std::endian::native == std::endian::little, "Tensors are little-endian");

int64_t DtypeBytes(v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
    case v1::DTYPE_FP16:
      return 2;
    case v1::DTYPE_F32:
      return 4;
    default:
      return 0;
  }
}

uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // Rounding could carry a NaN's payload into the infinities, or lose it: set the quiet bit
  // instead.
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  // 65520 and above round to infinity.
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {
    // Below 2^-14 the result is subnormal, in steps of 2^-24: adding 2^-1 puts that step at the end
    // of the mantissa, so that the addition itself rounds to the nearest, ties to even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000);
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -value : value;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::vector<uint16_t> ToBits(v1::Dtype dtype, absl::Span<const float> values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    bits[i] = dtype == v1::DTYPE_FP16 ? FloatToFp16(values[i]) : FloatToBf16(values[i]);
  }
  return bits;
}

std::vector<float> ToFloats(v1::Dtype dtype, absl::Span<const uint16_t> bits) {
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = dtype == v1::DTYPE_FP16 ? Fp16ToFloat(bits[i]) : Bf16ToFloat(bits[i]);
  }
  return values;
}

std::vector<float> ToFloats(const v1::Tensor& tensor) {
  if (tensor.dtype() != v1::DTYPE_F32) return ToFloats(tensor.dtype(), Bits(tensor));
  const absl::Span<const float> floats = Floats(tensor);
  return std::vector<float>(floats.begin(), floats.end());
}

void SetTensor(v1::Dtype dtype, absl::Span<const int64_t> shape, absl::Span<const uint16_t> bits,
               v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  tensor->mutable_data()->assign(reinterpret_cast<const char*>(bits.data()),
                                 bits.size() * sizeof(uint16_t));
}

absl::Span<const uint16_t> Bits(const v1::Tensor& tensor) {
  return absl::MakeConstSpan(reinterpret_cast<const uint16_t*>(tensor.data().data()),
                             tensor.data().size() / sizeof(uint16_t));
}

absl::Span<const float> Floats(const v1::Tensor& tensor) {
  return absl::MakeConstSpan(reinterpret_cast<const float*>(tensor.data().data()),
                             tensor.data().size() / sizeof(float));
}

}  // namespace sluice::client
