// Plain parameters of the operations in ops.h: shapes, strides, addresses, options.
//
// Everything here is trivially copyable. Pointers are not owned: what they point to must stay valid
// and unchanged (inputs) or untouched (outputs) until the operation has completed on its stream.
// All addresses are ones that the device can read and write; products of shape terms are int64_t.

#ifndef KERNELS_OPS_PARAMS_H_
#define KERNELS_OPS_PARAMS_H_

#include <cstddef>
#include <cstdint>

namespace sluice {

// Attention is computed in splits of this many tokens at fixed positions of the sequence; splits
// fold in order into chunks, chunks in order into the sequence. The bits of an output depend on
// these two numbers and never on the batch, on query_tokens or on the number of workers.
inline constexpr int64_t kSplitTokens = 256;
inline constexpr int64_t kChunkTokens = 2048;

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxRank = 128;
inline constexpr int kMaxBlockTokens = 256;
inline constexpr int kMaxQueryTokens = 64;

enum class DType : uint8_t { kBf16, kFp16, kF32 };
inline constexpr int64_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// How K and V of a block lie in memory. The address of (token, kv_head, 0) of K of a block is
//   block address + token * token_stride_bytes + kv_head * kv_head_stride_bytes,
// and V's is v_offset_bytes further. head_dim is contiguous.
struct KvLayout {
  DType dtype = DType::kBf16;  // kBf16 or kFp16
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
  int64_t token_stride_bytes = 0;
  int64_t kv_head_stride_bytes = 0;
  int64_t v_offset_bytes = 0;
};

// A slot: [K or V, kv_head, token, head_dim], contiguous.
inline constexpr int64_t SlotBytes(DType dtype, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t block_tokens) {
  return 2 * num_kv_heads * block_tokens * head_dim * DTypeBytes(dtype);
}
inline constexpr KvLayout SlotLayout(DType dtype, int32_t num_kv_heads, int32_t head_dim,
                                     int32_t block_tokens) {
  const int64_t row_bytes = head_dim * DTypeBytes(dtype);
  return {dtype,
          num_kv_heads,
          head_dim,
          block_tokens,
          row_bytes,
          block_tokens * row_bytes,
          SlotBytes(dtype, num_kv_heads, head_dim, block_tokens) / 2};
}
// A paged pool [block, token, kv_head, head_dim] with K and V in two pools of equal shape;
// v_offset_bytes is the distance from the K pool to the V pool.
inline constexpr KvLayout PagedLayout(DType dtype, int32_t num_kv_heads, int32_t head_dim,
                                      int32_t block_tokens, int64_t v_offset_bytes) {
  const int64_t row_bytes = head_dim * DTypeBytes(dtype);
  return {dtype,     num_kv_heads,  head_dim, block_tokens, num_kv_heads * row_bytes,
          row_bytes, v_offset_bytes};
}

// Tokens that go from wire layout [token, kv_head, head_dim] (contiguous) into a block, or back.
struct TokenCopy {
  std::byte* block = nullptr;  // the block's address, as KvLayout reads it
  std::byte* k = nullptr;      // wire K of the first token copied; read by StoreTokens
  std::byte* v = nullptr;      // wire V, likewise
  int32_t first_token = 0;     // within the block
  int32_t num_tokens = 0;      // tokens copied
  int32_t zero_tokens = 0;  // tokens after those that are set to zero where they would be written
};
struct TokenCopyParams {
  KvLayout layout;
  const TokenCopy* copies = nullptr;
  int64_t num_copies = 0;
};

// Bytes as they are, from anywhere to anywhere that the device can address.
struct ByteCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;
};
struct ByteCopyParams {
  const ByteCopy* copies = nullptr;
  int64_t num_copies = 0;
};

// A_g = K P for some tokens of a block. A_g of a block is [kv_head, token, rank] BF16.
struct ProjectBlock {
  const std::byte* block = nullptr;  // K as KvLayout reads it
  std::byte* projected = nullptr;    // the block's A_g, start of [kv_head, token, rank]
  int32_t first_token = 0;
  int32_t num_tokens = 0;
};
struct ProjectKeysParams {
  KvLayout layout;
  int32_t rank = 0;
  // P, [head_dim, rank] BF16; a stride of 0 means one P for all kv heads.
  const std::byte* projection = nullptr;
  int64_t projection_kv_head_stride_bytes = 0;
  const ProjectBlock* blocks = nullptr;
  int64_t num_blocks = 0;
};

