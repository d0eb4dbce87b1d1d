// ScoreBlocks. Bytes: A_g of every predicted block once. MASS also writes and reads (m, l) per
// block and query head.
//
// A block of threads takes kRangeBlocks consecutive blocks; a warp one kv head of them at a time,
// 16 tokens by 8 query heads on the tensor cores. q' goes in as three BF16 parts, which together
// are as good as FP32. MASS folds (m, l) in fixed ranges, those in a fixed tree, so that bits do
// not depend on what runs where.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/op_kernels.h"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {
namespace {

constexpr int kRangeBlocks = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQueryThreads = 512;
constexpr int kFoldThreads = 128;
constexpr int kSelectThreads = 1024;
constexpr int kKeysAThread = 16;
constexpr int64_t kSelectKeys = kSelectThreads * kKeysAThread;
constexpr int kSharedSort = 8192;  // selected blocks that are sorted in shared memory
constexpr int64_t kAlignment = 256;

struct Workspace {
  float* q;            // q', [num_query_heads][rank]
  float2* stats;       // MASS: (m, l), [num_blocks][num_query_heads]
  float2* ranges;      // MASS: likewise for each range, [ranges][num_query_heads]
  float2* whole;       // MASS: [num_query_heads]
  uint32_t* keys;      // top k: ascending is best first
  uint64_t* selected;  // top k: key and position, a power of two of them
};

int64_t NumRanges(const ScoreParams& params) {
  return (params.num_blocks + kRangeBlocks - 1) / kRangeBlocks;
}
int64_t SelectedCount(const ScoreParams& params) {
  int64_t count = 1;
  while (count < params.top_k) count *= 2;
  return count;
}

// Lays the workspace out from `base`; returns its bytes.
int64_t Layout(const ScoreParams& params, std::byte* base, Workspace* workspace) {
  int64_t bytes = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(base + bytes);
    const int64_t size = count * static_cast<int64_t>(sizeof(**pointer));
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
  };
  const bool mass = params.kind == ScoreKind::kMass;
  const int64_t heads = params.num_query_heads;
  take(&workspace->q, heads * params.rank);
  take(&workspace->stats, mass ? params.num_blocks * heads : 0);
  take(&workspace->ranges, mass ? NumRanges(params) * heads : 0);
  take(&workspace->whole, mass ? heads : 0);
  take(&workspace->keys, params.top_k > 0 ? params.num_blocks : 0);
  take(&workspace->selected, params.top_k > 0 ? SelectedCount(params) : 0);
  return bytes;
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

// A block of threads: one query head.
__global__ void QueriesKernel(ScoreParams params, Workspace workspace) {
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
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0) return;
  for (int i = 1; i < slices; ++i) sum += sums[i * params.rank + r];
  workspace.q[head * params.rank + r] = static_cast<float>(sum);
}

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

