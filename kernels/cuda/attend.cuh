// Attention over blocks. Bytes: K and V of the visible tokens of each kv head once (more row
// batches read them again from L2); q, outputs and partial states are small beside them.
//
// Every warp works alone. It walks through its units tile by tile (32 tokens; 16 where head_dim is
// over 128) and keeps a ring of tiles in shared memory that asynchronous copies fill ahead of it,
// across the borders of splits and units. Per tile, with M the tokens, N the rows (8 a piece) and
// the head dimension summed over: S^T = K Q^T, online softmax down the columns, O^T += V^T P^T. P
// is fed as high + low 16-bit parts, so that its rounding does not show.
//
// The order of tokens within a tile's M, and of head dimensions within a product, are free as long
// as both operands agree. They are chosen so that fragments are wide loads from rows as they lie in
// global memory: row r of M is token TokenOfRow(r), and V's rows come in padded groups of four,
// which keeps the lanes on different banks.

#ifndef KERNELS_CUDA_ATTEND_CUH_
#define KERNELS_CUDA_ATTEND_CUH_

#include "kernels/cuda/attend_args.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pipeline.cuh"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {

inline constexpr int kStepTokens = 16;  // M of one product
inline constexpr int kMaxStages = 8;
inline constexpr int kMaxWarps = 8;

// Sizes of one instantiation; kPad is head_dim rounded up to 32, kPieces the pieces of 8 rows.
template <int kPad, int kPieces>
struct AttendShape {
  static constexpr int kTileSteps = kPad <= 128 ? 2 : 1;
  static constexpr int kTileTokens = kTileSteps * kStepTokens;
  static constexpr int kRows = 8 * kPieces;
  static constexpr int kRowBytes = 2 * kPad;
  static constexpr int kRowChunks = kPad / 8;                        // of 16 bytes
  static constexpr int kStepCopies = kStepTokens * kRowChunks / 32;  // of a lane
  // Where rows are a multiple of 128 bytes apart, the two that lanes read at once would meet in the
  // same banks: odd rows of K have their chunks 4 further on or back.
  static constexpr bool kSwizzled = kRowChunks % 8 == 0;
  static constexpr int kVGroupBytes = 4 * kRowBytes + 32;
  static constexpr int kKBytes = kTileTokens * kRowBytes;
  static constexpr int kStageBytes = kKBytes + kTileTokens / 4 * kVGroupBytes;
  static constexpr int kUnitSlots = 1;
  static constexpr int kQBytes = kRows * kRowBytes;
};

// A unit as the lanes that compute it need it; written by the side that starts its copies.
struct UnitInfo {
  int64_t context_tokens;
  int64_t first_row;  // of the sequence
  int64_t first_state;
  int32_t query_tokens;
  int32_t causal;
  int32_t unit_row;  // first row of the batch among the sequence's
  int32_t num_rows;
  int32_t kv_head;
  int32_t padding;
};

// What waits in a stage of the ring.
struct StageInfo {
  int64_t position;  // of its first token; -1: none, the unit sees nothing
  int32_t unit;      // running number within the warp
  int32_t padding;
};

// Per warp: stage infos, unit infos, q of the units, stages.
template <int kPad, int kPieces>
struct WarpMemory {
  using Shape = AttendShape<kPad, kPieces>;
  static constexpr int kStageInfos = 0;
  static constexpr int kUnitInfos = kStageInfos + kMaxStages * static_cast<int>(sizeof(StageInfo));
  static constexpr int kQ =
      (kUnitInfos + Shape::kUnitSlots * static_cast<int>(sizeof(UnitInfo)) + 127) / 128 * 128;
  static constexpr int kStages = kQ + Shape::kUnitSlots * Shape::kQBytes;
  static constexpr int Bytes(int num_stages) { return kStages + num_stages * Shape::kStageBytes; }
};

