// Arrays on their way into and out of messages.
//
//   std::vector<uint16_t> q = client::ToBits(v1::DTYPE_BF16, q_floats);
//   client::SetTensor(v1::DTYPE_BF16, {heads, head_dim}, q, request.mutable_q());
//   absl::Span<const uint16_t> out = client::Bits(response.out());
//
// 16-bit elements, BF16 and FP16 alike, are uint16_t: the bits as they are on the wire. The host is
// little-endian.
//
// Threads: every function may be called from any thread. Ownership: spans point into the message
// they came from, and are good until it changes.

#ifndef CLIENT_TENSOR_H_
#define CLIENT_TENSOR_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "sluice/v1/tensor.pb.h"

namespace sluice::client {

// Bytes of an element; 0 for UNSPECIFIED.
int64_t DtypeBytes(v1::Dtype dtype);

// Rounds to the nearest, ties to even. A NaN stays one.
uint16_t FloatToBf16(float value);
float Bf16ToFloat(uint16_t bits);
uint16_t FloatToFp16(float value);
float Fp16ToFloat(uint16_t bits);

// Whole arrays; `dtype` is BF16 or FP16.
std::vector<uint16_t> ToBits(v1::Dtype dtype, absl::Span<const float> values);
std::vector<float> ToFloats(v1::Dtype dtype, absl::Span<const uint16_t> bits);
// The elements of any tensor as floats.
std::vector<float> ToFloats(const v1::Tensor& tensor);

// Copies `bits` into `tensor`, whose memory is used again where it is large enough. An empty shape
// leaves the shape to the request, which is right wherever the request fixes it.
void SetTensor(v1::Dtype dtype, absl::Span<const int64_t> shape, absl::Span<const uint16_t> bits,
               v1::Tensor* tensor);

// The elements of a tensor of 2-byte, or of F32, elements.
absl::Span<const uint16_t> Bits(const v1::Tensor& tensor);
absl::Span<const float> Floats(const v1::Tensor& tensor);

}  // namespace sluice::client

#endif  // CLIENT_TENSOR_H_
