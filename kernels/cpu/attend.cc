// Attention. Bytes: K and V of the visible tokens of each kv head once from memory (more row
// batches and query tokens read them again from L2); q, outputs and partial states are small beside
// them.
//
// A unit takes its rows through its splits in order. For a split it gathers the addresses of the
// tokens' K rows; then, for kTileRows rows at a time, come logits, weights and the weighted sum of
// V, and the split folds into the rows' chunk state.

#include "kernels/cpu/attend.h"

#include <algorithm>

#include "kernels/cpu/highway_config.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/attend_tile-inl.h"
#include "kernels/cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

// The unit's share of the call.
struct UnitView {
  UnitView(const AttendParams& p, const AttendUnit& u)
      : params(p),
        unit(u),
        sequence(p.sequences[u.sequence]),
        group(p.num_query_heads / p.layout.num_kv_heads),
        first_row(u.row_batch * kRowBatch),
        num_rows(std::min(sequence.query_tokens * group - first_row, kRowBatch)),
        head_dim(p.layout.head_dim),
        padded_dim((head_dim + kSlice - 1) / kSlice * kSlice),
        state_floats(StateFloats(head_dim)),
        slices(head_dim) {}

  int query_token(int row) const { return (first_row + row) / group; }
  int query_head(int row) const { return unit.kv_head * group + (first_row + row) % group; }
  // Index into [rows, num_query_heads].
  int64_t call_row(int row) const {
    return (sequence.first_row + query_token(row)) * params.num_query_heads + query_head(row);
  }

  const AttendParams& params;
  const AttendUnit& unit;
  const AttendSequence& sequence;
  const int group;
  const int first_row;
  const int num_rows;
  const int head_dim;
  const int padded_dim;
  const int state_floats;
  const Slices slices;
};

template <DType kDType>
void LoadQueries(const UnitView& view, float* q) {
  const DF df;
  const int64_t row_bytes = view.head_dim * 2;
  for (int r = 0; r < view.num_rows; ++r) {
    const std::byte* from = view.params.q + view.call_row(r) * row_bytes;
    float* to = q + r * view.padded_dim;
    for (int s = 0; s < view.slices.count; ++s) {
      VF first, second;
      const std::byte* slice = from + s * kSlice * 2;
      Widen<kDType>(s < view.slices.full ? LoadSlice<false>(slice, view.slices.tail)
                                         : LoadSlice<true>(slice, view.slices.tail),
                    first, second);
      hn::Store(first, df, to + s * kSlice);
      hn::Store(second, df, to + s * kSlice + kLanes);
    }
  }
}

RowRanges RangesOf(const VisibleTokens& visible, int64_t split_begin) {
  RowRanges ranges = {};
  for (const TokenRange& range : {visible.sinks, visible.recent}) {
    const int64_t begin = std::max(range.begin, split_begin);
    const int64_t end = std::min(range.end, split_begin + kSplitTokens);
    if (begin >= end) continue;
    ranges.begin[ranges.count] = static_cast<int>(begin - split_begin);
    ranges.end[ranges.count] = static_cast<int>(end - split_begin);
    ++ranges.count;
  }
  return ranges;
}

// The rows of a split that the unit reads.
struct SplitRows {
  const std::byte** rows = nullptr;
  int64_t begin = -1;  // position of the split's first token; -1: no split
  int first = 0;       // tokens of the split that are seen: the first, and past the last
  int end = 0;
};

