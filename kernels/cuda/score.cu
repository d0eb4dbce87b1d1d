// ScoreBlocks: q', then a kernel over all blocks (score_blocks.cu), for MASS two more that bring
// the parts together, for a top k one that selects (score_top.cu). Here are the small ones.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/score.cuh"

namespace sluice::cuda {
namespace {

constexpr int kQueryThreads = 512;
constexpr int kFoldThreads = 512;
constexpr int kMassBlocks = 4;  // of one warp
constexpr int64_t kAlignment = 256;

int64_t NumRanges(const ScoreParams& params) {
  return (params.num_blocks + kRangeBlocks - 1) / kRangeBlocks;
}
int64_t SelectedCount(const ScoreParams& params) {
  int64_t count = 1;
  while (count < params.top_k) count *= 2;
  return count;
}

// Lays the workspace out from `base`; returns its bytes.
int64_t Layout(const ScoreParams& params, std::byte* base, ScoreWorkspace* workspace) {
  int64_t bytes = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(base + bytes);
    const int64_t size = count * static_cast<int64_t>(sizeof(**pointer));
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
  };
  const bool mass = params.kind == ScoreKind::kMass;
  const int64_t heads = params.num_query_heads;
  const int shift = MaximumShift(TilesLog2(params.block_tokens));
  take(&workspace->q, heads * params.rank);
  take(&workspace->sums, mass ? params.num_blocks * heads : 0);
  take(&workspace->maxima, mass ? ((params.num_blocks >> shift) + 1) * heads : 0);
  take(&workspace->ranges, mass ? NumRanges(params) * heads : 0);
  take(&workspace->whole, mass ? heads : 0);
  take(&workspace->keys, params.top_k > 0 ? params.num_blocks : 0);
  take(&workspace->selected, params.top_k > 0 ? SelectedCount(params) : 0);
  return bytes;
}

// A block of threads: one query head.
__global__ void __launch_bounds__(kQueryThreads)
    QueriesKernel(ScoreParams params, ScoreWorkspace workspace) {
  const int head = blockIdx.x;
  const int kv_head = head / (params.num_query_heads / params.num_kv_heads);
  const auto* p = reinterpret_cast<const __nv_bfloat16*>(
      params.projection + kv_head * params.projection_kv_head_stride_bytes);
  const std::byte* q = params.q + static_cast<int64_t>(head) * params.head_dim * 2;
  __shared__ float row[kMaxHeadDim];
  for (int d = threadIdx.x; d < params.head_dim; d += blockDim.x) {
    row[d] = params.q_dtype == DType::kBf16
                 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(q)[d])
                 : __half2float(reinterpret_cast<const __half*>(q)[d]);
  }
  __syncthreads();
  // A thread sums one column over one slice of the head dimensions; the slices add up in order.
  __shared__ double sums[kQueryThreads];
  const int slices = kQueryThreads / params.rank;
  const int slice = static_cast<int>(threadIdx.x) / params.rank;
  const int r = static_cast<int>(threadIdx.x) % params.rank;
  double sum = 0;
#pragma unroll 8
  for (int d = slice; d < params.head_dim; d += slices) {
    if (slice >= slices) break;
    sum = fma(static_cast<double>(row[d]),
              static_cast<double>(__bfloat162float(p[d * params.rank + r])), sum);
  }
  // Two rounds: each of the first kPartialSums slices adds up every kPartialSums-th.
  constexpr int kPartialSums = 4;
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice < kPartialSums) {
    for (int i = slice + kPartialSums; i < slices; i += kPartialSums) {
      sum += sums[i * params.rank + r];
    }
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  if (slice == 0) {
    for (int i = 1; i < min(slices, kPartialSums); ++i) sum += sums[i * params.rank + r];
    workspace.q[head * params.rank + r] = static_cast<float>(sum);
  }
  AllowNextKernel();
}

// A block of threads: one query head. Thread t folds ranges t, t + kFoldThreads, ...; then the
// threads' sums fold pairwise.
__global__ void __launch_bounds__(kFoldThreads)
    WholeKernel(ScoreParams params, ScoreWorkspace workspace, int64_t num_ranges) {
  __shared__ float2 parts[kFoldThreads];
  float2 into = make_float2(MinusInfinity(), 0.0f);
  WaitForKernelBefore();
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_ranges; i += kFoldThreads) {
    FoldSums(into, workspace.ranges[i * params.num_query_heads + blockIdx.x]);
  }
  parts[threadIdx.x] = into;
  for (int half = kFoldThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= half) continue;
    FoldSums(into, parts[threadIdx.x + half]);
    parts[threadIdx.x] = into;
  }
  if (threadIdx.x == 0) workspace.whole[blockIdx.x] = into;
  AllowNextKernel();
}

