// The best blocks of ScoreBlocks, in order. Bytes: the keys twice, from L2; more often where they
// are not spread out.
//
// One block of threads: every thread finds its best key, the worst of which bounds the k-th; the
// few blocks within that bound go to shared memory, where a search by histograms finds the k-th
// key; the blocks up to it are then sorted. Bound by instructions: one multiprocessor does it all.

#include "kernels/cuda/score.cuh"

namespace sluice::cuda {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kKeysAThread = 16;
constexpr int64_t kSelectKeys = kSelectThreads * kKeysAThread;
constexpr int kSharedSort = 8192;  // selected blocks that are sorted in shared memory
constexpr int kCandidates = 8192;
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSharedBytes = (kSharedSort + kCandidates) * static_cast<int>(sizeof(uint64_t));

// Sorts ascending; count is a power of two.
__device__ void BitonicSort(uint64_t* values, uint32_t count) {
  for (uint32_t size = 2; size <= count && size != 0; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < count / 2; i += kSelectThreads) {
        const uint32_t low = 2 * i - (i & (stride - 1));
        const uint32_t high = low + stride;
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

// Place of key i of this thread among kSelectKeys.
__device__ __forceinline__ uint32_t PlaceOf(int i) {
  return i / 4 * (4 * kSelectThreads) + 4 * threadIdx.x + i % 4;
}
// All of them from `first` on; those past n read as the largest. Returns how many there are.
__device__ __forceinline__ uint32_t LoadKeys(const uint32_t* keys, int64_t n, int64_t first,
                                             uint32_t (&key)[kKeysAThread]) {
  const uint32_t count = static_cast<uint32_t>(min(n - first, kSelectKeys));
  keys += first;
#pragma unroll
  for (int i = 0; i < kKeysAThread; i += 4) {
    const uint32_t at = PlaceOf(i);
    if (at + 4 <= count) {
      const uint4 x = *reinterpret_cast<const uint4*>(keys + at);
      key[i] = x.x;
      key[i + 1] = x.y;
      key[i + 2] = x.z;
      key[i + 3] = x.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) key[i + j] = at + j < count ? keys[at + j] : 0xffffffffu;
    }
  }
  return count;
}

// Sum over the lanes before this one, and this one.
__device__ __forceinline__ int SumThrough(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) value += other;
  }
  return value;
}

struct SelectShared {
  uint32_t histogram[kDigits];
  uint32_t best[kSelectWarps];
  uint32_t bound[kSelectWarps];
  int warp_counts[kSelectWarps];
  uint32_t found_digit;
  uint32_t found_before;
  uint32_t count;
};

// The best key of all, and a bound that at least `top_k` keys are within.
struct Bounds {
  uint32_t best;
  uint32_t bound;
};
__device__ Bounds FindBounds(const uint32_t* keys, int64_t n, int64_t top_k, SelectShared& shared) {
  uint32_t best = 0xffffffffu;
  for (int64_t first = 0; first < n; first += kSelectKeys) {
    uint32_t key[kKeysAThread];
    LoadKeys(keys, n, first, key);
#pragma unroll
    for (int i = 0; i < kKeysAThread; ++i) best = min(best, key[i]);
  }
  const uint32_t warp_best = __reduce_min_sync(0xffffffffu, best);
  const uint32_t warp_bound = __reduce_max_sync(0xffffffffu, best);
  if (threadIdx.x % 32 == 0) {
    shared.best[threadIdx.x / 32] = warp_best;
    shared.bound[threadIdx.x / 32] = warp_bound;
  }
  __syncthreads();
  Bounds bounds;
  bounds.best = __reduce_min_sync(0xffffffffu, shared.best[threadIdx.x % 32]);
  bounds.bound = __reduce_max_sync(0xffffffffu, shared.bound[threadIdx.x % 32]);
  if (top_k > kSelectThreads) bounds.bound = 0xffffffffu;
  return bounds;
}

__device__ __forceinline__ uint64_t KeyAndPosition(uint32_t key, int64_t position) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint64_t>(position);
}

