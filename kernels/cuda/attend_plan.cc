#include "kernels/cuda/attend_plan.h"

#include <algorithm>

namespace sluice::cuda {
namespace {

// States of spans that a call may leave in the workspace; one that would leave more has parts of a
// chunk.
constexpr int64_t kMaxSpanStates = 8192;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// States of every query row of a call for parts of so many tokens.
int64_t NumStates(const AttendParams& params, int64_t part_tokens) {
  int64_t states = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    states += DivideUp(sequence.context_tokens, part_tokens) * sequence.query_tokens *
              params.num_query_heads;
  }
  return states;
}

// Spans that some query token of the sequence sees: [0, sink_end) and [begin, end).
struct VisibleSpans {
  int64_t sink_end = 0;
  int64_t begin = 0;
  int64_t end = 0;
};
VisibleSpans SpansOf(const AttendOptions& options, const AttendSequence& sequence) {
  VisibleSpans spans;
  spans.end = std::max<int64_t>(DivideUp(sequence.context_tokens, kSpanTokens), 1);
  if (options.window_tokens == 0) return spans;
  const int64_t earlier = sequence.causal ? sequence.query_tokens - 1 : 0;
  const int64_t begin =
      std::max<int64_t>(sequence.context_tokens - earlier - options.window_tokens, 0);
  if (options.sink_tokens >= begin) return spans;
  spans.begin = begin / kSpanTokens;
  spans.sink_end = std::min(DivideUp(options.sink_tokens, kSpanTokens), spans.begin);
  return spans;
}

struct Parts {
  int64_t sink_parts;
  int64_t skipped_parts;
  int64_t num_parts;
};
Parts PartsOf(const VisibleSpans& spans, int part_spans) {
  Parts parts;
  const int64_t begin = spans.begin / part_spans;
  parts.sink_parts = std::min(DivideUp(spans.sink_end, part_spans), begin);
  parts.skipped_parts = begin - parts.sink_parts;
  parts.num_parts = DivideUp(spans.end, part_spans) - parts.skipped_parts;
  return parts;
}

}  // namespace

int64_t AttendWorkspaceBytes(const AttendParams& params) {
  const int64_t states = std::max(NumStates(params, kChunkTokens),
                                  std::min(NumStates(params, kSpanTokens), kMaxSpanStates));
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

void AttendPlan::AddEntries(const AttendParams& params, int rows_per_entry) {
  entries.clear();
  entry_spans_.clear();
  const int64_t group = params.num_query_heads / params.layout.num_kv_heads;
  int64_t table_offset = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    AttendEntryArgs entry = {};
    entry.table_offset = table_offset;
    table_offset += DivideUp(sequence.context_tokens, params.layout.block_tokens) *
                    static_cast<int64_t>(sizeof(std::byte*));
    // A running state stays as it is.
    if (sequence.context_tokens == 0 && params.state.m != nullptr) continue;
    const Parts parts = PartsOf(SpansOf(params.options, sequence), part_spans);
    entry.context_tokens = sequence.context_tokens;
    entry.first_query = static_cast<int32_t>(sequence.first_row);
    entry.query_tokens = sequence.query_tokens;
    entry.causal = sequence.causal ? 1 : 0;
    entry.num_parts = static_cast<int32_t>(parts.num_parts);
    entry.sink_parts = static_cast<int32_t>(parts.sink_parts);
    entry.skipped_parts = static_cast<int32_t>(parts.skipped_parts);
    // What the last part lacks in spans.
    const int64_t end = (parts.num_parts + parts.skipped_parts) * part_spans;
    const int64_t lacking =
        end - std::max<int64_t>(DivideUp(sequence.context_tokens, kSpanTokens), 1);
    const int64_t rows = sequence.query_tokens * group;
    for (int64_t row = 0; row < rows; row += rows_per_entry) {
      entry.first_row = static_cast<int32_t>(row);
      entry.num_rows = static_cast<int32_t>(std::min<int64_t>(rows - row, rows_per_entry));
      entries.push_back(entry);
      entry_spans_.push_back(parts.num_parts * part_spans - lacking);
    }
  }
}

// Returns the spans of the team that has most.
int64_t AttendPlan::CutIntoTeams(int num_teams) {
  teams.clear();
  int64_t total = 0;
  for (const int64_t spans : entry_spans_) total += spans;
  int64_t most = 0;
  int64_t before = 0;  // spans before this entry
  int64_t start = 0;   // of the current team
  for (size_t i = 0; i < entries.size(); ++i) {
    while (static_cast<int>(teams.size()) < num_teams) {
      const int64_t border = total * static_cast<int64_t>(teams.size()) / num_teams;
      const int64_t part = std::max<int64_t>(border - before + part_spans / 2, 0) / part_spans;
      if (part >= entries[i].num_parts) break;
      const int64_t at = before + part * part_spans;
      most = std::max(most, at - start);
      start = at;
      teams.push_back({static_cast<int32_t>(i), static_cast<int32_t>(part)});
    }
    before += entry_spans_[i];
  }
  most = std::max(most, total - start);
  while (static_cast<int>(teams.size()) <= num_teams) {
    teams.push_back({static_cast<int32_t>(entries.size()), 0});
  }
  return most;
}

// Gives the entries that several teams share their states and counters.
void AttendPlan::ShareEntries(int num_kv_heads) {
  for (size_t t = 0; t + 1 < teams.size(); ++t) {
    const AttendTeamArgs& start = teams[t];
    const AttendTeamArgs& end = teams[t + 1];
    for (int i = start.entry; i < end.entry; ++i) ++entries[i].num_teams;
    if (end.part > (end.entry == start.entry ? start.part : 0)) ++entries[end.entry].num_teams;
  }
  num_states = 0;
  num_counters = 0;
  for (AttendEntryArgs& entry : entries) {
    if (entry.num_teams <= 1) continue;
    entry.first_state = num_states;
    num_states += int64_t{entry.num_parts} * entry.num_rows * num_kv_heads;
    entry.first_counter = num_counters;
    num_counters += num_kv_heads;
  }
}

void AttendPlan::Build(const AttendParams& params, int rows_per_entry, int num_blocks) {
  team_blocks = std::min(params.layout.num_kv_heads, num_blocks);
  const int num_teams = num_blocks / team_blocks;
  part_spans = kSpansPerChunk;
  AddEntries(params, rows_per_entry);
  const int64_t most = CutIntoTeams(num_teams);
  if (NumStates(params, kSpanTokens) <= kMaxSpanStates) {
    part_spans = 1;
    AddEntries(params, rows_per_entry);
    if (10 * most <= 11 * CutIntoTeams(num_teams)) {
      part_spans = kSpansPerChunk;
      AddEntries(params, rows_per_entry);
      CutIntoTeams(num_teams);
    }
  }
  ShareEntries(params.layout.num_kv_heads);
}

}  // namespace sluice::cuda
