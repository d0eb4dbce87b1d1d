// ScoreBlocks over all blocks. Bytes: A_g of every predicted block once; MASS also writes a float
// per block and query head.
//
// A block of threads takes kRangeBlocks consecutive blocks; a warp one kv head of them at a time,
// 16 tokens by 8 query heads on the tensor cores. q' goes in as three BF16 parts, which together
// are as good as FP32. What is reduced across lanes is reduced for kScoreAhead tiles together: each
// exchange halves the tiles that a lane is left with. MASS takes exponentials against the largest
// logit so far in the range, so that bits do not depend on what runs where.

#include <cuda_bf16.h>

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/score.cuh"

namespace sluice::cuda {
namespace {

static_assert(kScoreAhead == 4);  // what the exchanges are written for

// 8 values of a row of A_g, zero past the rank.
template <bool kWide>
__device__ __forceinline__ uint4 LoadChunk(const std::byte* row, int chunk, int rank) {
  if constexpr (kWide) {
    if (8 * chunk >= rank) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(row) + chunk);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 8 * chunk + 2 * i;
      const auto* values = reinterpret_cast<const uint16_t*>(row);
      const uint32_t low = r < rank ? values[r] : 0;
      const uint32_t high = r + 1 < rank ? values[r + 1] : 0;
      words[i] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// q' of one kv head, 8 query heads of its group, as three BF16 parts in fragments. Value i of a
// lane's chunk j is rank 32 j + 8 (lane % 4) + i, of query head lane / 4.
template <int kSlices>
struct Queries {
  uint32_t part[3][kSlices][4];

  __device__ __forceinline__ void Load(const float* q, int rank, int num_rows, int lane) {
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = 32 * j + 8 * (lane % 4) + 2 * i + c;
          x[c] = lane / 4 < num_rows && r < rank ? q[lane / 4 * rank + r] : 0.0f;
        }
#pragma unroll
        for (int part_index = 0; part_index < 3; ++part_index) {
          const __nv_bfloat162 rounded = __floats2bfloat162_rn(x[0], x[1]);
          part[part_index][j][i] = reinterpret_cast<const uint32_t&>(rounded);
          x[0] -= __low2float(rounded);
          x[1] -= __high2float(rounded);
        }
      }
    }
  }
};

template <int kSlices>
struct Rows {
  uint4 low[kSlices];
  uint4 high[kSlices];
};

// The small parts first, so that the sum they go into is still small.
template <int kSlices>
__device__ __forceinline__ void Dots(const Queries<kSlices>& q, const Rows<kSlices>& rows,
                                     float (&s)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) s[c] = 0.0f;
#pragma unroll
  for (int part = 2; part >= 0; --part) {
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      const uint4& a = rows.low[j];
      const uint4& b = rows.high[j];
      Mma<__nv_bfloat16>(s, a.x, b.x, a.y, b.y, q.part[part][j][0], q.part[part][j][1]);
      Mma<__nv_bfloat16>(s, a.z, b.z, a.w, b.w, q.part[part][j][2], q.part[part][j][3]);
    }
  }
}

// x[i] of the lanes whose bit is 0 and x[i + kCount / 2] of the others, combined with the
// partner's.
template <int kCount, typename Combine>
__device__ __forceinline__ void Exchange(float (&x)[kCount], int bit, int lane,
                                         const Combine& combine, float (&half)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const bool upper = (lane & bit) != 0;
    const float keep = upper ? x[i + kCount / 2] : x[i];
    const float send = upper ? x[i] : x[i + kCount / 2];
    half[i] = combine(keep, __shfl_xor_sync(0xffffffffu, send, bit));
  }
}