// rows[t] = address of K of token t of the split for the unit's kv head. A token that no query
// token sees gets the address of one that is seen, so that tiles may read it; blocks that hold only
// such tokens are not looked at. False where nothing is seen.
bool GatherRows(const UnitView& view, int64_t split_begin, const std::byte** rows,
                SplitRows& split) {
  const AttendOptions& options = view.params.options;
  const VisibleTokens oldest = VisibleTo(options, view.sequence, view.query_token(0));
  VisibleTokens all = VisibleTo(options, view.sequence, view.query_token(view.num_rows - 1));
  all.recent.begin = oldest.recent.begin;
  all.sinks.end = std::min(all.sinks.end, all.recent.begin);
  const RowRanges ranges = RangesOf(all, split_begin);
  if (ranges.count == 0) return false;

  const KvLayout& layout = view.params.layout;
  const int64_t head_offset = view.unit.kv_head * layout.kv_head_stride_bytes;
  const int64_t block_tokens = layout.block_tokens;
  int filled = 0;
  for (int i = 0; i < ranges.count; ++i) {
    for (int t = ranges.begin[i]; t < ranges.end[i];) {
      const int64_t position = split_begin + t;
      const int64_t in_block = position % block_tokens;
      const int count =
          static_cast<int>(std::min<int64_t>(block_tokens - in_block, ranges.end[i] - t));
      const std::byte* row = view.sequence.blocks[position / block_tokens] + head_offset +
                             in_block * layout.token_stride_bytes;
      if (filled < t) std::fill(rows + filled, rows + t, row);
      for (int j = 0; j < count; ++j) rows[t + j] = row + j * layout.token_stride_bytes;
      t += count;
      filled = t;
    }
  }
  // Tiles of tokens reach at most seven further, prefetches kPrefetchRows beyond that.
  std::fill_n(rows + filled, kPrefetchRows + 8, rows[filled - 1]);
  split = {rows, split_begin, ranges.begin[0], filled};
  return true;
}

bool SameRanges(const RowRanges& a, const RowRanges& b) {
  bool same = a.count == b.count;
  for (int i = 0; same && i < a.count; ++i) {
    same = a.begin[i] == b.begin[i] && a.end[i] == b.end[i];
  }
  return same;
}

// The weighted sum of V for rows that may see different tokens: those that all of them see are read
// once for all, and each row's others, before and after, for it alone. Nobody multiplies V of a
// token that it does not see, not even by zero.
template <DType kDType>
void SumTile(const UnitView& view, const std::byte* const* rows, const RowRanges* ranges,
             int num_rows, const float* weights, float* o, const PrefetchPass* prefetch) {
  const int64_t v = view.params.layout.v_offset_bytes;
  bool same = true;
  int begin = 0;
  int end = static_cast<int>(kSplitTokens);
  bool single = true;
  for (int r = 0; r < num_rows; ++r) {
    same = same && SameRanges(ranges[0], ranges[r]);
    single = single && ranges[r].count == 1;
    begin = std::max(begin, ranges[r].begin[0]);
    end = std::min(end, ranges[r].end[0]);
  }
  if (same) {
    for (int i = 0; i < ranges[0].count; ++i) {
      WeightedSums<kDType>(rows, v, ranges[0].begin[i], ranges[0].end[i], num_rows, weights,
                           view.slices, o, prefetch);
    }
    return;
  }
  const bool share = single && begin < end;
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i < ranges[r].count; ++i) {
      WeightedSums<kDType>(rows, v, ranges[r].begin[i], share ? begin : ranges[r].end[i], 1,
                           weights + r * kSplitTokens, view.slices, o + r * kMaxHeadDim, nullptr);
    }
  }
  if (!share) return;
  WeightedSums<kDType>(rows, v, begin, end, num_rows, weights, view.slices, o, prefetch);
  for (int r = 0; r < num_rows; ++r) {
    WeightedSums<kDType>(rows, v, end, ranges[r].end[0], 1, weights + r * kSplitTokens, view.slices,
                         o + r * kMaxHeadDim, nullptr);
  }
}

