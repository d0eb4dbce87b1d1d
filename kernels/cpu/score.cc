// ScoreBlocks. Bytes: A_g of every predicted block once. MASS also writes and reads (m, l) per
// block and query head.
//
// MASS is the same whatever the workers do: each block has its own (m, l), which fold in fixed
// ranges of kRangeBlocks blocks, in order, and those in order into the whole.

#include "kernels/cpu/score.h"

#include <algorithm>
#include <bit>

#include "kernels/cpu/highway_config.h"
#include "kernels/ops/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/score.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/attend_tile-inl.h"
#include "kernels/cpu/project-inl.h"

#ifndef KERNELS_CPU_SCORE_ONCE_
#define KERNELS_CPU_SCORE_ONCE_
namespace sluice {
namespace {

constexpr int64_t kRangeBlocks = 512;
constexpr int64_t kHeadPadding = 16;

bool IsPredicted(const ScoreBlock& block) {
  return block.projected != nullptr && block.valid_tokens > 0;
}

// Sorts ascending: predicted before not, higher score first, lower position first.
uint64_t OrderKey(bool predicted, float score, int64_t position) {
  uint32_t high = 0xffffffffu;
  if (predicted) {
    const uint32_t bits = std::bit_cast<uint32_t>(score == 0.0f ? 0.0f : score);
    const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    high = score == score ? ~ascending : 0xfffffffeu;  // NaN after all numbers
  }
  return (static_cast<uint64_t>(high) << 32) | static_cast<uint64_t>(position);
}

}  // namespace
}  // namespace sluice
#endif  // KERNELS_CPU_SCORE_ONCE_

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

// q' of the query heads of kv heads [begin, end), in lane order, zero to the end of the last slice.
void RunQueries(const ScoreParams& params, int64_t begin, int64_t end, ScoreScratch& scratch) {
  const ScoreWorkspace workspace(params);
  const int group = params.num_query_heads / params.num_kv_heads;
  const int padded = PaddedRank(params.rank);
  const int lanes = (params.rank + kSlice - 1) / kSlice * kSlice;
  for (int64_t kv_head = begin; kv_head < end; ++kv_head) {
    LoadProjection(params.projection + kv_head * params.projection_kv_head_stride_bytes,
                   params.head_dim, params.rank, scratch.p);
    for (int g = 0; g < group; g += kProjectRows) {
      const int rows = std::min(group - g, kProjectRows);
      const std::byte* from[kProjectRows] = {};
      for (int i = 0; i < rows; ++i) {
        from[i] = params.q + (kv_head * group + g + i) * params.head_dim * 2;
      }
      alignas(64) float out[kProjectRows * kMaxRank];
      ProjectRows(params.q_dtype, from, rows, params.head_dim, params.rank, scratch.p, out);
      for (int i = 0; i < rows; ++i) {
        float* to = workspace.q + (kv_head * group + g + i) * kMaxRank;
        for (int lane = 0; lane < lanes; ++lane) {
          const int r = MemoryIndex<DType::kBf16>(lane);
          to[lane] = r < params.rank ? out[i * padded + r] : 0.0f;
        }
      }
    }
  }
}

// The addresses of a kv head's rows of A_g. Rows that a masked load could not end exactly (an odd
// rank; vectors of four lanes) are copied to where zeros follow them.
int GatherProjected(const ScoreParams& params, const ScoreBlock& block, int64_t kv_head,
                    ScoreScratch& scratch) {
  const int rank = params.rank;
  const std::byte* from = block.projected + 2 * kv_head * params.block_tokens * rank;
  int64_t stride = 2 * rank;
  const bool copy = rank % kSlice != 0 && (rank % 2 != 0 || kLanes == 4);
  const int row_elements = copy ? (rank + kSlice - 1) / kSlice * kSlice : rank;
  if (copy) {
    stride = 2 * row_elements;
    for (int t = 0; t < block.valid_tokens; ++t) {
      std::memcpy(scratch.padded + t * stride, from + t * 2 * rank, 2 * rank);
      std::memset(scratch.padded + t * stride + 2 * rank, 0, stride - 2 * rank);
    }
    from = scratch.padded;
  }
  for (int t = 0; t < block.valid_tokens; ++t) scratch.rows[t] = from + t * stride;
  std::fill_n(scratch.rows + block.valid_tokens, 8, scratch.rows[block.valid_tokens - 1]);
  return row_elements;
}

float MaxOf(const float* values, int count) {
  const DF df;
  VF maxima = hn::Set(df, -kInfinity);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) maxima = hn::Max(maxima, hn::LoadU(df, values + i));
  float max = hn::GetLane(hn::MaxOfLanes(df, maxima));
  for (; i < count; ++i) max = std::max(max, values[i]);
  return max;
}

