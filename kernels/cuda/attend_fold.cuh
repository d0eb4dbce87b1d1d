// From the states of splits to a result: splits fold into the span, spans into the chunk, chunks
// into the sequence, always in the order of positions. A warp takes 64 elements of one row's o at a
// time, two a lane, and (m, l) with them.

#ifndef KERNELS_CUDA_ATTEND_FOLD_CUH_
#define KERNELS_CUDA_ATTEND_FOLD_CUH_

#include "kernels/cuda/attend_shape.cuh"

namespace sluice::cuda {

__device__ __forceinline__ LaneState EmptyState() {
  return {MinusInfinity(), 0.0f, make_float2(0.0f, 0.0f)};
}

__device__ __forceinline__ void FoldState(LaneState& into, float m, float l, float2 o) {
  Fold fold;
  if (!FoldBegin(into.m, into.l, m, l, fold)) return;
  into.o.x = FoldElement(fold, into.o.x, o.x);
  into.o.y = FoldElement(fold, into.o.y, o.y);
}
__device__ __forceinline__ void FoldState(LaneState& into, const LaneState& part) {
  FoldState(into, part.m, part.l, part.o);
}

template <int kPad, int kPieces>
class AttendFolder {
 public:
  using Shape = AttendShape<kPad, kPieces>;
  using Shared = AttendShared<kPad, kPieces>;

  __device__ __forceinline__ AttendFolder(const AttendKernelArgs& args, Shared& shared)
      : args_(args), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  // Folds the states that the warps have left for a span. Every warp calls this.
  __device__ __forceinline__ void FoldSpan(const AttendUnit& unit, int part, bool begins_unit,
                                           bool ends_chunk, bool ends_unit, int slot) {
    const bool is_shared = unit.entry.num_teams > 1;
    if (begins_unit) Begin(unit, is_shared);
    for (int task = warp_; task < unit.entry.num_rows * Shape::kRowTasks; task += kAttendWarps) {
      const int row = task / Shape::kRowTasks;
      const int d = task % Shape::kRowTasks * 64 + 2 * lane_;
      const LaneState span = SpanOf(slot, row, d);
      if (is_shared && args_.part_spans == 1) {
        StorePart(unit, part, row, d, span);
        continue;
      }
      LaneState chunk = Get(shared_.chunk[task]);
      FoldState(chunk, span);
      if (!ends_chunk) {
        Put(shared_.chunk[task], chunk);
        continue;
      }
      Put(shared_.chunk[task], EmptyState());
      if (is_shared) {
        StorePart(unit, part, row, d, chunk);
        continue;
      }
      LaneState sequence = Get(shared_.sequence[task]);
      FoldState(sequence, chunk);
      if (ends_unit) {
        StoreResult(unit, row, d, sequence);
      } else {
        Put(shared_.sequence[task], sequence);
      }
    }
  }

  // The whole block calls this when its parts of a shared entry are written. The last block of all
  // folds the parts.
  __device__ __forceinline__ void EndShared(const AttendUnit& unit) {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* counter = args_.counters + unit.entry.first_counter + unit.kv_head;
      __threadfence();
      const bool is_last =
          atomicAdd(counter, 1u) + 1 == static_cast<uint32_t>(unit.entry.num_teams);
      if (is_last) {
        *counter = 0;
        __threadfence();
      }
      shared_.is_last = is_last ? 1 : 0;
    }
    __syncthreads();
    if (shared_.is_last != 0) FoldParts(unit);
  }

 private:
  static constexpr int kPartBytes = kPad < 64 ? 128 : 256;  // of o, as FoldParts stages it

  __device__ __forceinline__ LaneState Get(const TaskState& state) const {
    return {state.m_l.x, state.m_l.y, state.o[lane_]};
  }
  __device__ __forceinline__ void Put(TaskState& to, const LaneState& state) const {
    __syncwarp();
    to.o[lane_] = state.o;
    if (lane_ == 0) to.m_l = make_float2(state.m, state.l);
    __syncwarp();
  }