// Collects the blocks within the bound, in any order. Returns how many there are, which may be more
// than there is room for.
__device__ uint32_t CollectCandidates(const uint32_t* keys, int64_t n, uint32_t bound,
                                      uint64_t* candidates, SelectShared& shared) {
  for (int64_t first = 0; first < n; first += kSelectKeys) {
    uint32_t key[kKeysAThread];
    const uint32_t num_keys = LoadKeys(keys, n, first, key);
    uint32_t wanted = 0;  // a bit each
#pragma unroll
    for (int i = 0; i < kKeysAThread; ++i) {
      if (key[i] <= bound && PlaceOf(i) < num_keys) wanted |= 1u << i;
    }
    const int count = __popc(wanted);
    const int through = SumThrough(count);
    uint32_t at = 0;
    if (threadIdx.x % 32 == 31) at = atomicAdd(&shared.count, static_cast<uint32_t>(through));
    at = __shfl_sync(0xffffffffu, at, 31) + through - count;
    for (; wanted != 0; wanted &= wanted - 1) {
      const int64_t position = first + PlaceOf(__ffs(wanted) - 1);
      if (at < kCandidates) candidates[at] = KeyAndPosition(keys[position], position);
      ++at;
    }
  }
  __syncthreads();
  return shared.count;
}

// The k-th key, and how many of the blocks with that key are among the best k.
struct Kth {
  uint32_t key;
  int64_t rest;
};
template <typename ForEachKey>
__device__ Kth FindKth(Bounds bounds, int64_t top_k, SelectShared& shared,
                       const ForEachKey& for_each_key) {
  uint32_t low = bounds.best;
  uint32_t high = bounds.bound;
  int64_t rest = top_k;  // rank of the k-th among the keys in [low, high], from 1
  while (low < high) {
    const int shift = max(0, 32 - __clz(high - low) - kDigitBits);
    for (int i = threadIdx.x; i < kDigits; i += kSelectThreads) shared.histogram[i] = 0;
    __syncthreads();
    for_each_key([&](uint32_t key) {
      if (key >= low && key <= high) atomicAdd(&shared.histogram[(key - low) >> shift], 1u);
    });
    __syncthreads();
    // A thread: one digit.
    const int count = static_cast<int>(shared.histogram[threadIdx.x]);
    int through = SumThrough(count);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 31) shared.warp_counts[warp] = through;
    __syncthreads();
    const int warps_through = SumThrough(shared.warp_counts[threadIdx.x % 32]);
    const int warps_before = __shfl_sync(0xffffffffu, warps_through, max(warp - 1, 0));
    if (warp > 0) through += warps_before;
    if (through - count < rest && rest <= through) {
      shared.found_digit = threadIdx.x;
      shared.found_before = static_cast<uint32_t>(through - count);
    }
    __syncthreads();
    low += shared.found_digit << shift;
    high = low + min(high - low, (1u << shift) - 1);
    rest -= shared.found_before;
  }
  return {low, rest};
}
static_assert(kDigits == kSelectThreads);

// Collects the blocks before the k-th and, of those that equal it, the first `rest` by position,
// from all keys.
__device__ void CollectInOrder(const uint32_t* keys, int64_t n, const Kth& kth, uint64_t* selected,
                               SelectShared& shared) {
  int64_t equal_before = 0;
  for (int64_t first = 0; first < n; first += kSelectKeys) {
    uint32_t key[kKeysAThread];
    const uint32_t num_keys = LoadKeys(keys, n, first, key);
#pragma unroll
    for (int i = 0; i < kKeysAThread; i += 4) {
      int num_equal = 0;
#pragma unroll
      for (int j = i; j < i + 4; ++j) num_equal += key[j] == kth.key && PlaceOf(j) < num_keys;
      int64_t rank = equal_before;
      if (__syncthreads_or(num_equal > 0) != 0) {
        // Equal keys of the threads before this one.
        const int through = SumThrough(num_equal);
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 31) shared.warp_counts[warp] = through;
        __syncthreads();
        rank += through - num_equal;
        for (int w = 0; w < kSelectWarps; ++w) {
          if (w < warp) rank += shared.warp_counts[w];
          equal_before += shared.warp_counts[w];
        }
      }
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        if (PlaceOf(j) >= num_keys) break;
        const bool equal = key[j] == kth.key;
        if (key[j] < kth.key || (equal && rank < kth.rest)) {
          selected[atomicAdd(&shared.count, 1u)] = KeyAndPosition(key[j], first + PlaceOf(j));
        }
        rank += equal;
      }
    }
  }
  __syncthreads();
}

