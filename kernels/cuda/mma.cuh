// Tensor-core products of 16-bit values with FP32 sums, and what packs their operands.

#ifndef KERNELS_CUDA_MMA_CUH_
#define KERNELS_CUDA_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sluice::cuda {

// c[16, 8] += a[16, 16] b[16, 8]; fragments as PTX's mma.m16n8k16 lays them out.
template <typename T>
__device__ __forceinline__ void Mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 2 && __is_same(T, __nv_bfloat16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit values from shared memory: lane i has the address of row i % 8 of
// matrix i / 8, and gets columns 2 (lane % 4) and the next of row lane / 4 of each; transposed, of
// column lane / 4 the rows 2 (lane % 4) and the next.
template <bool kTransposed>
__device__ __forceinline__ uint4 LoadMatrices(uint32_t address) {
  uint4 x;
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
  }
  return x;
}

// Transposes an 8 x 8 matrix of 16-bit values: lane / 4 is the row, (lane % 4) * 2 the column.
__device__ __forceinline__ uint32_t Transpose(uint32_t x) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}

// A pair of floats as high + low, each 16 bits wide: what rounding takes is in `low`.
struct SplitPair {
  uint32_t high;
  uint32_t low;
};
template <typename T>
__device__ __forceinline__ SplitPair Split(float x, float y) {
  SplitPair result;
  if constexpr (__is_same(T, __nv_bfloat16)) {
    const __nv_bfloat162 high = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 low = __floats2bfloat162_rn(x - __low2float(high), y - __high2float(high));
    result.high = reinterpret_cast<const uint32_t&>(high);
    result.low = reinterpret_cast<const uint32_t&>(low);
  } else {
    const __half2 high = __floats2half2_rn(x, y);
    const __half2 low = __floats2half2_rn(x - __low2float(high), y - __high2float(high));
    result.high = reinterpret_cast<const uint32_t&>(high);
    result.low = reinterpret_cast<const uint32_t&>(low);
  }
  return result;
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_MMA_CUH_
