// Sizes of one instantiation of the attention kernel, its shared memory, and what a query sees.

#ifndef KERNELS_CUDA_ATTEND_SHAPE_CUH_
#define KERNELS_CUDA_ATTEND_SHAPE_CUH_

#include "kernels/cuda/attend_args.h"
#include "kernels/cuda/attend_kernels.h"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {

inline constexpr int kStepTokens = 16;  // of one product
inline constexpr int kTileSteps = 2;
inline constexpr int kTileTokens = kTileSteps * kStepTokens;
inline constexpr int kSplitTiles = kDeviceSplitTokens / kTileTokens;
inline constexpr int kAttendWarps = kSplitsPerSpan;
inline constexpr int kAttendThreads = 32 * kAttendWarps;

// kPad is head_dim rounded up to 32, kPieces the pieces of 8 rows.
template <int kPad, int kPieces>
struct AttendShape {
  static constexpr int kRows = 8 * kPieces;
  // K and V of a step come in pieces of up to 128 head dimensions. So many are on their way at
  // once.
  static constexpr int kPieceDims = kPad < 128 ? kPad : 128;
  static constexpr int kHalves = kPad <= 128 ? 1 : 2;
  static constexpr int kBuffers = 4;
  static constexpr int kBufferBytes =
      kStepTokens * (2 * kPieceDims + (kPieceDims % 64 == 0 ? 0 : 16));
  static constexpr int kBlocksPerSm = kPad <= kTwoBlocksHeadDim ? 2 : 1;
  static constexpr bool kQueriesInRegisters = kPad <= 128 && kPieces == 1;
  static constexpr int kQueryChunks = kPad / 8 + 1;  // of a row of q, and one to part the banks
  // Folding: a warp takes 64 elements of a row at a time.
  static constexpr int kRowTasks = (kPad + 63) / 64;
  static constexpr int kTasks = kRows * kRowTasks;
  static constexpr int kStateStride = kPad + 4;  // floats from row to row
  // States of splits wait in this many places to be folded: with two, warps may be a whole span
  // apart.
  static constexpr int kStateSlots = kPad <= 128 && kPieces == 1 ? 2 : 1;
};

// Descriptions of units that a warp keeps: of the span that is folded, the one computed, the next.
inline constexpr int kUnitSlots = 4;

// An entry as the warps need it, for one kv head.
struct AttendUnit {
  AttendEntryArgs entry;
  // What some row sees: [0, sink_end) and [begin, end).
  int64_t sink_end;
  int64_t begin;
  int64_t end;
  int32_t kv_head;
  int32_t entry_index;
};

// A state as one lane of a task has it: two elements of o.
struct LaneState {
  float m, l;
  float2 o;
};
// As the warp keeps it.
struct TaskState {
  float2 o[32];
  float2 m_l;
};

template <int kPad, int kPieces>
struct AttendShared {
  using Shape = AttendShape<kPad, kPieces>;
  uint4 q[2][Shape::kRows][Shape::kQueryChunks];
  AttendUnit units[kAttendWarps][kUnitSlots];
  alignas(16) std::byte buffers[kAttendWarps][Shape::kBuffers][Shape::kBufferBytes];
  TaskState chunk[Shape::kTasks];
  TaskState sequence[Shape::kTasks];
  alignas(16) float2 split_m_l[Shape::kStateSlots][Shape::kRows][kAttendWarps];
  alignas(16) float split_o[Shape::kStateSlots][kAttendWarps][Shape::kRows][Shape::kStateStride];
  Barrier full[Shape::kStateSlots];   // all have left their splits' states
  Barrier empty[Shape::kStateSlots];  // all have folded
  int is_last;
};

// The positions that a query token sees: [0, sink_end) and [begin, end).
struct Visible {
  int64_t sink_end;
  int64_t begin;
  int64_t end;
};
__device__ __forceinline__ Visible VisibleTo(const AttendKernelArgs& args,
                                             const AttendEntryArgs& entry, int query_token) {
  Visible visible = {0, 0, entry.context_tokens};
  if (entry.causal != 0) visible.end -= entry.query_tokens - 1 - query_token;
  if (visible.end < 0) visible.end = 0;
  if (args.window_tokens > 0) {
    visible.begin = visible.end > args.window_tokens ? visible.end - args.window_tokens : 0;
    if (args.sink_tokens >= visible.begin) {
      visible.begin = 0;
    } else {
      visible.sink_end = args.sink_tokens;
    }
  }
  return visible;
}

// The same for tokens counted from `start`, as far as the 64 from there tell them apart.
struct VisibleHere {
  int sink_end;
  int begin;
  int end;
  __device__ __forceinline__ bool Sees(int token) const {
    return token < end && (token >= begin || token < sink_end);
  }
};
__device__ __forceinline__ int ClampToSplit(int64_t tokens) {
  return static_cast<int>(tokens < 0                    ? 0
                          : tokens > kDeviceSplitTokens ? kDeviceSplitTokens
                                                        : tokens);
}
__device__ __forceinline__ VisibleHere VisibleFrom(const Visible& visible, int64_t start) {
  return {ClampToSplit(visible.sink_end - start), ClampToSplit(visible.begin - start),
          ClampToSplit(visible.end - start)};
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_SHAPE_CUH_