// The positions that a query token sees: [0, sink_end) and [begin, end).
struct Visible {
  int64_t sink_end;
  int64_t begin;
  int64_t end;
};
__device__ __forceinline__ Visible VisibleTo(const AttendKernelArgs& args, int64_t context_tokens,
                                             int query_tokens, bool causal, int query_token) {
  Visible visible = {0, 0, context_tokens};
  if (causal) visible.end -= query_tokens - 1 - query_token;
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

// ------------------------------------------------------------------ copies

// Walks through the units of a warp and starts the copies of their tiles, in order.
template <int kPad, int kPieces>
class Producer {
 public:
  using Shape = AttendShape<kPad, kPieces>;
  using Memory = WarpMemory<kPad, kPieces>;

  __device__ __forceinline__ Producer(const AttendKernelArgs& args, const std::byte* arrays,
                                      std::byte* memory, int lane, int first_unit, int unit_step)
      : args_(args),
        arrays_(arrays),
        tables_(args.tables != nullptr ? args.tables : arrays + args.tables_offset),
        memory_(memory),
        base_(SharedAddress(memory)),
        lane_(lane),
        next_unit_(first_unit),
        unit_step_(unit_step) {
    FindTile();
  }

  __device__ __forceinline__ bool done() const { return done_; }
  // The unit that the next tile belongs to.
  __device__ __forceinline__ int unit() const { return opened_ - 1; }

  __device__ __forceinline__ void Issue(int stage) {
    if (lane_ == 0) {
      auto* info = reinterpret_cast<StageInfo*>(memory_ + Memory::kStageInfos) + stage;
      info->position = empty_ ? -1 : position_;
      info->unit = unit();
    }
    if (!unit_copied_) {
      StoreUnitInfo();
      CopyQueries();
    }
    const uint32_t present = __ballot_sync(0xffffffffu, present_);
    const uint32_t k = base_ + Memory::kStages + stage * Shape::kStageBytes;
    const uint32_t v = k + Shape::kKBytes;
    const auto from = reinterpret_cast<uint64_t>(block_ + offset_);
    if (args_.contiguous != 0) {
#pragma unroll
      for (int step = 0; step < Shape::kTileSteps; ++step) {
        const auto* at =
            reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, from, step * kStepTokens));
        if ((present >> (step * kStepTokens) & 1) == 0) continue;
        at += 16 * lane_;
#pragma unroll
        for (int i = 0; i < Shape::kStepCopies; ++i) {
          const Place place = PlaceOf(step, i);
          CopyAsync16(k + place.k, at + 512 * i);
          CopyAsync16(v + place.v, at + args_.v_offset_bytes + 512 * i);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < Shape::kTileSteps; ++step) {
#pragma unroll 2
        for (int i = 0; i < Shape::kStepCopies; ++i) {
          const Place place = PlaceOf(step, i);
          const auto* at =
              reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, from, place.row)) +
              16 * place.chunk;
          if ((present >> place.row & 1) == 0 || 8 * place.chunk >= args_.head_dim) continue;
          CopyAsync16(k + place.k, at);
          CopyAsync16(v + place.v, at + args_.v_offset_bytes);
        }
      }
    }
    EndCopies();
    unit_copied_ = true;
    position_ += Shape::kTileTokens;
    if (empty_) position_ = end_;
    FindTile();
  }

 private:
  // What copy `i` of a step is for this lane: row of the tile, chunk of the row, and where K and V
  // of it go within a stage.
  struct Place {
    int row;
    int chunk;
    uint32_t k;
    uint32_t v;
  };
  __device__ __forceinline__ Place PlaceOf(int step, int i) const {
    Place place;
    if constexpr (32 % Shape::kRowChunks == 0) {
      place.row = i * (32 / Shape::kRowChunks) + lane_ / Shape::kRowChunks;
      place.chunk = lane_ % Shape::kRowChunks;
    } else {
      place.row = (32 * i + lane_) / Shape::kRowChunks;
      place.chunk = (32 * i + lane_) % Shape::kRowChunks;
    }
    const int k_chunk = Shape::kSwizzled ? place.chunk ^ ((place.row & 1) << 2) : place.chunk;
    place.row += step * kStepTokens;
    place.k = place.row * Shape::kRowBytes + 16 * k_chunk;
    place.v =
        place.row / 4 * Shape::kVGroupBytes + place.row % 4 * Shape::kRowBytes + 16 * place.chunk;
    return place;
  }

  __device__ __forceinline__ void StoreUnitInfo() {
    if (lane_ != 0) return;
    auto* info =
        reinterpret_cast<UnitInfo*>(memory_ + Memory::kUnitInfos) + unit() % Shape::kUnitSlots;
    info->context_tokens = sequence_.context_tokens;
    info->first_row = sequence_.first_row;
    info->first_state = unit_.first_state;
    info->query_tokens = sequence_.query_tokens;
    info->causal = sequence_.causal;
    info->unit_row = unit_.first_row;
    info->num_rows = num_rows_;
    info->kv_head = kv_head_;
  }

  __device__ __forceinline__ void CopyQueries() {
    const uint32_t q = base_ + Memory::kQ + unit() % Shape::kUnitSlots * Shape::kQBytes;
    const int chunks = args_.head_dim / 8;
#pragma unroll 1
    for (int i = lane_; i < num_rows_ * chunks; i += 32) {
      const int row = i / chunks;
      const int sequence_row = unit_.first_row + row;
      const int64_t at =
          (sequence_.first_row + sequence_row / args_.group) * args_.num_query_heads +
          static_cast<int64_t>(kv_head_) * args_.group + sequence_row % args_.group;
      CopyAsync16(q + row * Shape::kRowBytes + 16 * (i % chunks),
                  args_.q + (at * chunks + i % chunks) * 16);
    }
  }

  // Opens the unit after the current one; false where there is none.
  __device__ __forceinline__ bool OpenUnit() {
    if (next_unit_ >= args_.num_units * args_.num_kv_heads) return false;
    kv_head_ = next_unit_ % args_.num_kv_heads;
    const int index = next_unit_ / args_.num_kv_heads;
    next_unit_ += unit_step_;
    unit_ = reinterpret_cast<const AttendUnitArgs*>(arrays_ + args_.units_offset)[index];
    sequence_ = reinterpret_cast<const AttendSequenceArgs*>(arrays_)[unit_.sequence];
    num_rows_ = sequence_.query_tokens * args_.group - unit_.first_row;
    if (num_rows_ > Shape::kRows) num_rows_ = Shape::kRows;
    const bool causal = sequence_.causal != 0;
    const Visible first = VisibleTo(args_, sequence_.context_tokens, sequence_.query_tokens, causal,
                                    unit_.first_row / args_.group);
    const Visible last = VisibleTo(args_, sequence_.context_tokens, sequence_.query_tokens, causal,
                                   (unit_.first_row + num_rows_ - 1) / args_.group);
    visible_ = {last.sink_end < first.begin ? last.sink_end : first.begin, first.begin, last.end};
    position_ = unit_.first_split * kDeviceSplitTokens;
    end_ = position_ + unit_.num_splits * kDeviceSplitTokens;
    if (end_ > visible_.end) end_ = visible_.end;
    ++opened_;
    unit_copied_ = false;
    empty_ = false;
    return true;
  }

  // Moves on to the next tile with a visible token, or an empty one for a unit that has none, and
  // fetches the addresses of its tokens.
  __device__ __forceinline__ void FindTile() {
    present_ = false;
    while (true) {
      if (opened_ > 0) {
        if (position_ >= visible_.sink_end && position_ + Shape::kTileTokens <= visible_.begin) {
          position_ = visible_.begin / Shape::kTileTokens * Shape::kTileTokens;
        }
        if (position_ < end_) break;
        if (!unit_copied_) {
          empty_ = true;
          return;
        }
      }
      if (!OpenUnit()) {
        done_ = true;
        return;
      }
    }
    const int64_t token = position_ + lane_;
    bool present = lane_ < Shape::kTileTokens;
    if (args_.contiguous != 0) {
      const int64_t step = token / kStepTokens * kStepTokens;
      present = present && step < visible_.end &&
                (step < visible_.sink_end || step + kStepTokens > visible_.begin);
    } else {
      present =
          present && token < visible_.end && (token < visible_.sink_end || token >= visible_.begin);
    }
    if (present) {
      const int in_block = static_cast<int>(token) & ((1 << args_.block_tokens_log2) - 1);
      offset_ = in_block * args_.token_stride_bytes + kv_head_ * args_.kv_head_stride_bytes;
      // Not looked at before the tile is issued, so that nobody waits for it here.
      block_ = reinterpret_cast<const std::byte* const*>(
          tables_ + sequence_.table_offset)[token >> args_.block_tokens_log2];
    }
    present_ = present;
  }

  const AttendKernelArgs& args_;
  const std::byte* const arrays_;
  const std::byte* const tables_;
  std::byte* const memory_;
  const uint32_t base_;
  const int lane_;
  int next_unit_;
  const int unit_step_;
  int opened_ = 0;
  bool done_ = false;

  AttendUnitArgs unit_;
  AttendSequenceArgs sequence_;
  Visible visible_;
  int num_rows_ = 0;
  int kv_head_ = 0;
  bool unit_copied_ = false;  // its first tile, and q
  bool empty_ = false;
  int64_t position_ = 0;
  int64_t end_ = 0;
  // This lane's token in the next tile: whether it is copied, and from where.
  bool present_ = false;
  const std::byte* block_ = nullptr;
  int64_t offset_ = 0;
};