template <int kSlices>
__device__ __forceinline__ void Dots(const Queries<kSlices>& q, const Rows<kSlices>& rows,
                                     float (&s)[4]) {
  float small[4] = {};
#pragma unroll
  for (int c = 0; c < 4; ++c) s[c] = 0.0f;
#pragma unroll
  for (int j = 0; j < kSlices; ++j) {
    const uint4& a = rows.low[j];
    const uint4& b = rows.high[j];
#pragma unroll
    for (int part = 2; part >= 0; --part) {
      float(&sum)[4] = part == 0 ? s : small;
      Mma<__nv_bfloat16>(sum, a.x, b.x, a.y, b.y, q.part[part][j][0], q.part[part][j][1]);
      Mma<__nv_bfloat16>(sum, a.z, b.z, a.w, b.w, q.part[part][j][2], q.part[part][j][3]);
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) s[c] = __fadd_rn(s[c], small[c]);
}

template <int kSlices, bool kWide, bool kMass>
__global__ void __launch_bounds__(kThreads, kSlices == 1 ? 4 : 2)
    BlocksKernel(ScoreParams params, Workspace workspace) {
  // Tiles whose rows are read before they are multiplied.
  constexpr int kAhead = kSlices == 1 ? 4 : kSlices == 2 ? 2 : 1;
  __shared__ ScoreBlock blocks[kRangeBlocks];
  __shared__ float maxima[kWarps][kRangeBlocks];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRangeBlocks;
  const int count = static_cast<int>(min(int64_t{kRangeBlocks}, params.num_blocks - first));
  for (int i = threadIdx.x; i < kRangeBlocks; i += kThreads) {
    blocks[i] = i < count ? params.blocks[first + i] : ScoreBlock{};
    if (!IsPredicted(blocks[i])) blocks[i].valid_tokens = 0;
  }
  maxima[warp][lane] = MinusInfinity();
  __syncthreads();

  const int group = params.num_query_heads / params.num_kv_heads;
  const int pieces = (group + 7) / 8;
  const int tiles = (params.block_tokens + 15) / 16;
  const int64_t row_bytes = 2 * params.rank;
  for (int task = warp; task < params.num_kv_heads * pieces; task += kWarps) {
    const int kv_head = task / pieces;
    const int head = kv_head * group + task % pieces * 8;
    const int num_rows = min(8, (kv_head + 1) * group - head);
    Queries<kSlices> q;
    q.Load(workspace.q + static_cast<int64_t>(head) * params.rank, params.rank, num_rows, lane);
    const int64_t head_offset = kv_head * params.block_tokens * row_bytes;
    const bool column_present[2] = {lane % 4 * 2 < num_rows, lane % 4 * 2 + 1 < num_rows};

    float m[2] = {MinusInfinity(), MinusInfinity()};
    float l[2] = {0.0f, 0.0f};
    for (int base = 0; base < count * tiles; base += kAhead) {
      Rows<kSlices> rows[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = min(base + i, count * tiles - 1);
        const ScoreBlock block = blocks[index / tiles];
        const int token = index % tiles * 16 + lane / 4;
        const std::byte* row = block.projected + head_offset + token * row_bytes;
#pragma unroll
        for (int j = 0; j < kSlices; ++j) {
          rows[i].low[j] = token < block.valid_tokens
                               ? LoadChunk<kWide>(row, 4 * j + lane % 4, params.rank)
                               : make_uint4(0, 0, 0, 0);
          rows[i].high[j] =
              token + 8 < block.valid_tokens
                  ? LoadChunk<kWide>(row + 8 * row_bytes, 4 * j + lane % 4, params.rank)
                  : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = base + i;
        if (index >= count * tiles) break;
        const int at = index / tiles;
        const int valid_tokens = blocks[at].valid_tokens;
        const int token = index % tiles * 16 + lane / 4;
        float s[4];
        Dots<kSlices>(q, rows[i], s);
        const bool seen[2] = {token < valid_tokens, token + 8 < valid_tokens};
        if constexpr (!kMass) {
          float max = MinusInfinity();
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (seen[c / 2] && column_present[c % 2]) max = fmaxf(max, s[c]);
          }
#pragma unroll
          for (int mask = 1; mask < 32; mask *= 2) {
            max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
          }
          if (lane == 0) maxima[warp][at] = fmaxf(maxima[warp][at], max);
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float low = seen[0] ? __fmul_rn(s[c], params.scale) : MinusInfinity();
            const float high = seen[1] ? __fmul_rn(s[c + 2], params.scale) : MinusInfinity();
            float max = fmaxf(low, high);
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
              max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
            }
            float sum = 0.0f;
            if (max != MinusInfinity()) sum = __fadd_rn(WeightOf(low, max), WeightOf(high, max));
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
              sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
            }
            Fold fold;
            FoldBegin(m[c], l[c], max, sum, fold);
            if (index % tiles == tiles - 1) {
              if (lane / 4 == 0 && column_present[c]) {
                workspace.stats[(first + at) * params.num_query_heads + head + lane * 2 + c] =
                    make_float2(m[c], l[c]);
              }
              m[c] = MinusInfinity();
              l[c] = 0.0f;
            }
          }
        }
      }
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < count; i += kThreads) {
    const bool predicted = blocks[i].valid_tokens > 0;
    if (kMass && predicted) continue;  // known only when the whole is
    float max = MinusInfinity();
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, maxima[w][i]);
    params.scores[first + i] = max;
    if (params.top_k > 0) workspace.keys[first + i] = OrderKey(predicted, max);
  }
  if constexpr (kMass) {
    for (int h = threadIdx.x; h < params.num_query_heads; h += kThreads) {
      float m = MinusInfinity();
      float l = 0.0f;
      for (int i = 0; i < count; ++i) {
        const float2 part = workspace.stats[(first + i) * params.num_query_heads + h];
        Fold fold;
        FoldBegin(m, l, part.x, part.y, fold);
      }
      workspace.ranges[blockIdx.x * static_cast<int64_t>(params.num_query_heads) + h] =
          make_float2(m, l);
    }
  }
}

