// ProjectKeys. Bytes: each K row once; P comes from L2 and shared memory. Bound by arithmetic:
// head_dim times rank FP64 multiply-adds for a row, since FP32 sums are not within a BF16 ulp of
// the true product where terms cancel.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/op_kernels.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;  // tokens of a kv head that a block takes at a time

__device__ __forceinline__ float Widen(DType dtype, const std::byte* at) {
  return dtype == DType::kBf16 ? __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at))
                               : __half2float(*reinterpret_cast<const __half*>(at));
}

// x: blocks; y: kv heads; z: pieces of kRows tokens. Shared: the rows as floats. Threads take
// columns of the rank; the threads of one column take every other row.
__global__ void __launch_bounds__(kThreads) ProjectKeysKernel(ProjectKeysParams params) {
  __shared__ float rows[kRows][kMaxHeadDim];
  const KvLayout& layout = params.layout;
  const ProjectBlock block = params.blocks[blockIdx.x];
  const int head = blockIdx.y;
  const int first = block.first_token + static_cast<int>(blockIdx.z) * kRows;
  const int count = min(kRows, block.first_token + block.num_tokens - first);
  if (count <= 0) return;
  const std::byte* k = block.block + head * layout.kv_head_stride_bytes;
  for (int i = threadIdx.x; i < count * layout.head_dim; i += kThreads) {
    const int t = i / layout.head_dim;
    const int d = i % layout.head_dim;
    rows[t][d] = Widen(layout.dtype, k + (first + t) * layout.token_stride_bytes + 2 * d);
  }
  __syncthreads();
  const auto* p = reinterpret_cast<const __nv_bfloat16*>(
      params.projection + head * params.projection_kv_head_stride_bytes);
  auto* projected = reinterpret_cast<__nv_bfloat16*>(block.projected) +
                    static_cast<int64_t>(head) * layout.block_tokens * params.rank;
  const int rank = params.rank;
  const int lanes = rank < kThreads ? kThreads / rank : 1;  // threads of one column
  const int lane = static_cast<int>(threadIdx.x) / rank;
  const int column = static_cast<int>(threadIdx.x) % rank;
  if (lane >= lanes) return;
  for (int t = lane; t < count; t += 4 * lanes) {
    double sum[4] = {};
    for (int d = 0; d < layout.head_dim; ++d) {
      const double factor = __bfloat162float(p[d * rank + column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Past `count` stands what was there before: computed, not stored.
        sum[i] = fma(static_cast<double>(rows[min(t + i * lanes, kRows - 1)][d]), factor, sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = t + i * lanes;
      if (row >= count) break;
      // Through float to nearest, as the other devices do.
      projected[static_cast<int64_t>(first + row) * rank + column] =
          __float2bfloat16_rn(static_cast<float>(sum[i]));
    }
  }
}

}  // namespace

cudaError_t LaunchProjectKeys(const ProjectKeysParams& params, int max_tokens,
                              cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.num_blocks), params.layout.num_kv_heads,
                  (max_tokens + kRows - 1) / kRows);
  ProjectKeysKernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sluice::cuda