// ------------------------------------------------------------------ compute

// Row r of M, 0..15, is this token of the step: rows 2i, 2i + 1 of either half are tokens that the
// lanes with lane % 4 == i hold of V.
__device__ __forceinline__ int TokenOfRow(int r) {
  return 4 * ((r & 7) >> 1) + (r & 1) + (r >= 8 ? 2 : 0);
}

template <typename T, int kPad, int kPieces>
class Consumer {
 public:
  using Shape = AttendShape<kPad, kPieces>;
  using Memory = WarpMemory<kPad, kPieces>;
  static constexpr int kSlices = kPad / 32;

  __device__ __forceinline__ Consumer(const AttendKernelArgs& args, std::byte* memory, int lane)
      : args_(args), memory_(memory), base_(SharedAddress(memory)), lane_(lane) {}

  __device__ __forceinline__ int unit() const { return unit_; }

  __device__ __forceinline__ void Consume(int stage) {
    const StageInfo info =
        *(reinterpret_cast<const StageInfo*>(memory_ + Memory::kStageInfos) + stage);
    if (info.unit != unit_) {
      Finish();
      Begin(info.unit);
    }
    if (info.position < 0) return;
    const int64_t split = info.position / kDeviceSplitTokens;
    if (split != split_) {
      FoldSplit();
      split_ = split;
    }
    const uint32_t k = base_ + Memory::kStages + stage * Shape::kStageBytes;
    const int64_t end = info.position + Shape::kTileTokens;
    if (end <= common_.end && (info.position >= common_.begin || end <= common_.sink_end)) {
      Tile<false>(k, info.position);
    } else {
      Tile<true>(k, info.position);
    }
  }