void RunBlocks(const ScoreParams& params, int64_t begin, int64_t end, ScoreScratch& scratch) {
  const ScoreWorkspace workspace(params);
  const int group = params.num_query_heads / params.num_kv_heads;
  for (int64_t b = begin; b < end; ++b) {
    const ScoreBlock& block = params.blocks[b];
    SLUICE_CHECK(block.valid_tokens <= params.block_tokens);
    const bool predicted = IsPredicted(block);
    float score = -kInfinity;
    for (int64_t kv_head = 0; predicted && kv_head < params.num_kv_heads; ++kv_head) {
      const Slices slices(GatherProjected(params, block, kv_head, scratch));
      const RowRanges all = {{0, 0}, {block.valid_tokens, 0}, 1};
      for (int g = 0; g < group; g += 4) {
        const int64_t head = kv_head * group + g;
        const int rows = std::min(group - g, 4);
        Dots<DType::kBf16>(scratch.rows, 0, block.valid_tokens, rows, workspace.q + head * kMaxRank,
                           kMaxRank, slices, scratch.weights, nullptr);
        for (int r = 0; r < rows; ++r) {
          float* logits = scratch.weights + r * kSplitTokens;
          if (params.kind == ScoreKind::kMaxDot) {
            score = std::max(score, MaxOf(logits, block.valid_tokens));
          } else {
            const MaxAndSum stats = Softmax(logits, all, params.scale, 0.0f);
            workspace.stats[2 * b * workspace.heads + head + r] = stats.m;
            workspace.stats[(2 * b + 1) * workspace.heads + head + r] = stats.l;
          }
        }
      }
    }
    if (params.kind == ScoreKind::kMaxDot || !predicted) {
      params.scores[b] = score;
      if (params.top_k > 0) workspace.order[b] = OrderKey(predicted, score, b);
    }
  }
}

// e^(x - max) by lanes; equal infinities weigh 1.
VF WeightsOf(VF x, VF max) {
  const DF df;
  const VF weight = ExpOfNonPositive(df, hn::Sub(x, max));
  return hn::IfThenElse(hn::Eq(x, max), hn::Set(df, 1.0f), weight);
}

// (m, l) of [begin, end) of `parts`, in order, for all heads. A block that is not predicted is
// skipped where `blocks` says so.
void FoldStats(const float* parts, const ScoreBlock* blocks, int64_t begin, int64_t end,
               int64_t heads, float* into) {
  const DF df;
  for (int64_t h = 0; h < heads; h += kLanes) {
    VF m = hn::Set(df, -kInfinity);
    VF l = hn::Zero(df);
    for (int64_t i = begin; i < end; ++i) {
      if (blocks != nullptr && !IsPredicted(blocks[i])) continue;
      const VF part_m = hn::LoadU(df, parts + 2 * i * heads + h);
      const VF part_l = hn::LoadU(df, parts + (2 * i + 1) * heads + h);
      const VF max = hn::Max(m, part_m);
      l = hn::Add(hn::Mul(l, WeightsOf(m, max)), hn::Mul(part_l, WeightsOf(part_m, max)));
      m = max;
    }
    hn::StoreU(m, df, into + h);
    hn::StoreU(l, df, into + heads + h);
  }
}

void RunRanges(const ScoreParams& params, int64_t begin, int64_t end) {
  const ScoreWorkspace workspace(params);
  for (int64_t i = begin; i < end; ++i) {
    FoldStats(workspace.stats, params.blocks, i * kRangeBlocks,
              std::min((i + 1) * kRangeBlocks, params.num_blocks), workspace.heads,
              workspace.ranges + 2 * i * workspace.heads);
  }
}

void RunWhole(const ScoreParams& params) {
  const ScoreWorkspace workspace(params);
  FoldStats(workspace.ranges, nullptr, 0, workspace.num_ranges, workspace.heads,
            workspace.ranges + 2 * workspace.num_ranges * workspace.heads);
}

