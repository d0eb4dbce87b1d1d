// What the host tells the attention kernels: plain data, no CUDA.
//
// On this device a split is 128 tokens; 8 splits fold in order into a span, 2 spans into a chunk
// (kChunkTokens), chunks into the sequence.
//
// A call is cut into units: a row batch of one sequence times a part, which is a span, or a single
// split where the call has too few spans to fill the device; each is computed for every kv head. A
// sequence with one part goes straight to its output; with more, every unit leaves a state (m, l,
// o) in the workspace and a second kernel merges them in the order of positions. Which of the two
// it is never shows in the result.

#ifndef KERNELS_CUDA_ATTEND_ARGS_H_
#define KERNELS_CUDA_ATTEND_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/ops/params.h"

namespace sluice {

inline constexpr int64_t kDeviceSplitTokens = 128;
inline constexpr int kSplitsPerSpan = 8;
inline constexpr int kSpansPerChunk = 2;
static_assert(kDeviceSplitTokens * kSplitsPerSpan * kSpansPerChunk == kChunkTokens);

struct AttendSequenceArgs {
  int64_t table_offset;  // of its block addresses, in bytes from the tables' start
  int64_t context_tokens;
  int64_t first_row;
  int32_t query_tokens;
  int32_t causal;
};

struct AttendUnitArgs {
  int64_t first_state;  // the part's, of query token 0 and query head 0; -1: straight to the output
  int32_t sequence;
  int32_t first_split;
  int32_t num_splits;
  int32_t first_row;  // among the sequence's query_tokens x group rows of a kv head
};

struct AttendMergeArgs {
  int64_t first_state;
  int64_t first_row;
  int32_t query_tokens;
  int32_t num_parts;
  int32_t splits_per_part;  // 1 or kSplitsPerSpan
  int32_t sink_parts;       // parts [0, sink_parts) start at position 0 ...
  int32_t skipped_parts;    // ... the others this many parts further on
  int32_t padding;
};

// The parameters of both kernels. Arrays that are small travel inside; large ones through memory.
inline constexpr int64_t kInlineArgsBytes = 8000;

struct AttendKernelArgs {
  int64_t token_stride_bytes;
  int64_t kv_head_stride_bytes;
  int64_t v_offset_bytes;
  int64_t window_tokens;
  int64_t sink_tokens;
  const std::byte* q;
  std::byte* out;
  float* lse;
  const float* sink_logits;
  RunningState state;
  float* partial_o;         // [state][head_dim]
  float* partial_m_l;       // [state][2]
  const std::byte* arrays;  // null: inline_arrays
  const std::byte* tables;  // null: they follow the arrays, at tables_offset
  int32_t units_offset;
  int32_t merges_offset;  // sequences are at 0
  int32_t tables_offset;
  int32_t num_units;  // times num_kv_heads
  int32_t num_merges;
  int32_t head_dim;
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t group;
  int32_t block_tokens_log2;
  int32_t contiguous;  // steps of tokens lie in one piece of memory
  int32_t num_stages;
  int32_t warp_bytes;  // shared memory of a warp
  float scale;
  float logit_softcap;
  DType dtype;
  DType out_dtype;
  alignas(16) std::byte inline_arrays[kInlineArgsBytes];
};
static_assert(sizeof(AttendKernelArgs) <= 32'764);  // what a kernel may take

}  // namespace sluice

#endif  // KERNELS_CUDA_ATTEND_ARGS_H_