  // Ends the current unit, if there is one: writes its state or its output.
  __device__ __forceinline__ void Finish() {
    if (unit_ < 0) return;
    FoldSplit();
    const int column = lane_ % 4 * 2;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * n + column + c;
        if (row < unit_info_.num_rows) StoreRow(n, c, unit_info_.unit_row + row);
      }
    }
  }

 private:
  __device__ __forceinline__ void StoreRow(int n, int c, int row) {
    const int query_token = row / args_.group;
    const int head = unit_info_.kv_head * args_.group + row % args_.group;
    const int group = lane_ / 4;
    if (unit_info_.first_state >= 0) {
      const int64_t state =
          unit_info_.first_state + static_cast<int64_t>(query_token) * args_.num_query_heads + head;
      if (group == 0) {
        *reinterpret_cast<float2*>(args_.partial_m_l + 2 * state) =
            make_float2(span_m_[n][c], span_l_[n][c]);
      }
#pragma unroll
      for (int v = 0; v < kSlices; ++v) {
        const int d = 32 * v + 4 * group;
        if (d < args_.head_dim) {
          *reinterpret_cast<float4*>(args_.partial_o + state * args_.head_dim + d) =
              make_float4(span_o_[v][0][n][c], span_o_[v][0][n][c + 2], span_o_[v][1][n][c],
                          span_o_[v][1][n][c + 2]);
        }
      }
      return;
    }
    // The span folds into an empty sequence, as it does where there are more.
    float m = MinusInfinity();
    float l = 0.0f;
    Fold fold = {0.0f, 0.0f};
    FoldBegin(m, l, span_m_[n][c], span_l_[n][c], fold);
    const struct Finish finish =
        FinishOf(m, l, args_.sink_logits == nullptr ? nullptr : args_.sink_logits + head);
    const int64_t at = (unit_info_.first_row + query_token) * args_.num_query_heads + head;
    if (group == 0 && args_.lse != nullptr) args_.lse[at] = finish.lse;
#pragma unroll
    for (int v = 0; v < kSlices; ++v) {
      const int d = 32 * v + 4 * group;
      if (d < args_.head_dim) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[i] = __fmul_rn(FoldElement(fold, 0.0f, span_o_[v][i / 2][n][c + i % 2 * 2]),
                                finish.factor);
        }
        StoreOut4(args_.out_dtype, args_.out, at * args_.head_dim + d, values);
      }
    }
  }

  __device__ __forceinline__ int QueryTokenOf(int row) const {
    const int last = unit_info_.num_rows - 1;
    return (unit_info_.unit_row + (row < last ? row : last)) / args_.group;
  }
  __device__ __forceinline__ Visible VisibleToToken(int query_token) const {
    return VisibleTo(args_, unit_info_.context_tokens, unit_info_.query_tokens,
                     unit_info_.causal != 0, query_token);
  }

  __device__ __forceinline__ void Begin(int unit) {
    unit_ = unit;
    split_ = -1;
    unit_info_ = *(reinterpret_cast<const UnitInfo*>(memory_ + Memory::kUnitInfos) +
                   unit % Shape::kUnitSlots);
    const Visible first = VisibleToToken(QueryTokenOf(0));
    const Visible last = VisibleToToken(QueryTokenOf(Shape::kRows - 1));
    common_ = {args_.window_tokens > 0 ? args_.sink_tokens : 0, last.begin, first.end};
    const uint32_t q = base_ + Memory::kQ + unit % Shape::kUnitSlots * Shape::kQBytes +
                       lane_ / 4 * Shape::kRowBytes + lane_ % 4 * 16;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const bool row_present = 8 * n + lane_ / 4 < unit_info_.num_rows;
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
        const uint4 x = LoadShared16(q + 8 * n * Shape::kRowBytes + 64 * j);
        // Past head_dim, and in rows that do not exist, there is what an earlier unit left.
        const bool present = row_present && 32 * j + 8 * (lane_ % 4) < args_.head_dim;
        q_[n][j] = present ? x : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        span_m_[n][c] = MinusInfinity();
        span_l_[n][c] = 0.0f;
      }