enum class ScoreKind : uint8_t {
  kMaxDot,  // max over query heads and tokens of q'.k' (not scaled)
  kMass,    // mean over query heads of softmax(scale q'.k') mass of the block's tokens, over all
            // predicted blocks of the call
};
struct ScoreBlock {
  const std::byte* projected = nullptr;  // A_g of the block; null: not predicted
  int32_t valid_tokens = 0;              // 1..block_tokens where predicted
};
struct ScoreParams {
  ScoreKind kind = ScoreKind::kMaxDot;
  DType q_dtype = DType::kBf16;
  int32_t num_query_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
  int32_t rank = 0;
  float scale = 0;                        // kMass only
  const std::byte* projection = nullptr;  // as in ProjectKeysParams
  int64_t projection_kv_head_stride_bytes = 0;
  const std::byte* q = nullptr;  // [num_query_heads, head_dim]
  const ScoreBlock* blocks = nullptr;
  int64_t num_blocks = 0;
  float* scores = nullptr;  // out [num_blocks]; -infinity where not predicted
  // Out, optional: positions (into blocks) of the best top_k, best first; ties by lower position;
  // blocks that are not predicted come last, in order. top_k <= num_blocks.
  int64_t* top = nullptr;
  int64_t top_k = 0;
  std::byte* workspace = nullptr;  // Ops::ScoreWorkspaceBytes(params)
};

struct AttendOptions {
  float scale = 0;  // s = scale q.k
  // 0: none; else s = cap tanh(s / cap), after the scale.
  float logit_softcap = 0;
  // 0: none; else a query at position p sees only positions > p - window_tokens ...
  int64_t window_tokens = 0;
  // ... and, with a window, positions < sink_tokens.
  int64_t sink_tokens = 0;
  // [num_query_heads] or null: one more logit in the denominator, in `out` and `lse` only.
  const float* sink_logits = nullptr;
};

// One sequence of a call. The last query token sits at position context_tokens - 1, its
// predecessors just before it; each sees the positions up to its own.
struct AttendSequence {
  // Addresses of blocks 0, 1, ... of the sequence. An entry whose tokens no query token sees (out
  // of the window) is not read.
  const std::byte* const* blocks = nullptr;
  int64_t context_tokens = 0;  // >= query_tokens, or 0: an empty context
  int64_t first_row = 0;       // row of its first query token in q and the outputs
  int32_t query_tokens = 0;    // 1..64
  // false (tiles): every query token stands at position context_tokens - 1 and sees all before it.
  bool causal = true;
  // How many of the blocks lie in host memory, where the caller knows: a hint that decides who
  // computes what and when, never a bit.
  int64_t host_blocks = 0;
};

// (m, l, o): max logit, sum of exponentials, unnormalised output, FP32, per row and query head.
// Empty is (-infinity, 0, 0).
struct RunningState {
  float* m = nullptr;  // [rows, num_query_heads]
  float* l = nullptr;  // [rows, num_query_heads]
  float* o = nullptr;  // [rows, num_query_heads, head_dim]
};

struct AttendParams {
  KvLayout layout;
  AttendOptions options;
  int32_t num_query_heads = 0;
  const AttendSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  int64_t num_rows = 0;          // rows of q: the sum of query_tokens
  const std::byte* q = nullptr;  // [rows, num_query_heads, head_dim], layout.dtype
  // Exactly one of `state` and `out` is given.
  // state: the context is folded into the running state, chunk by chunk, in order. So calls over
  // consecutive parts of a context that end on chunk borders give the bits of one call over it.
  RunningState state;
  // out: [rows, num_query_heads, head_dim] of out_dtype, o / l (0 where l is 0); lse, optional:
  // [rows, num_query_heads], m + ln(l), natural logarithm; sink_logits included. -inf where empty.
  std::byte* out = nullptr;
  DType out_dtype = DType::kBf16;  // layout.dtype or kF32
  float* lse = nullptr;
  std::byte* workspace = nullptr;  // Ops::AttendWorkspaceBytes(params)
};

// Merges `num_parts` running states per row in order into `into` (which takes part as the first).
struct MergeParams {
  int64_t num_rows = 0;
  int32_t num_query_heads = 0;
  int32_t head_dim = 0;
  RunningState into;
  const RunningState* parts = nullptr;
  int64_t num_parts = 0;
};
struct FinalizeParams {
  int64_t num_rows = 0;
  int32_t num_query_heads = 0;
  int32_t head_dim = 0;
  RunningState state;                  // not changed
  const float* sink_logits = nullptr;  // as in AttendOptions
  std::byte* out = nullptr;
  DType out_dtype = DType::kBf16;
  float* lse = nullptr;  // optional
};
struct BeginParams {  // sets (m, l, o) = (-inf, 0, 0)
  int64_t num_rows = 0;
  int32_t num_query_heads = 0;
  int32_t head_dim = 0;
  RunningState state;
};

}  // namespace sluice

#endif  // KERNELS_OPS_PARAMS_H_