// A block of threads: one query head. Thread t folds ranges t, t + kFoldThreads, ...; then the
// threads' sums fold pairwise.
__global__ void __launch_bounds__(kFoldThreads)
    WholeKernel(ScoreParams params, Workspace workspace, int64_t num_ranges) {
  __shared__ float2 parts[kFoldThreads];
  float m = MinusInfinity();
  float l = 0.0f;
  Fold fold;
  for (int64_t i = threadIdx.x; i < num_ranges; i += kFoldThreads) {
    const float2 part = workspace.ranges[i * params.num_query_heads + blockIdx.x];
    FoldBegin(m, l, part.x, part.y, fold);
  }
  parts[threadIdx.x] = make_float2(m, l);
  for (int half = kFoldThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= half) continue;
    float2 into = parts[threadIdx.x];
    const float2 part = parts[threadIdx.x + half];
    FoldBegin(into.x, into.y, part.x, part.y, fold);
    parts[threadIdx.x] = into;
  }
  if (threadIdx.x == 0) workspace.whole[blockIdx.x] = parts[0];
}

// A warp: one block.
__global__ void __launch_bounds__(kThreads) MassesKernel(ScoreParams params, Workspace workspace) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (b >= params.num_blocks || !IsPredicted(params.blocks[b])) return;
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int h = lane; h < params.num_query_heads; h += 32) {
    const float2 part = workspace.stats[b * params.num_query_heads + h];
    const float2 whole = workspace.whole[h];
    sum = __fadd_rn(sum, __fdiv_rn(__fmul_rn(part.y, WeightOf(part.x, whole.x)), whole.y));
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
  }
  if (lane != 0) return;
  const float score = __fdiv_rn(sum, static_cast<float>(params.num_query_heads));
  params.scores[b] = score;
  if (params.top_k > 0) workspace.keys[b] = OrderKey(true, score);
}

// ------------------------------------------------------------------ top k