#pragma unroll
      for (int v = 0; v < kSlices; ++v) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) span_o_[v][i][n][c] = 0.0f;
        }
      }
    }
    Clear();
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m_[n][c] = MinusInfinity();
        l_[n][c] = 0.0f;
      }
#pragma unroll
      for (int v = 0; v < kSlices; ++v) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) o_[v][i][n][c] = 0.0f;
        }
      }
    }
  }

  // Folds the split's state into the span's.
  __device__ __forceinline__ void FoldSplit() {
    if (split_ < 0) return;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float l = l_[n][c];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, mask));
        }
        Fold fold;
        if (!FoldBegin(span_m_[n][c], span_l_[n][c], m_[n][c], l, fold)) continue;
#pragma unroll
        for (int v = 0; v < kSlices; ++v) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            span_o_[v][i][n][c] = FoldElement(fold, span_o_[v][i][n][c], o_[v][i][n][c]);
            span_o_[v][i][n][c + 2] =
                FoldElement(fold, span_o_[v][i][n][c + 2], o_[v][i][n][c + 2]);
          }
        }
      }
    }
    Clear();
    split_ = -1;
  }

  // s[step][n] = K Q^T of the tile, scaled.
  __device__ __forceinline__ void Logits(uint32_t k, float (&s)[Shape::kTileSteps][kPieces][4]) {
    const uint32_t rows = k + TokenOfRow(lane_ / 4) * Shape::kRowBytes + lane_ % 4 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kTileSteps; ++step) {
      float other[kPieces][4];
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[step][n][c] = other[n][c] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
        const int odd_row = Shape::kSwizzled ? lane_ / 4 % 2 : 0;
        const uint32_t at = rows + step * kStepTokens * Shape::kRowBytes + 64 * j +
                            (j % 2 == 0 ? 64 : -64) * odd_row;
        const uint4 low = LoadShared16(at);
        const uint4 high = LoadShared16(at + 2 * Shape::kRowBytes);
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
          Mma<T>(s[step][n], low.x, high.x, low.y, high.y, q_[n][j].x, q_[n][j].y);
          Mma<T>(other[n], low.z, high.z, low.w, high.w, q_[n][j].z, q_[n][j].w);
        }
      }
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[step][n][c] = __fmul_rn(__fadd_rn(s[step][n][c], other[n][c]), args_.scale);
        }
      }
    }
    if (args_.logit_softcap != 0.0f) {
#pragma unroll
      for (int step = 0; step < Shape::kTileSteps; ++step) {
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            s[step][n][c] = __fmul_rn(tanhf(__fdiv_rn(s[step][n][c], args_.logit_softcap)),
                                      args_.logit_softcap);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void Mask(int64_t position,
                                       float (&s)[Shape::kTileSteps][kPieces][4]) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Visible visible = VisibleToToken(QueryTokenOf(8 * n + lane_ % 4 * 2 + c));
#pragma unroll
        for (int step = 0; step < Shape::kTileSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t token = position + step * kStepTokens + TokenOfRow(lane_ / 4 + 8 * half);
            const bool seen =
                token < visible.end && (token >= visible.begin || token < visible.sink_end);
            if (!seen) s[step][n][2 * half + c] = MinusInfinity();
          }
        }
      }
    }
  }

  // s becomes e^(s - m); m, l and o move on to the new maximum.
  __device__ __forceinline__ void Softmax(float (&s)[Shape::kTileSteps][kPieces][4]) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      float alpha[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float max = fmaxf(s[0][n][c], s[0][n][c + 2]);
#pragma unroll
        for (int step = 1; step < Shape::kTileSteps; ++step) {
          max = fmaxf(max, fmaxf(s[step][n][c], s[step][n][c + 2]));
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
        }
        max = fmaxf(max, m_[n][c]);
        alpha[c] = WeightOf(m_[n][c], max);
        m_[n][c] = max;
        // Where nothing is seen yet every s is -infinity, and e^(s - 0) is 0.
        const float base = max == MinusInfinity() ? 0.0f : max;
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < Shape::kTileSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& value = s[step][n][2 * half + c];
            value = ExpOfNonPositive(__fsub_rn(value, base));
            sum = __fadd_rn(sum, value);
          }
        }
        l_[n][c] = __fmaf_rn(l_[n][c], alpha[c], sum);
      }
      if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int v = 0; v < kSlices; ++v) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < 4; ++c) o_[v][i][n][c] = __fmul_rn(o_[v][i][n][c], alpha[c % 2]);
          }
        }
      }
    }
  }

  // P of one step, tokens by rows, high and low parts.
  struct Weights {
    uint32_t high[kPieces][2];
    uint32_t low[kPieces][2];
  };

  template <bool kMasked>
  __device__ __forceinline__ void Tile(uint32_t k, int64_t position) {
    float s[Shape::kTileSteps][kPieces][4];
    Logits(k, s);
    if constexpr (kMasked) Mask(position, s);
    Softmax(s);
    const uint32_t v_base = k + Shape::kKBytes + lane_ % 4 * Shape::kVGroupBytes + lane_ / 4 * 8;
#pragma unroll
    for (int step = 0; step < Shape::kTileSteps; ++step) {
      Weights weights;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const SplitPair pair = Split<T>(s[step][n][2 * half], s[step][n][2 * half + 1]);
          weights.high[n][half] = Transpose(pair.high);
          weights.low[n][half] = Transpose(pair.low);
        }
      }
      const uint32_t v = v_base + step * 4 * Shape::kVGroupBytes;
      if constexpr (kMasked) {
        AddMaskedValues(v, position + step * kStepTokens, weights);
      } else {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          uint2 x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = LoadShared8(v + i * Shape::kRowBytes + 64 * slice);
          AddValues<0>(x, weights, o_[slice][0]);
          AddValues<1>(x, weights, o_[slice][1]);
        }
      }
    }
  }

  // o += V^T P^T for the even (0) or odd (1) pair of head dimensions of each lane's four.
  template <int kPair>
  __device__ __forceinline__ void AddValues(const uint2 (&x)[4], const Weights& weights,
                                            float (&o)[kPieces][4]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = kPair == 0 ? x[i].x : x[i].y;
    const uint32_t a0 = __byte_perm(word[0], word[1], 0x5410);
    const uint32_t a1 = __byte_perm(word[0], word[1], 0x7632);
    const uint32_t a2 = __byte_perm(word[2], word[3], 0x5410);
    const uint32_t a3 = __byte_perm(word[2], word[3], 0x7632);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      Mma<T>(o[n], a0, a1, a2, a3, weights.high[n][0], weights.high[n][1]);
      Mma<T>(o[n], a0, a1, a2, a3, weights.low[n][0], weights.low[n][1]);
    }
  }

  // The same where tokens are hidden from some rows: V of a token reaches no product of a row that
  // does not see it, whatever bits it holds. One pass for each query token, whose rows alone keep
  // what it adds.
  __device__ __forceinline__ void AddMaskedValues(uint32_t v, int64_t position,
                                                  const Weights& weights) {
    const int first = QueryTokenOf(0);
    const int last = QueryTokenOf(Shape::kRows - 1);
    const int column = lane_ % 4 * 2;
#pragma unroll 1
    for (int query_token = first; query_token <= last; ++query_token) {
      const Visible visible = VisibleToToken(query_token);
      bool seen[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t token = position + lane_ % 4 * 4 + i;
        seen[i] = token < visible.end && (token >= visible.begin || token < visible.sink_end);
      }
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        uint2 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = LoadShared8(v + i * Shape::kRowBytes + 64 * slice);
          if (!seen[i]) x[i] = make_uint2(0, 0);
        }
        float sum[2][kPieces][4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
          for (int n = 0; n < kPieces; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[pair][n][c] = o_[slice][pair][n][c];
          }
        }
        AddValues<0>(x, weights, sum[0]);
        AddValues<1>(x, weights, sum[1]);
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (QueryTokenOf(8 * n + column + c % 2) == query_token) {
              o_[slice][0][n][c] = sum[0][n][c];
              o_[slice][1][n][c] = sum[1][n][c];
            }
          }
        }
      }
    }
  }

  const AttendKernelArgs& args_;
  std::byte* const memory_;
  const uint32_t base_;
  const int lane_;
  int unit_ = -1;
  int64_t split_ = -1;
  UnitInfo unit_info_;
  Visible common_;  // what every row of the unit sees
  uint4 q_[kPieces][kSlices];
  // The current split's state and the span's. Of o: [slice][pair][piece][fragment].
  float m_[kPieces][2];
  float l_[kPieces][2];  // of this lane's tokens
  float o_[kSlices][2][kPieces][4];
  float span_m_[kPieces][2];
  float span_l_[kPieces][2];
  float span_o_[kSlices][2][kPieces][4];
};

