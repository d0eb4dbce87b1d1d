#include "kernels/cpu/attend_plan.h"

#include <algorithm>
#include <new>

namespace sluice {
namespace {

constexpr int64_t kAlignment = 64;

int64_t Align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Upper bounds that do not depend on the window or the number of kv heads.
int64_t MaxSpans(const AttendSequence& sequence) {
  const int64_t splits = DivideUp(sequence.context_tokens, kSplitTokens);
  return std::max(std::min(splits, kMaxSplitSpans),
                  DivideUp(sequence.context_tokens, kChunkTokens));
}
int64_t MaxCounters(const AttendParams& params, const AttendSequence& sequence) {
  return static_cast<int64_t>(params.num_query_heads) * sequence.query_tokens;
}
int64_t PartialFloats(const AttendParams& params, const AttendSequence& sequence, int64_t spans) {
  return spans * sequence.query_tokens * params.num_query_heads *
         StateFloats(params.layout.head_dim);
}

// Splits that some query token of the sequence sees: [0, sink_end) and [begin, end).
struct VisibleSplits {
  int64_t sink_end = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return sink_end + end - begin; }
};
VisibleSplits SplitsOf(const AttendOptions& options, const AttendSequence& sequence) {
  const VisibleTokens first = VisibleTo(options, sequence, 0);
  const VisibleTokens last = VisibleTo(options, sequence, sequence.query_tokens - 1);
  VisibleSplits splits;
  splits.end = DivideUp(last.recent.end, kSplitTokens);
  splits.begin = first.recent.begin / kSplitTokens;
  splits.sink_end = std::min(DivideUp(last.sinks.end, kSplitTokens), splits.begin);
  return splits;
}

}  // namespace

VisibleTokens VisibleTo(const AttendOptions& options, const AttendSequence& sequence,
                        int query_token) {
  const int64_t later = sequence.causal ? sequence.query_tokens - 1 - query_token : 0;
  VisibleTokens visible;
  visible.recent.end = std::max<int64_t>(sequence.context_tokens - later, 0);
  if (options.window_tokens > 0) {
    visible.recent.begin = std::max<int64_t>(visible.recent.end - options.window_tokens, 0);
    if (options.sink_tokens >= visible.recent.begin) {
      visible.recent.begin = 0;
    } else {
      visible.sinks.end = options.sink_tokens;
    }
  }
  return visible;
}

AttendPlan::AttendPlan(const AttendParams& params) {
  const int64_t raw = reinterpret_cast<int64_t>(params.workspace);
  auto* base = reinterpret_cast<std::byte*>(Align(raw));
  int64_t counters = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    counters += MaxCounters(params, params.sequences[i]);
  }
  const int64_t counters_at = Align(params.num_sequences * sizeof(SequencePlan));
  const int64_t partials_at = counters_at + Align(counters * sizeof(std::atomic<uint32_t>));
  sequences_ = reinterpret_cast<SequencePlan*>(base);
  counters_ = reinterpret_cast<std::atomic<uint32_t>*>(base + counters_at);
  partials_ = reinterpret_cast<float*>(base + partials_at);
}

int64_t AttendPlan::WorkspaceBytes(const AttendParams& params) {
  int64_t counters = 0;
  int64_t floats = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    counters += MaxCounters(params, sequence);
    const int64_t spans = MaxSpans(sequence);
    if (spans > 1) floats += PartialFloats(params, sequence, spans);
  }
  return kAlignment + Align(params.num_sequences * sizeof(SequencePlan)) +
         Align(counters * sizeof(std::atomic<uint32_t>)) + Align(floats * sizeof(float));
}