// Sorts ascending; count is a power of two.
__device__ void BitonicSort(uint64_t* values, int64_t count) {
  for (int64_t size = 2; size <= count; size *= 2) {
    for (int64_t stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x; i < count / 2; i += kSelectThreads) {
        const int64_t low = 2 * i - (i & (stride - 1));
        const int64_t high = low + stride;
        const bool ascending = (low & size) == 0;
        const uint64_t a = values[low];
        const uint64_t b = values[high];
        if ((a > b) == ascending) {
          values[low] = b;
          values[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The keys of this thread among kSelectKeys from `first` on; what lies past n is not read.
__device__ __forceinline__ void LoadKeys(const uint32_t* keys, int64_t n, int64_t first,
                                         uint32_t (&key)[kKeysAThread]) {
  const int64_t at = first + threadIdx.x * kKeysAThread;
  if (at + kKeysAThread <= n) {
#pragma unroll
    for (int i = 0; i < kKeysAThread; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(keys + at + i);
      key[i] = x.x;
      key[i + 1] = x.y;
      key[i + 2] = x.z;
      key[i + 3] = x.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kKeysAThread; ++i) key[i] = at + i < n ? keys[at + i] : 0;
  }
}

// One block of threads: a radix search for the key of the k-th block, a collection of those up to
// it, a sort.
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(ScoreParams params, Workspace workspace, int64_t selected_count) {
  extern __shared__ uint64_t sorted_shared[];
  __shared__ uint32_t histogram[256];
  __shared__ uint32_t found_digit;
  __shared__ int64_t found_before;
  __shared__ uint32_t num_selected;
  __shared__ int warp_counts[kSelectThreads / 32];
  uint64_t* selected = selected_count <= kSharedSort ? sorted_shared : workspace.selected;
  const int64_t n = params.num_blocks;
  uint32_t prefix = 0;          // of the k-th key
  int64_t rest = params.top_k;  // its rank among the keys that share the prefix, from 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kSelectThreads) histogram[i] = 0;
    __syncthreads();
    for (int64_t first = 0; first < n; first += kSelectKeys) {
      uint32_t key[kKeysAThread];
      LoadKeys(workspace.keys, n, first, key);
#pragma unroll
      for (int i = 0; i < kKeysAThread; ++i) {
        if (first + threadIdx.x * kKeysAThread + i >= n) break;
        if (shift == 24 || key[i] >> (shift + 8) == prefix) {
          atomicAdd(&histogram[(key[i] >> shift) & 255], 1u);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      uint32_t count[8];
      int64_t through = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) through += count[i] = histogram[8 * threadIdx.x + i];
      const int64_t own = through;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, through, distance);
        if (static_cast<int>(threadIdx.x) >= distance) through += other;
      }
      int64_t before = through - own;
      if (before < rest && rest <= through) {
        int i = 0;
        while (before + count[i] < rest) before += count[i++];
        found_digit = 8 * threadIdx.x + i;
        found_before = before;
      }
      if (threadIdx.x == 0) num_selected = 0;
    }
    __syncthreads();
    prefix = prefix << 8 | found_digit;
    rest -= found_before;
    __syncthreads();
  }
  // Of the blocks whose key equals `prefix`, the first `rest` by position.
  int64_t equal_before = 0;
  for (int64_t first = 0; first < n; first += kSelectKeys) {
    uint32_t key[kKeysAThread];
    LoadKeys(workspace.keys, n, first, key);
    const int64_t position = first + threadIdx.x * kKeysAThread;
    const int count = static_cast<int>(min(int64_t{kKeysAThread}, n - position));  // or less than 0
    int num_equal = 0;
#pragma unroll
    for (int i = 0; i < kKeysAThread; ++i) num_equal += i < count && key[i] == prefix;
    int64_t rank = equal_before;
    if (__syncthreads_or(num_equal > 0) != 0) {
      // Equal keys of the threads before this one.
      int through = num_equal;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, through, distance);
        if (static_cast<int>(threadIdx.x % 32) >= distance) through += other;
      }
      const int warp = threadIdx.x / 32;
      if (threadIdx.x % 32 == 31) warp_counts[warp] = through;
      __syncthreads();
      rank += through - num_equal;
      for (int w = 0; w < kSelectThreads / 32; ++w) {
        if (w < warp) rank += warp_counts[w];
        equal_before += warp_counts[w];
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kKeysAThread; ++i) {
      if (i >= count) break;
      const bool equal = key[i] == prefix;
      if (key[i] < prefix || (equal && rank < rest)) {
        selected[atomicAdd(&num_selected, 1u)] =
            static_cast<uint64_t>(key[i]) << 32 | static_cast<uint64_t>(position + i);
      }
      rank += equal;
    }
  }
  __syncthreads();
  for (int64_t i = params.top_k + threadIdx.x; i < selected_count; i += kSelectThreads) {
    selected[i] = UINT64_MAX;
  }
  BitonicSort(selected, selected_count);
  for (int64_t i = threadIdx.x; i < params.top_k; i += kSelectThreads) {
    params.top[i] = static_cast<int64_t>(selected[i] & 0xffffffffu);
  }
}

template <int kSlices>
void LaunchBlocks(const ScoreParams& params, const Workspace& workspace, bool wide,
                  cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(NumRanges(params));
  const bool mass = params.kind == ScoreKind::kMass;
  if (wide && mass) {
    BlocksKernel<kSlices, true, true><<<blocks, kThreads, 0, stream>>>(params, workspace);
  } else if (wide) {
    BlocksKernel<kSlices, true, false><<<blocks, kThreads, 0, stream>>>(params, workspace);
  } else if (mass) {
    BlocksKernel<kSlices, false, true><<<blocks, kThreads, 0, stream>>>(params, workspace);
  } else {
    BlocksKernel<kSlices, false, false><<<blocks, kThreads, 0, stream>>>(params, workspace);
  }
}

}  // namespace

int64_t ScoreWorkspaceBytes(const ScoreParams& params) {
  Workspace workspace;
  return kAlignment + Layout(params, nullptr, &workspace);
}

cudaError_t LaunchScore(const ScoreParams& params, cudaStream_t stream) {
  if (params.num_blocks == 0) return cudaSuccess;
  Workspace workspace;
  const auto raw = reinterpret_cast<int64_t>(params.workspace);
  Layout(params, params.workspace + ((raw + kAlignment - 1) / kAlignment * kAlignment - raw),
         &workspace);
  QueriesKernel<<<params.num_query_heads, kQueryThreads, 0, stream>>>(params, workspace);
  const bool wide = params.rank % 8 == 0;
  switch ((params.rank + 31) / 32) {
    case 1:
      LaunchBlocks<1>(params, workspace, wide, stream);
      break;
    case 2:
      LaunchBlocks<2>(params, workspace, wide, stream);
      break;
    case 3:
      LaunchBlocks<3>(params, workspace, wide, stream);
      break;
    default:
      LaunchBlocks<4>(params, workspace, wide, stream);
  }
  if (params.kind == ScoreKind::kMass) {
    WholeKernel<<<params.num_query_heads, kFoldThreads, 0, stream>>>(params, workspace,
                                                                     NumRanges(params));
    MassesKernel<<<static_cast<unsigned>((params.num_blocks + kWarps - 1) / kWarps), kThreads, 0,
                   stream>>>(params, workspace);
  }
  if (params.top_k > 0) {
    const int64_t count = SelectedCount(params);
    static const cudaError_t shared_set =
        cudaFuncSetAttribute(SelectKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedSort * static_cast<int>(sizeof(uint64_t)));
    if (shared_set != cudaSuccess) return shared_set;
    const int64_t shared_bytes = count <= kSharedSort ? count * 8 : 0;
    SelectKernel<<<1, kSelectThreads, shared_bytes, stream>>>(params, workspace, count);
  }
  return cudaGetLastError();
}

}  // namespace sluice::cuda