// Floats as integers of the same order.
__device__ __forceinline__ int Ordered(float x) {
  const int bits = __float_as_int(x);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
__device__ __forceinline__ float FromOrdered(int x) {
  return __int_as_float(x >= 0 ? x : x ^ 0x7fffffff);
}

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// What a warp knows of the kv head and of the tiles it works on.
struct Task {
  int head;        // first query head
  int num_rows;    // query heads
  int tiles_log2;  // of a block
  int lane;
};

// Maxima of kScoreAhead tiles from tile `base` of the range on.
__device__ __forceinline__ void KeepMaxima(const Task& task, int base, int num_tiles,
                                           const float (&s)[kScoreAhead][4], int* best) {
  const int column = task.lane % 4 * 2;
  float max[kScoreAhead];
#pragma unroll
  for (int i = 0; i < kScoreAhead; ++i) {
    const float first = column < task.num_rows ? fmaxf(s[i][0], s[i][2]) : MinusInfinity();
    const float second = column + 1 < task.num_rows ? fmaxf(s[i][1], s[i][3]) : MinusInfinity();
    max[i] = fmaxf(first, second);
  }
  float pair[2];
  float one[1];
  Exchange(max, 16, task.lane, Max(), pair);
  Exchange(pair, 8, task.lane, Max(), one);
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) {
    one[0] = fmaxf(one[0], __shfl_xor_sync(0xffffffffu, one[0], mask));
  }
  const int tile = base + task.lane / 8;
  if (task.lane % 8 == 0 && tile < num_tiles) {
    atomicMax(best + (tile >> task.tiles_log2), Ordered(one[0]));
  }
}

// (maximum, sum) of a range in the making. Maxima are the same in all lanes of a column.
struct RangeSums {
  float max[2] = {MinusInfinity(), MinusInfinity()};
  float sum[2] = {0.0f, 0.0f};  // of this lane's tokens
  float block_sum = 0.0f;       // of a block of more than kScoreAhead tiles
};

