// StoreTokens and GatherTokens. Bytes: each row once read and once written.

#include "kernels/cpu/copy.h"

#include <algorithm>
#include <cstring>

namespace sluice {
namespace {

// What a worker moves before it looks for more urgent work: some 20 us.
constexpr int64_t kPieceBytes = 128 << 10;

}  // namespace

PhaseSize CopyOp::Start(int, int) {
  int64_t max_tokens = 0;
  for (int64_t i = 0; i < params.num_copies; ++i) {
    const TokenCopy& copy = params.copies[i];
    max_tokens = std::max<int64_t>(max_tokens, copy.num_tokens + copy.zero_tokens);
  }
  if (max_tokens == 0) return {0, 1};
  const KvLayout& layout = params.layout;
  const int64_t token_bytes = 2 * layout.num_kv_heads * layout.head_dim * DTypeBytes(layout.dtype);
  tokens_per_piece = std::clamp<int64_t>(kPieceBytes / token_bytes, 1, max_tokens);
  pieces_per_copy = (max_tokens + tokens_per_piece - 1) / tokens_per_piece;
  return {params.num_copies * pieces_per_copy,
          std::max<int64_t>(1, kPieceBytes / (tokens_per_piece * token_bytes))};
}

void CopyOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  const KvLayout& layout = params.layout;
  const int64_t row_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  const int64_t wire_token_bytes = layout.num_kv_heads * row_bytes;
  for (int64_t unit = begin; unit < end; ++unit) {
    const TokenCopy& copy = params.copies[unit / pieces_per_copy];
    const int64_t first = unit % pieces_per_copy * tokens_per_piece;
    const int64_t last =
        std::min<int64_t>(first + tokens_per_piece, copy.num_tokens + copy.zero_tokens);
    for (int v = 0; v < 2; ++v) {
      std::byte* wire = v == 0 ? copy.k : copy.v;
      std::byte* block =
          copy.block + v * layout.v_offset_bytes + copy.first_token * layout.token_stride_bytes;
      for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
        for (int64_t t = first; t < last; ++t) {
          std::byte* in_wire = wire + t * wire_token_bytes + head * row_bytes;
          std::byte* in_block =
              block + t * layout.token_stride_bytes + head * layout.kv_head_stride_bytes;
          if (t >= copy.num_tokens) {
            std::memset(store ? in_block : in_wire, 0, row_bytes);
          } else if (store) {
            std::memcpy(in_block, in_wire, row_bytes);
          } else {
            std::memcpy(in_wire, in_block, row_bytes);
          }
        }
      }
    }
  }
}

PhaseSize ByteCopyOp::Start(int, int) {
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < params.num_copies; ++i) total_bytes += params.copies[i].bytes;
  const int64_t mean_bytes =
      std::max<int64_t>(1, total_bytes / std::max<int64_t>(1, params.num_copies));
  return {params.num_copies, std::max<int64_t>(1, kPieceBytes / mean_bytes)};
}

void ByteCopyOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const ByteCopy& copy = params.copies[unit];
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

}  // namespace sluice
