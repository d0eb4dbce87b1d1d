// How one Attend call is cut into units, and where its workspace keeps what.
//
// A sequence's visible splits are gathered into spans: chunks, or single splits where the call is
// too small to keep the workers busy otherwise. A unit is (sequence, span, row batch, kv head). A
// sequence with one span goes straight to its result; with more, each unit leaves a partial state
// in the workspace and the last unit of a (row batch, kv head) merges them in the order of
// positions. Which of the two it is never shows in the result: splits always fold into chunks
// first.
//
// A "row" here is one query head of one query token; the rows of a kv head stand query token by
// query token, the heads of the group side by side, and are computed kRowBatch at a time.

#ifndef KERNELS_CPU_ATTEND_PLAN_H_
#define KERNELS_CPU_ATTEND_PLAN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/ops/params.h"

namespace sluice {

inline constexpr int64_t kSplitsPerChunk = kChunkTokens / kSplitTokens;
inline constexpr int kRowBatch = 64;
// Sequences with at most this many visible splits may be cut into single splits.
inline constexpr int64_t kMaxSplitSpans = 16;
// Floats before o in a partial state: m, l, and room that keeps o aligned.
inline constexpr int kStateHeader = 16;
inline constexpr int StateFloats(int head_dim) { return kStateHeader + (head_dim + 31) / 32 * 32; }

// Positions [begin, end).
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return end <= begin; }
};
// The positions that one query token sees: at most two ranges, in order, not touching.
struct VisibleTokens {
  TokenRange sinks;
  TokenRange recent;
};
VisibleTokens VisibleTo(const AttendOptions& options, const AttendSequence& sequence,
                        int query_token);

struct SequencePlan {
  int64_t first_unit;
  int64_t splits_per_span;  // 1 or kSplitsPerChunk
  int64_t sink_spans;       // spans [0, sink_spans) start at position 0 ...
  int64_t skipped_spans;    // ... the others this many spans further on
  int64_t num_spans;        // at least 1; a span may hold nothing that is visible
  int64_t num_row_batches;
  int64_t partial_offset;  // floats, from the workspace's partial states
  int64_t counter_offset;
};

struct AttendUnit {
  int64_t sequence;
  int64_t span;
  int64_t first_split;  // absolute; [first_split, end_split)
  int64_t end_split;
  int row_batch;
  int kv_head;
};

class AttendPlan {
 public:
  static int64_t WorkspaceBytes(const AttendParams& params);

  AttendPlan() = default;
  explicit AttendPlan(const AttendParams& params);

  // Lays out the call in its workspace. Returns the number of units.
  int64_t Build(const AttendParams& params, int num_workers);
  // About how long one unit takes.
  int64_t unit_ns() const { return unit_ns_; }

  const SequencePlan& sequence(int64_t i) const { return sequences_[i]; }
  AttendUnit unit(const AttendParams& params, int64_t index) const;
  // Partial state of a unit, [rows of the batch][StateFloats(head_dim)].
  float* partial(const AttendParams& params, const AttendUnit& unit, int64_t span) const;
  // True for the caller that is the last of the unit's (row batch, kv head).
  bool LastToFinish(const AttendParams& params, const AttendUnit& unit) const;

 private:
  SequencePlan* sequences_ = nullptr;
  std::atomic<uint32_t>* counters_ = nullptr;
  float* partials_ = nullptr;
  int64_t unit_ns_ = 0;
};

}  // namespace sluice

#endif  // KERNELS_CPU_ATTEND_PLAN_H_
