// Running states (m, l, o) on the GPU: weights, folding one into another, the end result. The one
// place where states meet, so that tiles, splits, chunks and parts all fold alike.

#ifndef KERNELS_CUDA_STATE_CUH_
#define KERNELS_CUDA_STATE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "kernels/ops/params.h"

namespace sluice::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float MinusInfinity() { return __int_as_float(0xff800000); }

// e^x for x <= 0.
__device__ __forceinline__ float ExpOfNonPositive(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__fmul_rn(x, kLog2E)));
  return result;
}

// e^(x - max); equal infinities weigh 1.
__device__ __forceinline__ float WeightOf(float x, float max) {
  return x == max ? 1.0f : ExpOfNonPositive(__fsub_rn(x, max));
}

// How a part folds into a state: first the weights, then each element of o.
struct Fold {
  float into_weight;
  float part_weight;
};
// An empty part changes nothing, not even a zero's sign: the caller leaves its elements alone.
__device__ __forceinline__ bool FoldBegin(float& m, float& l, float part_m, float part_l,
                                          Fold& fold) {
  if (part_m == MinusInfinity()) return false;
  const float max = part_m > m ? part_m : m;
  fold.into_weight = WeightOf(m, max);
  fold.part_weight = WeightOf(part_m, max);
  l = __fmaf_rn(part_l, fold.part_weight, __fmul_rn(l, fold.into_weight));
  m = max;
  return true;
}
__device__ __forceinline__ float FoldElement(const Fold& fold, float into, float part) {
  return __fmaf_rn(part, fold.part_weight, __fmul_rn(into, fold.into_weight));
}

// What turns (m, l, o) into the result: out = factor o, and lse.
struct Finish {
  float factor;
  float lse;
};
__device__ __forceinline__ Finish FinishOf(float m, float l, const float* sink_logit) {
  float weight = 1.0f;
  if (sink_logit != nullptr && *sink_logit != MinusInfinity()) {
    const float with_sink = *sink_logit > m ? *sink_logit : m;
    weight = WeightOf(m, with_sink);
    l = __fmaf_rn(l, weight, WeightOf(*sink_logit, with_sink));
    m = with_sink;
  }
  if (l == 0.0f) return {0.0f, MinusInfinity()};
  return {__fdiv_rn(weight, l), __fadd_rn(m, logf(l))};
}

// Element `index` of an output of `dtype`.
__device__ __forceinline__ void StoreOut(DType dtype, std::byte* out, int64_t index, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(out)[index] = value;
  } else if (dtype == DType::kBf16) {
    reinterpret_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(value);
  } else {
    reinterpret_cast<__half*>(out)[index] = __float2half_rn(value);
  }
}
// Elements index and index + 1; index is even.
__device__ __forceinline__ void StoreOut2(DType dtype, std::byte* out, int64_t index, float first,
                                          float second) {
  if (dtype == DType::kF32) {
    *reinterpret_cast<float2*>(out + 4 * index) = make_float2(first, second);
  } else if (dtype == DType::kBf16) {
    *reinterpret_cast<__nv_bfloat162*>(out + 2 * index) = __floats2bfloat162_rn(first, second);
  } else {
    *reinterpret_cast<__half2*>(out + 2 * index) = __floats2half2_rn(first, second);
  }
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_STATE_CUH_