int64_t AttendPlan::Build(const AttendParams& params, int num_workers) {
  const int64_t group = params.num_query_heads / params.layout.num_kv_heads;
  // Splits times row batches of the whole call, and units if they were all chunks.
  int64_t split_units = 0;
  int64_t chunk_units = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    const int64_t batches = DivideUp(sequence.query_tokens * group, kRowBatch);
    const int64_t splits = SplitsOf(params.options, sequence).count();
    split_units += splits * batches * params.layout.num_kv_heads;
    chunk_units += DivideUp(splits, kSplitsPerChunk) * batches * params.layout.num_kv_heads;
  }
  // About 10 GB/s of K and V, or 20 G multiply-adds per second.
  const int64_t row_elements = kSplitTokens * params.layout.head_dim;
  const int64_t rows = std::min<int64_t>(kRowBatch, group);
  const int64_t split_ns = row_elements * std::max<int64_t>(4, rows) / 10;
  const bool small =
      chunk_units < 3 * num_workers && num_workers > 1 && split_units * split_ns > 40'000;

  int64_t units = 0;
  int64_t counters = 0;
  int64_t floats = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    const VisibleSplits splits = SplitsOf(params.options, sequence);
    SequencePlan& plan = *new (&sequences_[i]) SequencePlan;
    plan.first_unit = units;
    plan.splits_per_span = small && splits.count() <= kMaxSplitSpans ? 1 : kSplitsPerChunk;
    const int64_t begin = splits.begin / plan.splits_per_span;
    plan.sink_spans = std::min(DivideUp(splits.sink_end, plan.splits_per_span), begin);
    plan.skipped_spans = begin - plan.sink_spans;
    plan.num_spans =
        std::max<int64_t>(DivideUp(splits.end, plan.splits_per_span) - plan.skipped_spans, 1);
    plan.num_row_batches = DivideUp(sequence.query_tokens * group, kRowBatch);
    plan.partial_offset = floats;
    plan.counter_offset = counters;
    const int64_t batches = plan.num_row_batches * params.layout.num_kv_heads;
    units += plan.num_spans * batches;
    if (plan.num_spans > 1) {
      floats += PartialFloats(params, sequence, plan.num_spans);
      for (int64_t j = 0; j < batches; ++j) new (&counters_[counters++]) std::atomic<uint32_t>(0);
    }
  }
  unit_ns_ = std::max<int64_t>(split_units * split_ns / std::max<int64_t>(units, 1), 200);
  return units;
}

AttendUnit AttendPlan::unit(const AttendParams& params, int64_t index) const {
  const SequencePlan* plan =
      std::upper_bound(sequences_, sequences_ + params.num_sequences, index,
                       [](int64_t i, const SequencePlan& p) { return i < p.first_unit; }) -
      1;
  AttendUnit unit;
  unit.sequence = plan - sequences_;
  int64_t rest = index - plan->first_unit;
  unit.kv_head = static_cast<int>(rest % params.layout.num_kv_heads);
  rest /= params.layout.num_kv_heads;
  unit.row_batch = static_cast<int>(rest % plan->num_row_batches);
  unit.span = rest / plan->num_row_batches;
  const int64_t place = unit.span + (unit.span >= plan->sink_spans ? plan->skipped_spans : 0);
  unit.first_split = place * plan->splits_per_span;
  unit.end_split = std::min(unit.first_split + plan->splits_per_span,
                            DivideUp(params.sequences[unit.sequence].context_tokens, kSplitTokens));
  return unit;
}

float* AttendPlan::partial(const AttendParams& params, const AttendUnit& unit, int64_t span) const {
  const SequencePlan& plan = sequences_[unit.sequence];
  const int64_t group = params.num_query_heads / params.layout.num_kv_heads;
  const int64_t rows = params.sequences[unit.sequence].query_tokens * group;
  const int64_t row =
      (span * params.layout.num_kv_heads + unit.kv_head) * rows + unit.row_batch * kRowBatch;
  return partials_ + plan.partial_offset + row * StateFloats(params.layout.head_dim);
}

bool AttendPlan::LastToFinish(const AttendParams& params, const AttendUnit& unit) const {
  const SequencePlan& plan = sequences_[unit.sequence];
  std::atomic<uint32_t>& counter =
      counters_[plan.counter_offset + unit.row_batch * params.layout.num_kv_heads + unit.kv_head];
  return counter.fetch_add(1, std::memory_order_acq_rel) + 1 == plan.num_spans;
}

}  // namespace sluice
