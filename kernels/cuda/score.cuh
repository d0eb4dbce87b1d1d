// What the kernels of ScoreBlocks share: the workspace, the order of scores, reductions.

#ifndef KERNELS_CUDA_SCORE_CUH_
#define KERNELS_CUDA_SCORE_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/op_kernels.h"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {

inline constexpr int kRangeBlocks = 32;  // of one block of threads
inline constexpr int kScoreTileTokens = 16;
inline constexpr int kScoreAhead = 4;  // tiles that are read, and reduced, together
inline constexpr int kScoreThreads = 256;
inline constexpr int kScoreWarps = kScoreThreads / 32;

struct ScoreWorkspace {
  float* q;            // q', [num_query_heads][rank]
  float* sums;         // MASS: sum of 2^(x - maximum) of a block's tokens, [num_blocks][heads]
  float* maxima;       // MASS: what x was taken against, [groups of blocks][heads]
  float2* ranges;      // MASS: (maximum, sum) of each range, [ranges][heads]
  float2* whole;       // MASS: of all, [heads]
  uint32_t* keys;      // top k: ascending is best first
  uint64_t* selected;  // top k: key and position, a power of two of them
};

// Blocks that have one maximum, as a power of two: those whose tiles are reduced together.
inline __host__ __device__ int MaximumShift(int tiles_log2) {
  return tiles_log2 >= 2 ? 0 : 2 - tiles_log2;
}
inline __host__ __device__ int TilesLog2(int block_tokens) {
  int log2 = 0;
  while (kScoreTileTokens << log2 < block_tokens) ++log2;
  return log2;
}

// Best first, unpredicted last; equal keys go by position.
__device__ __forceinline__ uint32_t OrderKey(bool predicted, float score) {
  if (!predicted) return 0xffffffffu;
  if (score != score) return 0xfffffffeu;  // NaN after all numbers
  const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return ~((bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u);
}

__device__ __forceinline__ bool IsPredicted(const ScoreBlock& block) {
  return block.projected != nullptr && block.valid_tokens > 0;
}

__device__ __forceinline__ float Exp2OfNonPositive(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 2^(x - max); equal infinities weigh 1.
__device__ __forceinline__ float Weight2Of(float x, float max) {
  return x == max ? 1.0f : Exp2OfNonPositive(__fsub_rn(x, max));
}

// (maximum, sum) of a part into another's; an empty one changes nothing.
__device__ __forceinline__ void FoldSums(float2& into, float2 part) {
  if (part.x == MinusInfinity()) return;
  const float max = fmaxf(into.x, part.x);
  into.y = __fmaf_rn(part.y, Weight2Of(part.x, max), __fmul_rn(into.y, Weight2Of(into.x, max)));
  into.x = max;
}

// q' = q P.
cudaError_t LaunchScoreQueries(const ScoreParams& params, const ScoreWorkspace& workspace,
                               cudaStream_t stream);
// MAX_DOT: the scores and, for a top k, their keys. MASS: sums, maxima and ranges.
cudaError_t LaunchScoreBlocks(const ScoreParams& params, const ScoreWorkspace& workspace,
                              cudaStream_t stream);
// MASS: scores and keys from sums, maxima and ranges.
cudaError_t LaunchScoreMasses(const ScoreParams& params, const ScoreWorkspace& workspace,
                              cudaStream_t stream);
// The best top_k of the keys, in order.
cudaError_t LaunchScoreTop(const ScoreParams& params, const ScoreWorkspace& workspace,
                           int64_t selected_count, cudaStream_t stream);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_SCORE_CUH_
