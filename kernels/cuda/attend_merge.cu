// The parts of a sequence, in order, into its output or its running state. Bytes: the partial
// states once. And the dispatch over the attention kernels.

#include "kernels/cuda/attend_args.h"
#include "kernels/cuda/attend_kernels.h"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {
namespace {

constexpr int kStagedParts = 128;  // whose weights are in shared memory at once
constexpr int kAhead = 16;         // parts whose elements are read before they fold

// What becomes of a part: it folds into its span; the last of a span lets that fold into its chunk;
// the last of a chunk lets that fold into the sequence. Empty ones do not fold.
enum PartFlags : int {
  kFoldsPart = 1,
  kOpensSpan = 2,
  kFoldsSpan = 4,
  kFoldsChunk = 8,
  kEndsChunk = 16,
};
struct alignas(16) PartFold {
  Fold part;
  int flags;
  int padding;
  Fold span, chunk;
};

// The place of a part, in parts from position 0.
__device__ __forceinline__ int PlaceOf(const AttendMergeArgs& merge, int part) {
  return part + (part >= merge.sink_parts ? merge.skipped_parts : 0);
}

__device__ __forceinline__ Fold FoldOf(float into_m, float part_m) {
  const float max = fmaxf(into_m, part_m);
  return {WeightOf(into_m, max), WeightOf(part_m, max)};
}

// Parts of a span, and of a chunk, as powers of two.
struct PartShifts {
  int span;
  int chunk;
};
__device__ __forceinline__ PartShifts ShiftsOf(const AttendMergeArgs& merge) {
  static_assert(kSplitsPerSpan == 8 && kSpansPerChunk == 2);
  return merge.splits_per_part == 1 ? PartShifts{3, 4} : PartShifts{0, 1};
}

// The folds of part i of those staged, whose maxima are m[0, count). They start a chunk, and
// `sequence_m` is what the sequence has before them.
__device__ __forceinline__ PartFold FoldsOf(const AttendMergeArgs& merge, int first, int i,
                                            int count, const float* m, float sequence_m) {
  const PartShifts shifts = ShiftsOf(merge);
  const int place = PlaceOf(merge, first + i);
  const int next = i + 1 < count ? PlaceOf(merge, first + i + 1) : INT32_MAX;
  // Maxima of what comes before this part in its span, before its span in its chunk, before its
  // chunk in the sequence.
  float before_part = MinusInfinity(), before_span = MinusInfinity(), before_chunk = sequence_m;
  bool opens_span = true;
  int j = i - 1;
  for (; j >= 0; --j) {
    const int other = PlaceOf(merge, first + j);
    if (other >> shifts.chunk != place >> shifts.chunk) break;
    if (other >> shifts.span == place >> shifts.span) {
      before_part = fmaxf(before_part, m[j]);
      opens_span = false;
    } else {
      before_span = fmaxf(before_span, m[j]);
    }
  }
#pragma unroll 8
  for (; j >= 0; --j) before_chunk = fmaxf(before_chunk, m[j]);
  const float span_m = fmaxf(before_part, m[i]);
  const float chunk_m = fmaxf(before_span, span_m);
  const bool ends_span = next >> shifts.span != place >> shifts.span;
  const bool ends_chunk = next >> shifts.chunk != place >> shifts.chunk;
  PartFold folds;
  folds.part = FoldOf(before_part, m[i]);
  folds.span = FoldOf(before_span, span_m);
  folds.chunk = FoldOf(before_chunk, chunk_m);
  folds.flags = (m[i] != MinusInfinity() ? kFoldsPart : 0) | (opens_span ? kOpensSpan : 0) |
                (ends_span && span_m != MinusInfinity() ? kFoldsSpan : 0) |
                (ends_chunk && chunk_m != MinusInfinity() ? kFoldsChunk : 0) |
                (ends_chunk ? kEndsChunk : 0);
  return folds;
}

// How many parts from `first` on are staged: whole chunks.
__device__ __forceinline__ int StagedParts(const AttendMergeArgs& merge, int first) {
  if (merge.num_parts - first <= kStagedParts) return merge.num_parts - first;
  const int shift = ShiftsOf(merge).chunk;
  int count = kStagedParts;
  while (PlaceOf(merge, first + count) >> shift == PlaceOf(merge, first + count - 1) >> shift) {
    --count;
  }
  return count;
}

// A block: one row and query head. A thread: one element of o, the one after them l, which folds
// alike. Weights depend on the maxima alone and are reckoned side by side, so that what is left to
// do one after the other is a multiplication and an addition a part.
__global__ void __launch_bounds__(kMaxHeadDim + 32)
    AttendMergeKernel(const __grid_constant__ AttendKernelArgs args) {
  __shared__ float m[kStagedParts];
  __shared__ PartFold folds[kStagedParts];  // to a multiple of kAhead; the rest do nothing
  __shared__ float finish_factor;
  const std::byte* arrays = args.arrays != nullptr ? args.arrays : args.inline_arrays;
  const AttendMergeArgs merge =
      reinterpret_cast<const AttendMergeArgs*>(arrays + args.merges_offset)[blockIdx.y];
  const int64_t row_states = args.num_query_heads;
  if (blockIdx.x >= merge.query_tokens * row_states) return;
  const int head = static_cast<int>(blockIdx.x % row_states);
  const int64_t at = merge.first_row * row_states + blockIdx.x;
  const int64_t part_states = merge.query_tokens * row_states;
  const bool to_state = args.state.m != nullptr;
  const int d = threadIdx.x;
  const bool is_l = d == args.head_dim;
  const bool has_element = d <= args.head_dim;
  WaitForKernelBefore();
  float sequence_m = MinusInfinity();
  float sequence = 0.0f, chunk = 0.0f, span = 0.0f;
  if (to_state) {
    sequence_m = args.state.m[at];
    if (has_element) sequence = is_l ? args.state.l[at] : args.state.o[at * args.head_dim + d];
  }
  for (int first = 0; first < merge.num_parts;) {
    const int count = StagedParts(merge, first);
    const int64_t state = merge.first_state + first * part_states + blockIdx.x;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      m[i] = args.partial_m_l[2 * (state + i * part_states)];
    }
    // Element 0 of these, and how far the next is.
    const float* elements = is_l ? args.partial_m_l + 2 * state + 1
                                 : args.partial_o + state * args.head_dim + (has_element ? d : 0);
    const int64_t stride = part_states * (is_l ? 2 : args.head_dim);
    float ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = i < count ? elements[i * stride] : 0.0f;
    __syncthreads();
    for (int i = threadIdx.x; i < (count + kAhead - 1) / kAhead * kAhead; i += blockDim.x) {
      if (i < count) {
        folds[i] = FoldsOf(merge, first, i, count, m, sequence_m);
      } else {
        folds[i].flags = 0;
      }
    }
    __syncthreads();
    for (int base = 0; base < count; base += kAhead) {
      float element[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        element[i] = ahead[i];
        const int later = base + kAhead + i;
        ahead[i] = later < count ? elements[later * stride] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const PartFold& fold = folds[base + i];
        const int flags = fold.flags;
        if ((flags & kOpensSpan) != 0) span = 0.0f;
        const float folded = FoldElement(fold.part, span, element[i]);
        if ((flags & kFoldsPart) != 0) span = folded;
        if ((flags & (kFoldsSpan | kEndsChunk)) == 0) continue;
        if ((flags & kFoldsSpan) != 0) chunk = FoldElement(fold.span, chunk, span);
        if ((flags & kFoldsChunk) != 0) sequence = FoldElement(fold.chunk, sequence, chunk);
        if ((flags & kEndsChunk) != 0) chunk = 0.0f;
      }
    }
#pragma unroll 8
    for (int i = 0; i < count; ++i) sequence_m = fmaxf(sequence_m, m[i]);
    first += count;
  }
  if (to_state) {
    // Every thread has read m.
    __syncthreads();
    if (is_l) {
      args.state.l[at] = sequence;
      args.state.m[at] = sequence_m;
    } else if (has_element) {
      args.state.o[at * args.head_dim + d] = sequence;
    }
    return;
  }
  if (is_l) {
    const Finish finish = FinishOf(sequence_m, sequence,
                                   args.sink_logits == nullptr ? nullptr : args.sink_logits + head);
    finish_factor = finish.factor;
    if (args.lse != nullptr) args.lse[at] = finish.lse;
  }
  __syncthreads();
  if (d < args.head_dim) {
    StoreOut(args.out_dtype, args.out, at * args.head_dim + d, __fmul_rn(sequence, finish_factor));
  }
}

}  // namespace

cudaError_t LaunchAttend(AttendKernelArgs& args, int pieces, int num_sms, cudaStream_t stream) {
  if (args.dtype == DType::kBf16) {
    return pieces == 1 ? LaunchAttendBf16x1(args, num_sms, stream)
                       : LaunchAttendBf16x2(args, num_sms, stream);
  }
  return pieces == 1 ? LaunchAttendFp16x1(args, num_sms, stream)
                     : LaunchAttendFp16x2(args, num_sms, stream);
}

cudaError_t LaunchAttendMerge(const AttendKernelArgs& args, int max_query_tokens,
                              cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(max_query_tokens * args.num_query_heads, args.num_merges);
  config.blockDim = dim3((args.head_dim + 32) / 32 * 32);
  config.stream = stream;
  // It may start while the attention kernel ends.
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = args.num_units > 0;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, AttendMergeKernel, args);
}

}  // namespace sluice::cuda
