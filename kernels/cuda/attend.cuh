// Attention over blocks. Bytes: K and V of the visible tokens of each kv head once (more entries of
// a sequence read them again from L2); q, outputs and states of parts are small beside them.
//
// A block of threads takes one kv head of one range of tokens, span by span. Each warp computes one
// split of the span by itself, copying ahead across the borders of spans and units,
// and folds its share of the states that all have left for the span before. Warps need not keep
// step, so that some wait for memory while others compute.

#ifndef KERNELS_CUDA_ATTEND_CUH_
#define KERNELS_CUDA_ATTEND_CUH_

#include "kernels/cuda/attend_fold.cuh"
#include "kernels/cuda/attend_split.cuh"
#include "kernels/cuda/attend_walk.cuh"

namespace sluice::cuda {

// Starts to copy q of a unit's rows; zeros past head_dim and in rows that do not exist stay.
template <int kPad, int kPieces>
__device__ __forceinline__ void CopyQueries(const AttendKernelArgs& args, const AttendUnit& unit,
                                            uint4 (&q)[8 * kPieces][kPad / 8 + 1]) {
  const int chunks = args.head_dim / 8;
  for (int i = threadIdx.x; i < unit.entry.num_rows * chunks; i += kAttendThreads) {
    const int row = i / chunks;
    const int sequence_row = unit.entry.first_row + row;
    const int64_t at = (static_cast<int64_t>(unit.entry.first_query) + sequence_row / args.group) *
                           args.num_query_heads +
                       unit.kv_head * args.group + sequence_row % args.group;
    CopyAsync16(SharedAddress(&q[row][i % chunks]), args.q + (at * chunks + i % chunks) * 16);
  }
  EndCopies();
}

template <typename T, int kPad, int kPieces>
__global__ void __launch_bounds__(kAttendThreads, AttendShape<kPad, kPieces>::kBlocksPerSm)
    AttendKernel(const __grid_constant__ AttendKernelArgs args) {
  using Shape = AttendShape<kPad, kPieces>;
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<AttendShared<kPad, kPieces>*>(memory);
  const int warp = threadIdx.x / 32;
  AttendUnit* units = shared.units[warp];
  AttendWalk walk(args, units);
  if (!walk.Begin()) return;
  SplitRows rows;
  walk.Fetch(rows);
  walk.Resolve(rows);
  AttendSplit<T, kPad, kPieces> split(args, shared);
  AttendFolder<kPad, kPieces> folder(args, shared);
  split.CopyFirst(rows.row[0], rows.present[0]);
  for (int i = threadIdx.x; i < 2 * Shape::kRows * Shape::kQueryChunks; i += kAttendThreads) {
    (&shared.q[0][0][0])[i] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStateSlots; ++i) {
      shared.full[i].Init(kAttendThreads);
      shared.empty[i].Init(kAttendThreads);
    }
  }
  __syncthreads();
  CopyQueries<kPad, kPieces>(args, units[0], shared.q[0]);
  WaitForCopies<0>();

  SpanPlace place = walk.place();
  SpanPlace left;  // the span before, whose states are still to be folded
  bool left_ends_unit = false;
  // Running numbers of spans; the states of span i are in slot i % kStateSlots.
  const auto fold_left = [&](int span, const SpanPlace& next) {
    const int slot = span % Shape::kStateSlots;
    const AttendUnit& unit = units[left.unit % kUnitSlots];
    const bool ends_chunk =
        left_ends_unit || next.span / kSpansPerChunk != left.span / kSpansPerChunk;
    shared.full[slot].Wait(span / Shape::kStateSlots % 2);
    folder.FoldSpan(unit, left.part, left.begins_unit, ends_chunk, left_ends_unit, slot);
    shared.empty[slot].Arrive();
  };
  // The states of a span are folded while the next one is computed: after its last tile, or, with
  // one slot, a tile earlier.
  constexpr int kFoldTile = kSplitTiles - (Shape::kStateSlots == 1 ? 2 : 1);
  bool more = true;
  int span = 0;
  for (; more; ++span) {
    const int64_t start = walk.start();
    if (place.begins_unit) {
      // The queries of this unit are there: pieces of its first tile alone have followed them. And
      // every warp is through with the unit before.
      WaitForCopies<Shape::kBuffers>();
      __syncthreads();
      split.BeginUnit(place.unit);
    }
    SplitRows next = {};
    more = walk.Next();
    if (more) {
      walk.Fetch(next);
      if (walk.place().begins_unit) {
        CopyQueries<kPad, kPieces>(args, units[walk.place().unit % kUnitSlots],
                                   shared.q[walk.place().unit % 2]);
      }
    }
    split.BeginSplit();
#pragma unroll 1
    for (int tile = 0; tile < kSplitTiles; ++tile) {
      const std::byte* row = rows.row[0];
      const uint32_t present = rows.present[0];
      if (tile + 1 < kSplitTiles) {
        rows.row[0] = rows.row[1];
        rows.present[0] = rows.present[1];
      } else {
        if (more) walk.Resolve(next);
        rows = next;
      }
      split.Tile(start, tile, row, present, rows.row[0], rows.present[0]);
      if (tile == kFoldTile && span > 0) fold_left(span - 1, place);
    }
    const int slot = span % Shape::kStateSlots;
    if (span >= Shape::kStateSlots) {
      shared.empty[slot].Wait((span / Shape::kStateSlots - 1) % 2);
    }
    split.Store(slot);
    shared.full[slot].Arrive();
    left = place;
    left_ends_unit = !more || walk.place().begins_unit;
    place = walk.place();
  }
  fold_left(span - 1, place);
  walk.ForEachShared(units[left.unit % kUnitSlots],
                     [&](const AttendUnit& unit) { folder.EndShared(unit); });
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_CUH_