// The same from the candidates, with all that equal the k-th: sorting tells which of them come
// first. Returns how many there are, which may be more than there is room for.
__device__ uint32_t CollectFrom(const uint64_t* candidates, uint32_t num_candidates, const Kth& kth,
                                uint64_t* selected, uint32_t room, SelectShared& shared) {
  for (uint32_t i = threadIdx.x; i < num_candidates; i += kSelectThreads) {
    const uint64_t candidate = candidates[i];
    if (static_cast<uint32_t>(candidate >> 32) > kth.key) continue;
    const uint32_t at = atomicAdd(&shared.count, 1u);
    if (at < room) selected[at] = candidate;
  }
  __syncthreads();
  return shared.count;
}

__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(ScoreParams params, ScoreWorkspace workspace, int64_t selected_count) {
  extern __shared__ uint64_t memory[];
  __shared__ SelectShared shared;
  const int64_t n = params.num_blocks;
  uint64_t* candidates = memory + kSharedSort;
  uint64_t* selected = selected_count <= kSharedSort ? memory : workspace.selected;
  const auto room = static_cast<uint32_t>(selected_count);
  const auto clear_count = [&] {
    __syncthreads();
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
  };
  clear_count();
  WaitForKernelBefore();
  const Bounds bounds = FindBounds(workspace.keys, n, params.top_k, shared);
  const uint32_t num_candidates =
      CollectCandidates(workspace.keys, n, bounds.bound, candidates, shared);
  uint32_t count = UINT32_MAX;
  Kth kth;
  if (num_candidates <= kCandidates) {
    kth = FindKth(bounds, params.top_k, shared, [&](const auto& use) {
      for (uint32_t i = threadIdx.x; i < num_candidates; i += kSelectThreads) {
        use(static_cast<uint32_t>(candidates[i] >> 32));
      }
    });
    clear_count();
    count = CollectFrom(candidates, num_candidates, kth, selected, room, shared);
  } else {
    kth = FindKth(bounds, params.top_k, shared, [&](const auto& use) {
      for (int64_t first = 0; first < n; first += kSelectKeys) {
        uint32_t key[kKeysAThread];
        const uint32_t num_keys = LoadKeys(workspace.keys, n, first, key);
#pragma unroll
        for (int i = 0; i < kKeysAThread; ++i) {
          if (PlaceOf(i) < num_keys) use(key[i]);
        }
      }
    });
  }
  if (count > room) {
    clear_count();
    CollectInOrder(workspace.keys, n, kth, selected, shared);
    count = shared.count;
  }
  for (uint32_t i = count + threadIdx.x; i < room; i += kSelectThreads) selected[i] = UINT64_MAX;
  BitonicSort(selected, room);
  for (uint32_t i = threadIdx.x; i < params.top_k; i += kSelectThreads) {
    params.top[i] = static_cast<int64_t>(selected[i] & 0xffffffffu);
  }
}

}  // namespace

cudaError_t LaunchScoreTop(const ScoreParams& params, const ScoreWorkspace& workspace,
                           int64_t selected_count, cudaStream_t stream) {
  static const cudaError_t shared_set =
      cudaFuncSetAttribute(SelectKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (shared_set != cudaSuccess) return shared_set;
  return LaunchAfter(SelectKernel, dim3(1), kSelectThreads, kSharedBytes, stream, params, workspace,
                     selected_count);
}

}  // namespace sluice::cuda