// Folds one split into the states of the rows [first, first + num_rows) of the unit. The first rows
// prefetch for all of them: the split's V, and K of the `next` split.
template <DType kDType>
void AttendTile(const UnitView& view, const SplitRows& split, const SplitRows& next, int first,
                int num_rows, AttendScratch& scratch, float* states) {
  RowRanges ranges[kTileRows];
  int begin = static_cast<int>(kSplitTokens);
  int end = 0;
  for (int r = 0; r < num_rows; ++r) {
    ranges[r] = RangesOf(VisibleTo(view.params.options, view.sequence, view.query_token(first + r)),
                         split.begin);
    if (ranges[r].count == 0) continue;
    begin = std::min(begin, ranges[r].begin[0]);
    end = std::max(end, ranges[r].end[ranges[r].count - 1]);
  }
  if (begin >= end) return;
  const int64_t v_offset = view.params.layout.v_offset_bytes;
  const PrefetchPass k_pass = {split.rows, split.end, 0, split.rows + split.first, v_offset};
  const PrefetchPass v_pass = {split.rows, split.end, v_offset, next.rows + next.first, 0};
  Dots<kDType>(split.rows, begin, end, num_rows, scratch.q + first * view.padded_dim,
               view.padded_dim, view.slices, scratch.weights, first == 0 ? &k_pass : nullptr);
  MaxAndSum parts[kTileRows];
  for (int r = 0; r < num_rows; ++r) {
    parts[r] = {-kInfinity, 0.0f};
    if (ranges[r].count == 0) continue;
    parts[r] = Softmax(scratch.weights + r * kSplitTokens, ranges[r], view.params.options.scale,
                       view.params.options.logit_softcap);
    if (parts[r].m == -kInfinity) ranges[r].count = 0;
  }
  for (int r = 0; r < num_rows; ++r) {
    std::fill_n(scratch.tile_o + r * kMaxHeadDim, view.padded_dim, 0.0f);
  }
  SumTile<kDType>(view, split.rows, ranges, num_rows, scratch.weights, scratch.tile_o,
                  first == 0 && next.begin >= 0 ? &v_pass : nullptr);
  for (int r = 0; r < num_rows; ++r) {
    float* state = states + (first + r) * view.state_floats;
    FoldState({state, state + 1, state + kStateHeader}, parts[r].m, parts[r].l,
              scratch.tile_o + r * kMaxHeadDim, view.padded_dim);
  }
}

void SetEmpty(float* state, int padded_dim) {
  state[0] = -kInfinity;
  state[1] = 0.0f;
  std::fill_n(state + kStateHeader, padded_dim, 0.0f);
}

template <DType kDType>
void AttendSpan(const UnitView& view, AttendScratch& scratch, float* states) {
  for (int r = 0; r < view.num_rows; ++r) SetEmpty(states + r * view.state_floats, view.padded_dim);
  LoadQueries<kDType>(view, scratch.q);
  SplitRows now;
  int buffer = 0;
  for (int64_t i = view.unit.first_split; i < view.unit.end_split || now.begin >= 0; ++i) {
    SplitRows next;
    if (i < view.unit.end_split &&
        !GatherRows(view, i * kSplitTokens, scratch.rows[buffer], next)) {
      continue;
    }
    for (int r = 0; now.begin >= 0 && r < view.num_rows; r += kTileRows) {
      AttendTile<kDType>(view, now, next, r, std::min(view.num_rows - r, kTileRows), scratch,
                         states);
    }
    now = next;
    buffer ^= 1;
  }
}

// The unit's row of the caller's running state, or an empty state, comes into `state` in lane
// order; the other way round in StoreRow.
template <DType kDType>
void LoadRow(const UnitView& view, int row, float* state) {
  SetEmpty(state, view.padded_dim);
  const RunningState& from = view.params.state;
  if (from.m == nullptr) return;
  const int64_t at = view.call_row(row);
  state[0] = from.m[at];
  state[1] = from.l[at];
  for (int lane = 0; lane < view.padded_dim; ++lane) {
    const int i = MemoryIndex<kDType>(lane);
    if (i < view.head_dim) state[kStateHeader + lane] = from.o[at * view.head_dim + i];
  }
}

// From lane order to memory order.
template <DType kDType>
void Reorder(const float* from, int padded_dim, float* to) {
  const DF df;
  for (int i = 0; i < padded_dim; i += kSlice) {
    const VF first = hn::Load(df, from + i);
    const VF second = hn::Load(df, from + i + kLanes);
    if constexpr (kDType == DType::kBf16) {
      hn::StoreInterleaved2(first, second, df, to + i);
    } else {
      hn::Store(first, df, to + i);
      hn::Store(second, df, to + i + kLanes);
    }
  }
}