__device__ __forceinline__ void KeepSums(const Task& task, const ScoreWorkspace& workspace,
                                         int num_query_heads, int64_t first_block, int base,
                                         int num_tiles, const float (&s)[kScoreAhead][4],
                                         RangeSums& range) {
  float x[kScoreAhead][4];
  float alpha[2];
  float part[2 * kScoreAhead];  // [tile][column]
#pragma unroll
  for (int i = 0; i < kScoreAhead; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[i][c] = s[i][c];
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float max = fmaxf(x[0][c], x[0][c + 2]);
#pragma unroll
    for (int i = 1; i < kScoreAhead; ++i) max = fmaxf(max, fmaxf(x[i][c], x[i][c + 2]));
#pragma unroll
    for (int mask = 4; mask <= 16; mask *= 2) {
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
    }
    max = fmaxf(max, range.max[c]);
    alpha[c] = Weight2Of(range.max[c], max);
    range.max[c] = max;
    const float against = max == MinusInfinity() ? 0.0f : max;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoreAhead; ++i) {
      part[2 * i + c] = __fadd_rn(Exp2OfNonPositive(__fsub_rn(x[i][c], against)),
                                  Exp2OfNonPositive(__fsub_rn(x[i][c + 2], against)));
      sum = __fadd_rn(sum, part[2 * i + c]);
    }
    range.sum[c] = __fmaf_rn(range.sum[c], alpha[c], sum);
  }
  // Tile by bits 4 and 3 of the lane, column by bit 2.
  float four[4], two[2], one[1];
  Exchange(part, 16, task.lane, Sum(), four);
  Exchange(four, 8, task.lane, Sum(), two);
  Exchange(two, 4, task.lane, Sum(), one);
  float sum = one[0];
  const int tile = base + task.lane / 8;
  if (task.tiles_log2 >= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
  if (task.tiles_log2 >= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
  const int c = task.lane / 4 % 2;
  const int tile_mask = (1 << task.tiles_log2) - 1;
  if (task.tiles_log2 > 2) {
    sum = __fmaf_rn(range.block_sum, c == 0 ? alpha[0] : alpha[1], sum);
    const bool ends = ((base + kScoreAhead) & tile_mask) == 0;
    range.block_sum = ends ? 0.0f : sum;
    if (!ends) return;
  }
  // Several lanes have the sum of a block of several tiles: those of its first tile here write.
  const bool writes = (task.lane / 8 & tile_mask) == 0 && tile < num_tiles;
  const int column = task.lane % 4 * 2 + c;
  if (!writes || column >= task.num_rows) return;
  const int64_t block = first_block + (tile >> task.tiles_log2);
  workspace.sums[block * num_query_heads + task.head + column] = sum;
  if (task.lane < 8) {
    workspace
        .maxima[(block >> MaximumShift(task.tiles_log2)) * num_query_heads + task.head + column] =
        c == 0 ? range.max[0] : range.max[1];
  }
}

template <int kSlices, bool kWide, bool kMass>
__global__ void __launch_bounds__(kScoreThreads, kSlices == 1   ? 3
                                                 : kSlices == 2 ? 2
                                                                : 1)
    BlocksKernel(ScoreParams params, ScoreWorkspace workspace, int tiles_log2) {
  __shared__ ScoreBlock blocks[kRangeBlocks];
  __shared__ int best[kRangeBlocks];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRangeBlocks;
  const int count = static_cast<int>(min(int64_t{kRangeBlocks}, params.num_blocks - first));
  for (int i = threadIdx.x; i < kRangeBlocks; i += kScoreThreads) {
    blocks[i] = i < count ? params.blocks[first + i] : ScoreBlock{};
    if (!IsPredicted(blocks[i])) blocks[i].valid_tokens = 0;
    best[i] = Ordered(MinusInfinity());
  }
  __syncthreads();
  const uint32_t full_blocks =
      __ballot_sync(0xffffffffu, blocks[lane].valid_tokens == params.block_tokens &&
                                     params.block_tokens >= kScoreTileTokens);
  const bool is_even = params.rank % 32 == 0;
  WaitForKernelBefore();

  const int group = params.num_query_heads / params.num_kv_heads;
  const int pieces = (group + 7) / 8;
  const int num_tiles = count << tiles_log2;
  const int64_t row_bytes = 2 * params.rank;
  const float scale = __fmul_rn(params.scale, kLog2E);
  for (int index = warp; index < params.num_kv_heads * pieces; index += kScoreWarps) {
    const int kv_head = index / pieces;
    Task task;
    task.head = kv_head * group + index % pieces * 8;
    task.num_rows = min(8, (kv_head + 1) * group - task.head);
    task.tiles_log2 = tiles_log2;
    task.lane = lane;
    Queries<kSlices> q;
    q.Load(workspace.q + static_cast<int64_t>(task.head) * params.rank, params.rank, task.num_rows,
           lane);
    const int64_t offset =
        (static_cast<int64_t>(kv_head) * params.block_tokens + lane / 4) * row_bytes;
    RangeSums range;
    for (int base = 0; base < num_tiles; base += kScoreAhead) {
      Rows<kSlices> rows[kScoreAhead];
      // Blocks of these tiles that are full, from the first on.
      const uint32_t full = full_blocks >> (base >> tiles_log2);
      const uint32_t wanted = tiles_log2 == 0 ? 15 : tiles_log2 == 1 ? 3 : 1;
      const bool is_full = kWide && (full & wanted) == wanted && is_even;
      int valid[kScoreAhead] = {};  // tokens of the tile, from this lane's first row on
      if (is_full) {
#pragma unroll
        for (int i = 0; i < kScoreAhead; ++i) {
          const int tile = base + i;
          const int in_block = (tile & ((1 << tiles_log2) - 1)) * kScoreTileTokens;
          const auto* row = reinterpret_cast<const uint4*>(blocks[tile >> tiles_log2].projected +
                                                           offset + in_block * row_bytes);
#pragma unroll
          for (int j = 0; j < kSlices; ++j) {
            rows[i].low[j] = __ldg(row + 4 * j + lane % 4);
            rows[i].high[j] = __ldg(row + 4 * j + lane % 4 + params.rank);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kScoreAhead; ++i) {
          const int tile = base + i;
          const int in_block = (tile & ((1 << tiles_log2) - 1)) * kScoreTileTokens;
          const ScoreBlock& block = blocks[min(tile >> tiles_log2, kRangeBlocks - 1)];
          const std::byte* row = block.projected + offset + in_block * row_bytes;
          valid[i] = tile < num_tiles ? block.valid_tokens - in_block - lane / 4 : 0;
#pragma unroll
          for (int j = 0; j < kSlices; ++j) {
            const int chunk = 4 * j + lane % 4;
            rows[i].low[j] = rows[i].high[j] = make_uint4(0, 0, 0, 0);
            if (valid[i] > 0) rows[i].low[j] = LoadChunk<kWide>(row, chunk, params.rank);
            if (valid[i] > 8) {
              rows[i].high[j] = LoadChunk<kWide>(row + 8 * row_bytes, chunk, params.rank);
            }
          }
        }
      }
      float s[kScoreAhead][4];
#pragma unroll
      for (int i = 0; i < kScoreAhead; ++i) {
        Dots<kSlices>(q, rows[i], s[i]);
        if constexpr (kMass) {
#pragma unroll
          for (int c = 0; c < 4; ++c) s[i][c] = __fmul_rn(s[i][c], scale);
        }
      }
      if (!is_full) {
#pragma unroll
        for (int i = 0; i < kScoreAhead; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (valid[i] <= 8 * (c / 2)) s[i][c] = MinusInfinity();
          }
        }
      }
      if constexpr (kMass) {
        KeepSums(task, workspace, params.num_query_heads, first, base, num_tiles, s, range);
      } else {
        KeepMaxima(task, base, num_tiles, s, best);
      }
    }
    if constexpr (kMass) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = range.sum[c];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
        }
        const int column = lane * 2 + c;
        if (lane < 4 && column < task.num_rows) {
          workspace.ranges[static_cast<int64_t>(blockIdx.x) * params.num_query_heads + task.head +
                           column] = make_float2(range.max[c], sum);
        }
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kScoreThreads) {
    const bool predicted = blocks[i].valid_tokens > 0;
    if (kMass && predicted) continue;  // known only when the whole is
    const float max = FromOrdered(best[i]);
    params.scores[first + i] = max;
    if (params.top_k > 0) workspace.keys[first + i] = OrderKey(predicted, max);
  }
  AllowNextKernel();
}

template <int kSlices>
cudaError_t LaunchSlices(const ScoreParams& params, const ScoreWorkspace& workspace,
                         cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((params.num_blocks + kRangeBlocks - 1) / kRangeBlocks));
  const bool wide = params.rank % 8 == 0;
  const bool mass = params.kind == ScoreKind::kMass;
  const auto kernel =
      wide ? (mass ? BlocksKernel<kSlices, true, true> : BlocksKernel<kSlices, true, false>)
           : (mass ? BlocksKernel<kSlices, false, true> : BlocksKernel<kSlices, false, false>);
  return LaunchAfter(kernel, grid, kScoreThreads, 0, stream, params, workspace,
                     TilesLog2(params.block_tokens));
}

}  // namespace

cudaError_t LaunchScoreBlocks(const ScoreParams& params, const ScoreWorkspace& workspace,
                              cudaStream_t stream) {
  switch ((params.rank + 31) / 32) {
    case 1:
      return LaunchSlices<1>(params, workspace, stream);
    case 2:
      return LaunchSlices<2>(params, workspace, stream);
    case 3:
      return LaunchSlices<3>(params, workspace, stream);
    default:
      return LaunchSlices<4>(params, workspace, stream);
  }
}

}  // namespace sluice::cuda