void RunMasses(const ScoreParams& params, int64_t begin, int64_t end) {
  const DF df;
  const ScoreWorkspace workspace(params);
  const int64_t heads = workspace.heads;
  const float* whole = workspace.ranges + 2 * workspace.num_ranges * heads;
  for (int64_t b = begin; b < end; ++b) {
    if (!IsPredicted(params.blocks[b])) continue;
    const float* stats = workspace.stats + 2 * b * heads;
    VF sum = hn::Zero(df);
    for (int64_t h = 0; h < params.num_query_heads; h += kLanes) {
      const VF l = hn::LoadU(df, stats + heads + h);
      const VF weight = WeightsOf(hn::LoadU(df, stats + h), hn::LoadU(df, whole + h));
      const VF mass = hn::Div(hn::Mul(l, weight), hn::LoadU(df, whole + heads + h));
      const auto in_range = hn::FirstN(df, static_cast<size_t>(params.num_query_heads - h));
      sum = hn::Add(sum, hn::IfThenElseZero(in_range, mass));
    }
    params.scores[b] = hn::GetLane(hn::SumOfLanes(df, sum)) / params.num_query_heads;
    if (params.top_k > 0) workspace.order[b] = OrderKey(true, params.scores[b], b);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {
namespace {

constexpr int64_t kAlignment = 64;
int64_t Align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t PaddedHeads(const ScoreParams& params) {
  return (params.num_query_heads + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}
int64_t NumRanges(const ScoreParams& params) {
  return (params.num_blocks + kRangeBlocks - 1) / kRangeBlocks;
}
int64_t QueryBytes(const ScoreParams& params) {
  return Align(4 * static_cast<int64_t>(params.num_query_heads) * kMaxRank);
}
int64_t StatsBytes(const ScoreParams& params) {
  return params.kind == ScoreKind::kMass ? Align(8 * params.num_blocks * PaddedHeads(params)) : 0;
}
int64_t RangeBytes(const ScoreParams& params) {
  if (params.kind != ScoreKind::kMass) return 0;
  return Align(8 * (NumRanges(params) + 1) * PaddedHeads(params));
}

void SelectTop(const ScoreParams& params) {
  uint64_t* order = ScoreWorkspace(params).order;
  if (params.top_k < params.num_blocks) {
    std::nth_element(order, order + params.top_k, order + params.num_blocks);
  }
  std::sort(order, order + params.top_k);
  for (int64_t i = 0; i < params.top_k; ++i) {
    params.top[i] = static_cast<int64_t>(order[i] & 0xffffffffu);
  }
}

}  // namespace

HWY_EXPORT(RunQueries);
HWY_EXPORT(RunBlocks);
HWY_EXPORT(RunRanges);
HWY_EXPORT(RunWhole);
HWY_EXPORT(RunMasses);

int64_t ScoreWorkspace::Bytes(const ScoreParams& params) {
  return kAlignment + QueryBytes(params) + StatsBytes(params) + RangeBytes(params) +
         (params.top_k > 0 ? 8 * params.num_blocks : 0);
}

ScoreWorkspace::ScoreWorkspace(const ScoreParams& params)
    : heads(PaddedHeads(params)), num_ranges(NumRanges(params)) {
  const int64_t raw = reinterpret_cast<int64_t>(params.workspace);
  std::byte* base = params.workspace + (Align(raw) - raw);
  q = reinterpret_cast<float*>(base);
  base += QueryBytes(params);
  stats = reinterpret_cast<float*>(base);
  base += StatsBytes(params);
  ranges = reinterpret_cast<float*>(base);
  base += RangeBytes(params);
  order = reinterpret_cast<uint64_t*>(base);
}

PhaseSize ScoreOp::Start(int phase, int) {
  const bool mass = params.kind == ScoreKind::kMass;
  if (params.num_blocks == 0) return {0, 1};
  // Nanoseconds of one unit; claims are of some 20 us.
  int64_t units = 0;
  int64_t unit_ns = 1;
  switch (phase) {
    case 0:
      units = params.num_kv_heads;
      unit_ns = static_cast<int64_t>(params.num_query_heads / params.num_kv_heads + 1) *
                params.head_dim * params.rank / 16;
      break;
    case 1:
      units = params.num_blocks;
      unit_ns = static_cast<int64_t>(params.num_query_heads) * params.block_tokens *
                (params.rank + 16) / 16;
      break;
    case 2:
      units = mass ? NumRanges(params) : 0;
      unit_ns = kRangeBlocks * PaddedHeads(params);
      break;
    case 3:
      units = mass ? 1 : 0;
      break;
    case 4:
      units = mass ? params.num_blocks : 0;
      unit_ns = PaddedHeads(params);
      break;
    case 5:
      units = params.top_k > 0 ? 1 : 0;
      break;
  }
  return {units, std::max<int64_t>(1, 20'000 / std::max<int64_t>(unit_ns, 1))};
}

void ScoreOp::Run(int phase, int64_t begin, int64_t end, WorkerScratch& worker) {
  ScoreScratch& scratch = worker.As<ScoreScratch>();
  switch (phase) {
    case 0:
      return HWY_DYNAMIC_DISPATCH(RunQueries)(params, begin, end, scratch);
    case 1:
      return HWY_DYNAMIC_DISPATCH(RunBlocks)(params, begin, end, scratch);
    case 2:
      return HWY_DYNAMIC_DISPATCH(RunRanges)(params, begin, end);
    case 3:
      return HWY_DYNAMIC_DISPATCH(RunWhole)(params);
    case 4:
      return HWY_DYNAMIC_DISPATCH(RunMasses)(params, begin, end);
    case 5:
      return SelectTop(params);
  }
}

}  // namespace sluice
#endif  // HWY_ONCE