template <typename T, int kPad, int kPieces>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    AttendKernel(const __grid_constant__ AttendKernelArgs args) {
  using Shape = AttendShape<kPad, kPieces>;
  using Memory = WarpMemory<kPad, kPieces>;
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_warps = blockDim.x / 32;
  std::byte* memory = shared + warp * args.warp_bytes;
  if (args.head_dim < kPad) {
    // The columns past head_dim are never copied: they must not be NaN.
    for (int i = 16 * lane; i < args.warp_bytes - Memory::kQ; i += 16 * 32) {
      *reinterpret_cast<uint4*>(memory + Memory::kQ + i) = make_uint4(0, 0, 0, 0);
    }
  }
  __syncwarp();

  const std::byte* arrays = args.arrays != nullptr ? args.arrays : args.inline_arrays;
  // The kv heads of a span are side by side in memory: neighbours take them at about the same time.
  Producer<kPad, kPieces> producer(args, arrays, memory, lane, blockIdx.x * num_warps + warp,
                                   num_warps * gridDim.x);
  Consumer<T, kPad, kPieces> consumer(args, memory, lane);
  int issued = 0;
  int issue_stage = 0;
  int consumed = 0;
  int consume_stage = 0;
  while (true) {
    // q and the description of a unit wait in kUnitSlots places until the unit is begun.
    while (!producer.done() && issued - consumed < args.num_stages &&
           producer.unit() - consumer.unit() <= Shape::kUnitSlots) {
      producer.Issue(issue_stage);
      ++issued;
      issue_stage = issue_stage + 1 == args.num_stages ? 0 : issue_stage + 1;
    }
    if (consumed == issued) break;
    WaitForCopies(issued - consumed - 1);
    __syncwarp();
    consumer.Consume(consume_stage);
    __syncwarp();
    ++consumed;
    consume_stage = consume_stage + 1 == args.num_stages ? 0 : consume_stage + 1;
  }
  consumer.Finish();
  AllowNextKernel();
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_CUH_
