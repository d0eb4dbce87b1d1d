#include "kernels/cuda/attend_plan.h"

#include <algorithm>

namespace sluice::cuda {
namespace {

constexpr int64_t kSpanTokens = kDeviceSplitTokens * kSplitsPerSpan;
// Query rows times spans a multiprocessor below which spans are cut into splits: three units of
// four rows.
constexpr int64_t kRowSpansPerSm = 12;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

int SplitsPerPart(const AttendParams& params, int num_sms) {
  int64_t row_spans = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    row_spans += DivideUp(sequence.context_tokens, kSpanTokens) * sequence.query_tokens *
                 params.num_query_heads;
  }
  return row_spans < kRowSpansPerSm * num_sms ? 1 : kSplitsPerSpan;
}

// Splits that some query token of the sequence sees: [0, sink_end) and [begin, end).
struct VisibleSplits {
  int64_t sink_end = 0;
  int64_t begin = 0;
  int64_t end = 0;
};
VisibleSplits SplitsOf(const AttendOptions& options, const AttendSequence& sequence) {
  VisibleSplits splits;
  splits.end = DivideUp(sequence.context_tokens, kDeviceSplitTokens);
  if (options.window_tokens == 0) return splits;
  const int64_t earlier = sequence.causal ? sequence.query_tokens - 1 : 0;
  const int64_t begin =
      std::max<int64_t>(sequence.context_tokens - earlier - options.window_tokens, 0);
  if (options.sink_tokens >= begin) return splits;
  splits.begin = begin / kDeviceSplitTokens;
  splits.sink_end = std::min(DivideUp(options.sink_tokens, kDeviceSplitTokens), splits.begin);
  return splits;
}

struct Parts {
  int64_t sink_parts;
  int64_t skipped_parts;
  int64_t num_parts;
};
Parts PartsOf(const VisibleSplits& splits, int splits_per_part) {
  Parts parts;
  const int64_t begin = splits.begin / splits_per_part;
  parts.sink_parts = std::min(DivideUp(splits.sink_end, splits_per_part), begin);
  parts.skipped_parts = begin - parts.sink_parts;
  parts.num_parts = DivideUp(splits.end, splits_per_part) - parts.skipped_parts;
  return parts;
}

}  // namespace

int64_t AttendWorkspaceBytes(const AttendParams& params, int num_sms) {
  const int64_t part_tokens = SplitsPerPart(params, num_sms) * kDeviceSplitTokens;
  int64_t states = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    states += DivideUp(sequence.context_tokens, part_tokens) * sequence.query_tokens *
              params.num_query_heads;
  }
  return 256 + states * (params.layout.head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

int64_t MaxRows(const AttendParams& params) {
  const int64_t group = params.num_query_heads / params.layout.num_kv_heads;
  int64_t rows = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    rows = std::max(rows, group * params.sequences[i].query_tokens);
  }
  return rows;
}

void AttendPlan::Build(const AttendParams& params, int rows_per_unit, int num_sms) {
  units.clear();
  merges.clear();
  num_states = 0;
  max_merge_query_tokens = 0;
  const int64_t group = params.num_query_heads / params.layout.num_kv_heads;
  const int splits_per_part = SplitsPerPart(params, num_sms);
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    const Parts parts = PartsOf(SplitsOf(params.options, sequence), splits_per_part);
    const bool direct = parts.num_parts == 1 && params.state.m == nullptr;
    if (!direct) {
      AttendMergeArgs merge = {};
      merge.first_state = num_states;
      merge.first_row = sequence.first_row;
      merge.query_tokens = sequence.query_tokens;
      merge.num_parts = static_cast<int32_t>(parts.num_parts);
      merge.splits_per_part = splits_per_part;
      merge.sink_parts = static_cast<int32_t>(parts.sink_parts);
      merge.skipped_parts = static_cast<int32_t>(parts.skipped_parts);
      merges.push_back(merge);
      max_merge_query_tokens = std::max(max_merge_query_tokens, sequence.query_tokens);
    }
    const int64_t rows = sequence.query_tokens * group;
    const int64_t part_states = int64_t{sequence.query_tokens} * params.num_query_heads;
    for (int64_t part = 0; part < parts.num_parts; ++part) {
      const int64_t place = part + (part >= parts.sink_parts ? parts.skipped_parts : 0);
      AttendUnitArgs unit;
      unit.first_state = direct ? -1 : num_states + part * part_states;
      unit.sequence = static_cast<int32_t>(i);
      unit.first_split = static_cast<int32_t>(place * splits_per_part);
      unit.num_splits = splits_per_part;
      for (unit.first_row = 0; unit.first_row < rows; unit.first_row += rows_per_unit) {
        units.push_back(unit);
      }
    }
    if (!direct) num_states += parts.num_parts * part_states;
  }
}

}  // namespace sluice::cuda