  // The splits of a span all at once, in order, against the largest maximum.
  __device__ __forceinline__ LaneState SpanOf(int slot, int row, int d) const {
    LaneState span = EmptyState();
    float2 m_l[kSplitsPerSpan];
#pragma unroll
    for (int i = 0; i < kSplitsPerSpan; i += 2) {
      const float4 two = *reinterpret_cast<const float4*>(&shared_.split_m_l[slot][row][i]);
      m_l[i] = make_float2(two.x, two.y);
      m_l[i + 1] = make_float2(two.z, two.w);
      span.m = fmaxf(span.m, fmaxf(two.x, two.z));
    }
    const float base = span.m == MinusInfinity() ? 0.0f : span.m;
#pragma unroll
    for (int i = 0; i < kSplitsPerSpan; ++i) {
      const float weight = ExpOfNonPositive(__fsub_rn(m_l[i].x, base));
      span.l = __fmaf_rn(m_l[i].y, weight, span.l);
      if (kPad % 64 != 0 && d >= kPad) continue;
      const float2 o = *reinterpret_cast<const float2*>(&shared_.split_o[slot][i][row][d]);
      span.o.x = __fmaf_rn(o.x, weight, span.o.x);
      span.o.y = __fmaf_rn(o.y, weight, span.o.y);
    }
    return span;
  }

  __device__ __forceinline__ int QueryHeadOf(const AttendUnit& unit, int row) const {
    return unit.kv_head * args_.group + (unit.entry.first_row + row) % args_.group;
  }
  // Place of a row in q, outputs and running states, in rows of head_dim.
  __device__ __forceinline__ int64_t PlaceOf(const AttendUnit& unit, int row) const {
    const int query_token = (unit.entry.first_row + row) / args_.group;
    return (static_cast<int64_t>(unit.entry.first_query) + query_token) * args_.num_query_heads +
           QueryHeadOf(unit, row);
  }

  // What the sequence has before its first chunk.
  __device__ __forceinline__ LaneState Before(const AttendUnit& unit, int row, int d) const {
    LaneState state = EmptyState();
    if (args_.state.m == nullptr) return state;
    const int64_t at = PlaceOf(unit, row);
    state.m = args_.state.m[at];
    state.l = args_.state.l[at];
    if (d < args_.head_dim) {
      state.o = *reinterpret_cast<const float2*>(args_.state.o + at * args_.head_dim + d);
    }
    return state;
  }

  __device__ __forceinline__ void Begin(const AttendUnit& unit, bool is_shared) {
    for (int task = warp_; task < unit.entry.num_rows * Shape::kRowTasks; task += kAttendWarps) {
      Put(shared_.chunk[task], EmptyState());
      if (is_shared) continue;
      Put(shared_.sequence[task],
          Before(unit, task / Shape::kRowTasks, task % Shape::kRowTasks * 64 + 2 * lane_));
    }
    // Every warp has read (m, l) of its rows before one of them writes it.
    if (args_.state.m != nullptr) __syncthreads();
  }

  __device__ __forceinline__ int64_t PartAt(const AttendUnit& unit, int part, int row) const {
    return unit.entry.first_state +
           (static_cast<int64_t>(part) * args_.num_kv_heads + unit.kv_head) * unit.entry.num_rows +
           row;
  }

  __device__ __forceinline__ void StorePart(const AttendUnit& unit, int part, int row, int d,
                                            const LaneState& state) const {
    const int64_t at = PartAt(unit, part, row);
    if (d == 0) {
      *reinterpret_cast<float2*>(args_.partial_m_l + 2 * at) = make_float2(state.m, state.l);
    }
    if (d < args_.head_dim) {
      *reinterpret_cast<float2*>(args_.partial_o + at * args_.head_dim + d) = state.o;
    }
  }

  __device__ __forceinline__ void StoreResult(const AttendUnit& unit, int row, int d,
                                              const LaneState& state) const {
    const int64_t at = PlaceOf(unit, row);
    if (args_.state.m != nullptr) {
      if (d == 0) {
        args_.state.m[at] = state.m;
        args_.state.l[at] = state.l;
      }
      if (d < args_.head_dim) {
        *reinterpret_cast<float2*>(args_.state.o + at * args_.head_dim + d) = state.o;
      }
      return;
    }
    const float* sink =
        args_.sink_logits == nullptr ? nullptr : args_.sink_logits + QueryHeadOf(unit, row);
    const Finish finish = FinishOf(state.m, state.l, sink);
    if (d == 0 && args_.lse != nullptr) args_.lse[at] = finish.lse;
    if (d < args_.head_dim) {
      StoreOut2(args_.out_dtype, args_.out, at * args_.head_dim + d,
                __fmul_rn(state.o.x, finish.factor), __fmul_rn(state.o.y, finish.factor));
    }
  }