template <DType kDType>
void StoreRow(const UnitView& view, int row, const float* state) {
  alignas(64) float o[kMaxHeadDim];
  const AttendParams& params = view.params;
  const int64_t at = view.call_row(row);
  const int count = view.head_dim;
  Reorder<kDType>(state + kStateHeader, view.padded_dim, o);
  if (params.state.m != nullptr) {
    params.state.m[at] = state[0];
    params.state.l[at] = state[1];
    std::copy_n(o, count, params.state.o + at * count);
    return;
  }
  const float* sinks = params.options.sink_logits;
  const Finish finish =
      FinishOf(state[0], state[1], sinks == nullptr ? nullptr : sinks + view.query_head(row));
  StoreOut(params.out_dtype, o, finish.factor, count,
           params.out + at * count * DTypeBytes(params.out_dtype));
  if (params.lse != nullptr) params.lse[at] = finish.lse;
}

// The spans' partial states fold into chunks, the chunks into the sequence, in order of position.
template <DType kDType>
void MergeSpans(const UnitView& view, const AttendPlan& plan, AttendScratch& scratch) {
  const SequencePlan& sequence = plan.sequence(view.unit.sequence);
  alignas(64) float total[StateFloats(kMaxHeadDim)];
  float* chunk = scratch.states;
  const auto fold = [&](float* into, const float* part) HWY_ATTR {
    FoldState({into, into + 1, into + kStateHeader}, part[0], part[1], part + kStateHeader,
              view.padded_dim);
  };
  for (int r = 0; r < view.num_rows; ++r) {
    LoadRow<kDType>(view, r, total);
    int64_t open_chunk = -1;
    for (int64_t span = 0; span < sequence.num_spans; ++span) {
      const float* part = plan.partial(view.params, view.unit, span) + r * view.state_floats;
      if (sequence.splits_per_span == kSplitsPerChunk) {
        fold(total, part);
        continue;
      }
      const int64_t split = span + (span >= sequence.sink_spans ? sequence.skipped_spans : 0);
      if (split / kSplitsPerChunk != open_chunk) {
        if (open_chunk >= 0) fold(total, chunk);
        SetEmpty(chunk, view.padded_dim);
        open_chunk = split / kSplitsPerChunk;
      }
      fold(chunk, part);
    }
    if (open_chunk >= 0) fold(total, chunk);
    StoreRow<kDType>(view, r, total);
  }
}

template <DType kDType>
void RunUnit(const AttendOp& op, int64_t index, AttendScratch& scratch) {
  const AttendUnit unit = op.plan.unit(op.params, index);
  const UnitView view(op.params, unit);
  if (op.plan.sequence(unit.sequence).num_spans > 1) {
    AttendSpan<kDType>(view, scratch, op.plan.partial(op.params, unit, unit.span));
    if (op.plan.LastToFinish(op.params, unit)) MergeSpans<kDType>(view, op.plan, scratch);
    return;
  }
  AttendSpan<kDType>(view, scratch, scratch.states);
  alignas(64) float total[StateFloats(kMaxHeadDim)];
  for (int r = 0; r < view.num_rows; ++r) {
    const float* chunk = scratch.states + r * view.state_floats;
    LoadRow<kDType>(view, r, total);
    FoldState({total, total + 1, total + kStateHeader}, chunk[0], chunk[1], chunk + kStateHeader,
              view.padded_dim);
    StoreRow<kDType>(view, r, total);
  }
}

void RunAttend(const AttendOp& op, int64_t begin, int64_t end, AttendScratch& scratch) {
  for (int64_t i = begin; i < end; ++i) {
    if (op.params.layout.dtype == DType::kBf16) {
      RunUnit<DType::kBf16>(op, i, scratch);
    } else {
      RunUnit<DType::kFp16>(op, i, scratch);
    }
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

HWY_EXPORT(RunAttend);

PhaseSize AttendOp::Start(int, int num_workers) {
  plan = AttendPlan(params);
  const int64_t units = plan.Build(params, num_workers);
  return {units, std::max<int64_t>(1, 20'000 / plan.unit_ns())};
}

void AttendOp::Run(int, int64_t begin, int64_t end, WorkerScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(RunAttend)(*this, begin, end, scratch.As<AttendScratch>());
}

}  // namespace sluice
#endif  // HWY_ONCE