// A warp: kMassBlocks blocks.
__global__ void __launch_bounds__(kScoreThreads, 5)
    MassesKernel(ScoreParams params, ScoreWorkspace workspace) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kScoreWarps + threadIdx.x / 32) * kMassBlocks;
  const int lane = threadIdx.x % 32;
  const int shift = MaximumShift(TilesLog2(params.block_tokens));
  const int heads = params.num_query_heads;
  bool predicted[kMassBlocks];
  float sum[kMassBlocks];
#pragma unroll
  for (int i = 0; i < kMassBlocks; ++i) {
    predicted[i] = first + i < params.num_blocks && IsPredicted(params.blocks[first + i]);
    sum[i] = 0.0f;
  }
  WaitForKernelBefore();
  for (int h = lane; h < heads; h += 32) {
    const float2 whole = workspace.whole[h];
    float max[kMassBlocks];
    float part[kMassBlocks];
#pragma unroll
    for (int i = 0; i < kMassBlocks; ++i) {
      const int64_t b = min(first + i, params.num_blocks - 1);
      max[i] = workspace.maxima[(b >> shift) * heads + h];
      part[i] = workspace.sums[b * heads + h];
    }
    const float factor = __fdiv_rn(1.0f, whole.y);
#pragma unroll
    for (int i = 0; i < kMassBlocks; ++i) {
      sum[i] = __fmaf_rn(__fmul_rn(part[i], factor), Weight2Of(max[i], whole.x), sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMassBlocks; ++i) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], mask));
    }
  }
#pragma unroll
  for (int i = 0; i < kMassBlocks; ++i) {
    if (lane != i || !predicted[i]) continue;
    const float score = __fdiv_rn(sum[i], static_cast<float>(heads));
    params.scores[first + i] = score;
    if (params.top_k > 0) workspace.keys[first + i] = OrderKey(true, score);
  }
  AllowNextKernel();
}

}  // namespace

cudaError_t LaunchScoreQueries(const ScoreParams& params, const ScoreWorkspace& workspace,
                               cudaStream_t stream) {
  QueriesKernel<<<params.num_query_heads, kQueryThreads, 0, stream>>>(params, workspace);
  return cudaGetLastError();
}

cudaError_t LaunchScoreMasses(const ScoreParams& params, const ScoreWorkspace& workspace,
                              cudaStream_t stream) {
  const cudaError_t error = LaunchAfter(WholeKernel, dim3(params.num_query_heads), kFoldThreads, 0,
                                        stream, params, workspace, NumRanges(params));
  if (error != cudaSuccess) return error;
  constexpr int64_t kBlocks = kScoreWarps * kMassBlocks;
  const auto blocks = static_cast<unsigned>((params.num_blocks + kBlocks - 1) / kBlocks);
  return LaunchAfter(MassesKernel, dim3(blocks), kScoreThreads, 0, stream, params, workspace);
}

int64_t ScoreWorkspaceBytes(const ScoreParams& params) {
  ScoreWorkspace workspace;
  return kAlignment + Layout(params, nullptr, &workspace);
}

cudaError_t LaunchScore(const ScoreParams& params, cudaStream_t stream) {
  if (params.num_blocks == 0) return cudaSuccess;
  ScoreWorkspace workspace;
  const auto raw = reinterpret_cast<int64_t>(params.workspace);
  Layout(params, params.workspace + ((raw + kAlignment - 1) / kAlignment * kAlignment - raw),
         &workspace);
  cudaError_t error = LaunchScoreQueries(params, workspace, stream);
  if (error == cudaSuccess) error = LaunchScoreBlocks(params, workspace, stream);
  if (error == cudaSuccess && params.kind == ScoreKind::kMass) {
    error = LaunchScoreMasses(params, workspace, stream);
  }
  if (error == cudaSuccess && params.top_k > 0) {
    error = LaunchScoreTop(params, workspace, SelectedCount(params), stream);
  }
  return error;
}

}  // namespace sluice::cuda