  // Which chunk a part belongs to.
  __device__ __forceinline__ int ChunkOf(const AttendUnit& unit, int part) const {
    const int place = part + (part >= unit.entry.sink_parts ? unit.entry.skipped_parts : 0);
    return place * args_.part_spans / kSpansPerChunk;
  }

  // How 32 parts fold, lane i that of part i: into its chunk, and, where it is the last of it, its
  // chunk into the sequence. Weights depend on maxima alone and are reckoned side by side, so that
  // what is left to do one after the other is a multiplication and an addition a part.
  struct PartFolds {
    float l;
    Fold part, chunk;
    uint32_t not_empty;   // parts, as a bit each
    uint32_t ends_chunk;  // likewise
    uint32_t chunk_not_empty;
    float chunk_m, sequence_m;  // after these parts, in every lane
  };
  __device__ __forceinline__ PartFolds FoldsOf(const AttendUnit& unit, int base, int count,
                                               float2 m_l, float chunk_m, float sequence_m) const {
    const int num_parts = unit.entry.num_parts;
    const int part = base + lane_;
    const bool exists = lane_ < count;
    const int chunk = exists ? ChunkOf(unit, part) : INT32_MAX;
    int chunk_before = __shfl_up_sync(0xffffffffu, chunk, 1);
    if (lane_ == 0) chunk_before = base > 0 ? ChunkOf(unit, base - 1) : -1;
    const bool continues = chunk_before == chunk;
    const uint32_t begins = __ballot_sync(0xffffffffu, !continues);
    const uint32_t through = 0xffffffffu >> (31 - lane_);
    const int first = (begins & through) != 0 ? 31 - __clz(begins & through) : 0;
    const bool carried = (begins & through) == 0;  // its chunk began before `base`
    // Maxima of the chunk and of everything, through this part.
    float in_chunk = carried ? fmaxf(m_l.x, chunk_m) : m_l.x;
    float in_all = fmaxf(m_l.x, fmaxf(sequence_m, chunk_m));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other_chunk = __shfl_up_sync(0xffffffffu, in_chunk, distance);
      const float other_all = __shfl_up_sync(0xffffffffu, in_all, distance);
      if (lane_ - distance >= first) in_chunk = fmaxf(in_chunk, other_chunk);
      if (lane_ >= distance) in_all = fmaxf(in_all, other_all);
    }
    const float chunk_up = __shfl_up_sync(0xffffffffu, in_chunk, 1);
    const float before_part = lane_ > first ? chunk_up : carried ? chunk_m : MinusInfinity();
    const float all_up = __shfl_sync(0xffffffffu, in_all, first > 0 ? first - 1 : 0);
    const float before_chunk = first > 0 ? all_up : sequence_m;
    PartFolds folds;
    folds.l = m_l.y;
    folds.part = {WeightOf(before_part, in_chunk), WeightOf(m_l.x, in_chunk)};
    const float after_chunk = fmaxf(before_chunk, in_chunk);
    folds.chunk = {WeightOf(before_chunk, after_chunk), WeightOf(in_chunk, after_chunk)};
    const int next_chunk = __shfl_down_sync(0xffffffffu, chunk, 1);
    const bool ends = exists && (part + 1 == num_parts ||
                                 (lane_ < 31 ? next_chunk : ChunkOf(unit, part + 1)) != chunk);
    folds.not_empty = __ballot_sync(0xffffffffu, exists && m_l.x != MinusInfinity());
    folds.ends_chunk = __ballot_sync(0xffffffffu, ends);
    folds.chunk_not_empty = __ballot_sync(0xffffffffu, in_chunk != MinusInfinity());
    folds.chunk_m = __shfl_sync(0xffffffffu, in_chunk, 31);
    folds.sequence_m = __shfl_sync(0xffffffffu, before_chunk, 31);
    if ((folds.ends_chunk >> 31) != 0) {
      folds.sequence_m = __shfl_sync(0xffffffffu, after_chunk, 31);
      folds.chunk_m = MinusInfinity();
    }
    return folds;
  }

  // Without a branch, so that several parts' are under way together.
  static __device__ __forceinline__ void FoldWhere(bool folds, LaneState& into, const Fold& fold,
                                                   float l, float2 o) {
    const float new_l = __fmaf_rn(l, fold.part_weight, __fmul_rn(into.l, fold.into_weight));
    const float new_x = FoldElement(fold, into.o.x, o.x);
    const float new_y = FoldElement(fold, into.o.y, o.y);
    into.l = folds ? new_l : into.l;
    into.o.x = folds ? new_x : into.o.x;
    into.o.y = folds ? new_y : into.o.y;
  }
  static __device__ __forceinline__ Fold FoldAt(const Fold& fold, int lane) {
    return {__shfl_sync(0xffffffffu, fold.into_weight, lane),
            __shfl_sync(0xffffffffu, fold.part_weight, lane)};
  }

  // Copies 64 elements of o of up to 32 parts from part `base` on to the warp's buffers.
  __device__ __forceinline__ void CopyParts(const float* from, int64_t stride, int num_parts, int d,
                                            uint32_t to) const {
    constexpr int kLanes = kPartBytes / 16;  // of a part
    const int dim = lane_ % kLanes * 4;
#pragma unroll 4
    for (int i = lane_ / kLanes; i < num_parts; i += 32 / kLanes) {
      CopyAsync16(to + kPartBytes * i + 4 * dim,
                  reinterpret_cast<const std::byte*>(from + i * stride + dim),
                  d + dim < args_.head_dim);
    }
    EndCopies();
  }

  // Folds the parts that all blocks have left. The warps' buffers are free by now.
  __device__ __forceinline__ void FoldParts(const AttendUnit& unit) {
    constexpr int kBatch = 32;  // a part a lane
    static_assert(Shape::kBuffers * Shape::kBufferBytes >= kBatch * kPartBytes);
    const int num_tasks = unit.entry.num_rows * Shape::kRowTasks;
    const int num_parts = unit.entry.num_parts;
    const int64_t stride = static_cast<int64_t>(args_.num_kv_heads) * unit.entry.num_rows;
    const bool to_state = args_.state.m != nullptr;
    const auto* staged = reinterpret_cast<const float2*>(&shared_.buffers[warp_][0][0]);
    for (int task = warp_; task < num_tasks; task += kAttendWarps) {
      const int row = task / Shape::kRowTasks;
      const int line = task % Shape::kRowTasks * 64;
      const int64_t first = PartAt(unit, 0, row);
      LaneState sequence = Before(unit, row, line + 2 * lane_);
      LaneState chunk = EmptyState();
#pragma unroll 1
      for (int base = 0; base < num_parts; base += kBatch) {
        const int count = min(kBatch, num_parts - base);
        const int64_t at = first + base * stride;
        __syncwarp();
        CopyParts(args_.partial_o + at * args_.head_dim + line, stride * args_.head_dim, count,
                  line, SharedAddress(staged));
        float2 m_l = make_float2(MinusInfinity(), 0.0f);
        if (lane_ < count) {
          m_l = __ldcg(reinterpret_cast<const float2*>(args_.partial_m_l) + at + lane_ * stride);
        }
        const PartFolds folds = FoldsOf(unit, base, count, m_l, chunk.m, sequence.m);
        WaitForCopies<0>();
        __syncwarp();
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
          const float l = __shfl_sync(0xffffffffu, folds.l, i);
          const float2 o = staged[kPartBytes / 8 * i + lane_];
          FoldWhere((folds.not_empty >> i & 1) != 0, chunk, FoldAt(folds.part, i), l, o);
          const bool ends = (folds.ends_chunk >> i & 1) != 0;
          FoldWhere(ends && (folds.chunk_not_empty >> i & 1) != 0, sequence, FoldAt(folds.chunk, i),
                    chunk.l, chunk.o);
          chunk.l = ends ? 0.0f : chunk.l;
          chunk.o.x = ends ? 0.0f : chunk.o.x;
          chunk.o.y = ends ? 0.0f : chunk.o.y;
        }
        chunk.m = folds.chunk_m;
        sequence.m = folds.sequence_m;
      }
      if (to_state) {
        Put(shared_.sequence[task], sequence);
      } else {
        StoreResult(unit, row, line + 2 * lane_, sequence);
      }
    }
    if (!to_state) return;
    // Every warp has read (m, l) of its rows before one of them writes it.
    __syncthreads();
    for (int task = warp_; task < num_tasks; task += kAttendWarps) {
      StoreResult(unit, task / Shape::kRowTasks, task % Shape::kRowTasks * 64 + 2 * lane_,
                  Get(shared_.sequence[task]));
    }
  }

  const AttendKernelArgs& args_;
  Shared& shared_;
  const int warp_;
  const int lane_;
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_FOLD_CUH_
