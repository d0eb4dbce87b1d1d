// Which spans a block of threads takes, in order, and where a warp finds its split of the next one.
// Every warp walks by itself, one span ahead of what it computes.

#ifndef KERNELS_CUDA_ATTEND_WALK_CUH_
#define KERNELS_CUDA_ATTEND_WALK_CUH_

#include "kernels/cuda/attend_load.cuh"
#include "kernels/cuda/attend_shape.cuh"

namespace sluice::cuda {

// A span of a unit.
struct SpanPlace {
  int span = 0;  // counted from position 0
  int part = 0;
  int unit = 0;  // running number
  bool begins_unit = false;
};

class AttendWalk {
 public:
  // `units`: kUnitSlots places for what this warp knows of a unit.
  __device__ __forceinline__ AttendWalk(const AttendKernelArgs& args, AttendUnit* units)
      : args_(args),
        arrays_(args.arrays != nullptr ? args.arrays : args.inline_arrays),
        tables_(args.tables != nullptr ? args.tables : arrays_ + args.tables_offset),
        units_(units),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        kv_head_(static_cast<int>(blockIdx.x) % args.team_blocks) {
    const auto* teams = reinterpret_cast<const AttendTeamArgs*>(arrays_ + args.teams_offset);
    const int team = static_cast<int>(blockIdx.x) / args.team_blocks;
    start_ = teams[team];
    end_ = teams[team + 1];
    // The only entry need not wait for the team's.
    first_entry_ = EntryAt(args.num_entries == 1 ? 0 : min(start_.entry, args.num_entries - 1));
    entry_ = start_.entry;
    place_.part = start_.part;
    place_.unit = -1;
  }

  // Opens the first span; false where the team has none.
  __device__ __forceinline__ bool Begin() {
    if (start_.entry == end_.entry && start_.part == end_.part) return false;
    OpenUnit(first_entry_);
    return true;
  }

  // Moves on; false at the end.
  __device__ __forceinline__ bool Next() {
    place_.begins_unit = false;
    if (++place_.span < part_end_) return true;
    const AttendUnit& unit = units_[place_.unit % kUnitSlots];
    bool opens = false;
    if (++place_.part == unit.entry.num_parts) {
      ++entry_;
      place_.part = 0;
      opens = true;
    }
    if (entry_ == end_.entry && place_.part == end_.part) {
      kv_head_ += args_.team_blocks;
      if (kv_head_ >= args_.num_kv_heads) return false;
      entry_ = start_.entry;
      place_.part = start_.part;
      opens = true;
    }
    if (opens) {
      OpenUnit(EntryAt(entry_));
    } else {
      OpenPart(unit.entry);
    }
    return true;
  }

  __device__ __forceinline__ const SpanPlace& place() const { return place_; }

  // Once the walk is over: f(unit) for every unit that other teams have a part in: those of the
  // team's first and last entry. `last` is the newest unit.
  template <typename F>
  __device__ __forceinline__ void ForEachShared(const AttendUnit& last, const F& f) const {
    for (int head = static_cast<int>(blockIdx.x) % args_.team_blocks; head < args_.num_kv_heads;
         head += args_.team_blocks) {
      for (int i = 0; i < 2; ++i) {
        const int entry = i == 0 ? start_.entry : end_.entry;
        if (i == 1 && (entry == start_.entry || end_.part == 0)) break;
        AttendUnit unit = last;
        if (entry != last.entry_index || head != last.kv_head) {
          unit.entry = EntryAt(entry);
          unit.kv_head = head;
        }
        if (unit.entry.num_teams > 1) f(unit);
      }
    }
  }

  // First token of this warp's split.
  __device__ __forceinline__ int64_t start() const {
    return place_.span * kSpanTokens + warp_ * kDeviceSplitTokens;
  }

  // Fetches the addresses of the blocks of the split's tokens; rows are known after Resolve.
  __device__ __forceinline__ void Fetch(SplitRows& rows) const {
    const AttendUnit& unit = units_[place_.unit % kUnitSlots];
    const VisibleHere visible = VisibleFrom({unit.sink_end, unit.begin, unit.end}, start());
    const auto* table =
        reinterpret_cast<const std::byte* const*>(tables_ + unit.entry.table_offset);
#pragma unroll
    for (int tile = 0; tile < kSplitTiles; ++tile) {
      const int token = tile * kTileTokens + lane_;
      const bool sees = visible.Sees(token);
      rows.row[tile] = sees ? table[(start() + token) >> args_.block_tokens_log2] : nullptr;
      rows.present[tile] = __ballot_sync(0xffffffffu, sees);
    }
  }
  __device__ __forceinline__ void Resolve(SplitRows& rows) const {
    const int64_t head_offset =
        units_[place_.unit % kUnitSlots].kv_head * args_.kv_head_stride_bytes;
#pragma unroll
    for (int tile = 0; tile < kSplitTiles; ++tile) {
      const int in_block = static_cast<int>(start() + tile * kTileTokens + lane_) &
                           ((1 << args_.block_tokens_log2) - 1);
      rows.row[tile] += in_block * args_.token_stride_bytes + head_offset;
    }
  }

 private:
  __device__ __forceinline__ AttendEntryArgs EntryAt(int index) const {
    return reinterpret_cast<const AttendEntryArgs*>(arrays_)[index];
  }

  __device__ __forceinline__ void OpenUnit(const AttendEntryArgs& entry) {
    ++place_.unit;
    place_.begins_unit = true;
    AttendUnit unit;
    unit.entry = entry;
    unit.kv_head = kv_head_;
    unit.entry_index = entry_;
    const Visible first = VisibleTo(args_, unit.entry, unit.entry.first_row / args_.group);
    const Visible last = VisibleTo(args_, unit.entry,
                                   (unit.entry.first_row + unit.entry.num_rows - 1) / args_.group);
    unit.sink_end = last.sink_end < first.begin ? last.sink_end : first.begin;
    unit.begin = first.begin;
    unit.end = last.end;
    __syncwarp();
    if (lane_ == 0) units_[place_.unit % kUnitSlots] = unit;
    __syncwarp();
    OpenPart(unit.entry);
  }

  __device__ __forceinline__ void OpenPart(const AttendEntryArgs& entry) {
    const int part = place_.part + (place_.part >= entry.sink_parts ? entry.skipped_parts : 0);
    place_.span = part * args_.part_spans;
    part_end_ = place_.span + args_.part_spans;
    const int64_t spans = (entry.context_tokens + kSpanTokens - 1) / kSpanTokens;
    if (part_end_ > spans) part_end_ = static_cast<int>(spans);
  }

  const AttendKernelArgs& args_;
  const std::byte* const arrays_;
  const std::byte* const tables_;
  AttendUnit* const units_;
  const int warp_;
  const int lane_;
  int kv_head_;
  AttendTeamArgs start_;
  AttendTeamArgs end_;
  AttendEntryArgs first_entry_;
  int entry_;
  SpanPlace place_;
  int part_end_ = 0;
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_WALK_CUH_
