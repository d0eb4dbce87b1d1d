#include "kernels/ops/check_params.h"

#include "kernels/ops/check.h"

namespace sluice {
namespace {

void CheckLayout(const KvLayout& layout) {
  SLUICE_CHECK(layout.dtype == DType::kBf16 || layout.dtype == DType::kFp16);
  SLUICE_CHECK(layout.num_kv_heads > 0);
  SLUICE_CHECK(layout.block_tokens > 0 && layout.block_tokens <= kMaxBlockTokens);
  CheckHeadDim(layout.head_dim);
}

}  // namespace

void CheckHeadDim(int head_dim) {
  SLUICE_CHECK(head_dim >= 8 && head_dim <= kMaxHeadDim && head_dim % 8 == 0);
}

void CheckCopies(const TokenCopyParams& params) {
  CheckLayout(params.layout);
  for (int64_t i = 0; i < params.num_copies; ++i) {
    const TokenCopy& copy = params.copies[i];
    SLUICE_CHECK(copy.first_token >= 0 && copy.num_tokens >= 0 && copy.zero_tokens >= 0);
    SLUICE_CHECK(copy.first_token + copy.num_tokens + copy.zero_tokens <=
                 params.layout.block_tokens);
  }
}

void CheckProjectKeys(const ProjectKeysParams& params) {
  CheckLayout(params.layout);
  SLUICE_CHECK(params.rank > 0 && params.rank <= kMaxRank);
  for (int64_t i = 0; i < params.num_blocks; ++i) {
    const ProjectBlock& block = params.blocks[i];
    SLUICE_CHECK(block.first_token >= 0 && block.num_tokens >= 0 &&
                 block.first_token + block.num_tokens <= params.layout.block_tokens);
  }
}

void CheckScore(const ScoreParams& params) {
  SLUICE_CHECK(params.num_kv_heads > 0 && params.num_query_heads % params.num_kv_heads == 0);
  SLUICE_CHECK(params.rank > 0 && params.rank <= kMaxRank);
  SLUICE_CHECK(params.block_tokens > 0 && params.block_tokens <= kMaxBlockTokens);
  SLUICE_CHECK(params.top_k >= 0 && params.top_k <= params.num_blocks);
  SLUICE_CHECK(params.num_blocks <= int64_t{1} << 32);
  CheckHeadDim(params.head_dim);
}

void CheckAttend(const AttendParams& params) {
  CheckLayout(params.layout);
  SLUICE_CHECK(params.num_query_heads > 0 &&
               params.num_query_heads % params.layout.num_kv_heads == 0);
  SLUICE_CHECK((params.state.m != nullptr) != (params.out != nullptr));
  SLUICE_CHECK(params.out == nullptr || params.out_dtype == params.layout.dtype ||
               params.out_dtype == DType::kF32);
  SLUICE_CHECK(params.options.window_tokens >= 0 && params.options.sink_tokens >= 0);
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    SLUICE_CHECK(sequence.query_tokens >= 1 && sequence.query_tokens <= kMaxQueryTokens);
    SLUICE_CHECK(sequence.context_tokens >= 0);
    SLUICE_CHECK(sequence.first_row >= 0 &&
                 sequence.first_row + sequence.query_tokens <= params.num_rows);
  }
}

}  // namespace sluice
