// What the host tells the attention kernel: plain data, no CUDA.
//
// On this device a split is 64 tokens; 8 splits fold in order into a span, 4 spans into a chunk
// (kChunkTokens), chunks into the sequence. A block of threads takes a span at a time, each of its
// warps one of the splits.
//
// A call is a list of entries (the rows of a sequence that fit one tensor-core tile) of parts (a
// span or a chunk each). The list is cut into equal ranges of parts, one for each team of blocks;
// each block of a team takes one kv head, or several. An entry that lies within one team goes
// straight to its output. One that several teams share leaves a state (m, l, o) of every part in
// the workspace, and the last of its blocks folds them in the order of positions. Which of the two
// it is, and where the cuts are, never shows in the result.

#ifndef KERNELS_CUDA_ATTEND_ARGS_H_
#define KERNELS_CUDA_ATTEND_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/ops/params.h"

namespace sluice {

inline constexpr int64_t kDeviceSplitTokens = 64;
inline constexpr int kSplitsPerSpan = 8;
inline constexpr int64_t kSpanTokens = kDeviceSplitTokens * kSplitsPerSpan;
inline constexpr int kSpansPerChunk = 4;
static_assert(kSpanTokens * kSpansPerChunk == kChunkTokens);

// Some rows of a sequence: those that fit one tile. Row r is query token r / group, and query head
// r % group of the kv head's.
struct AttendEntryArgs {
  int64_t table_offset;  // of the block addresses, in bytes from the tables' start
  int64_t context_tokens;
  int64_t first_state;  // where shared: its states are [part][kv_head][row]
  int32_t first_query;  // row of q and out that is query token 0
  int32_t query_tokens;
  int32_t causal;
  int32_t first_row;  // of these rows, among the sequence's query_tokens x group
  int32_t num_rows;
  int32_t num_parts;
  int32_t sink_parts;     // parts [0, sink_parts) start at position 0 ...
  int32_t skipped_parts;  // ... the others this many parts further on
  int32_t num_teams;      // that share it
  int32_t first_counter;  // where shared: of kv head 0, counts the teams that are through
};

// Where a team starts; it ends where the next one starts.
struct AttendTeamArgs {
  int32_t entry;
  int32_t part;
};

// The parameters of the kernel. Arrays that are small travel inside; large ones through memory.
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
  uint32_t* counters;       // 0 before and after the kernel
  const std::byte* arrays;  // null: inline_arrays
  const std::byte* tables;  // null: they follow the arrays, at tables_offset
  int32_t teams_offset;     // entries are at 0
  int32_t tables_offset;
  int32_t num_entries;
  int32_t num_teams;
  int32_t team_blocks;  // blocks of a team: num_kv_heads, or fewer that take several each
  int32_t part_spans;   // 1 or kSpansPerChunk
  int32_t head_dim;
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t group;
  int32_t block_tokens_log2;
  int32_t regular;  // 16 tokens lie in one block, and rows fill the registers of their tile
  float scale;
  float logit_softcap;
  DType dtype;
  DType out_dtype;
  alignas(16) std::byte inline_arrays[kInlineArgsBytes];
};
static_assert(sizeof(AttendKernelArgs) <= 32'764);  // what a kernel may take

}  // namespace sluice

#endif  // KERNELS_CUDA_ATTEND_ARGS_H_
