#include "kernels/cpu/cpu_ops.h"

#include "kernels/cpu/attend.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/project.h"
#include "kernels/cpu/score.h"
#include "kernels/cpu/state_ops.h"

namespace sluice {
namespace {

void CheckHeadDim(int head_dim) {
  SLUICE_CHECK(head_dim >= 8 && head_dim <= kMaxHeadDim && head_dim % 8 == 0);
}

void CheckLayout(const KvLayout& layout) {
  SLUICE_CHECK(layout.dtype == DType::kBf16 || layout.dtype == DType::kFp16);
  SLUICE_CHECK(layout.num_kv_heads > 0);
  SLUICE_CHECK(layout.block_tokens > 0 && layout.block_tokens <= kMaxBlockTokens);
  CheckHeadDim(layout.head_dim);
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

}  // namespace

StreamPosition CpuOps::StoreTokens(const TokenCopyParams& params, Stream& stream) {
  CheckCopies(params);
  return CpuStream::From(stream).Submit(CopyOp{params, true});
}

StreamPosition CpuOps::GatherTokens(const TokenCopyParams& params, Stream& stream) {
  CheckCopies(params);
  return CpuStream::From(stream).Submit(CopyOp{params, false});
}

StreamPosition CpuOps::CopyBytes(const ByteCopyParams& params, Stream& stream) {
  return CpuStream::From(stream).Submit(ByteCopyOp{params});
}

StreamPosition CpuOps::ProjectKeys(const ProjectKeysParams& params, Stream& stream) {
  CheckLayout(params.layout);
  SLUICE_CHECK(params.rank > 0 && params.rank <= kMaxRank);
  for (int64_t i = 0; i < params.num_blocks; ++i) {
    const ProjectBlock& block = params.blocks[i];
    SLUICE_CHECK(block.first_token >= 0 && block.num_tokens >= 0 &&
                 block.first_token + block.num_tokens <= params.layout.block_tokens);
  }
  return CpuStream::From(stream).Submit(ProjectKeysOp{params});
}

int64_t CpuOps::ScoreWorkspaceBytes(const ScoreParams& params) const {
  return ScoreWorkspace::Bytes(params);
}

StreamPosition CpuOps::ScoreBlocks(const ScoreParams& params, Stream& stream) {
  CheckScore(params);
  return CpuStream::From(stream).Submit(ScoreOp{params});
}

int64_t CpuOps::AttendWorkspaceBytes(const AttendParams& params) const {
  return AttendPlan::WorkspaceBytes(params);
}

StreamPosition CpuOps::Attend(const AttendParams& params, Stream& stream) {
  CheckAttend(params);
  return CpuStream::From(stream).Submit(AttendOp{params, AttendPlan()});
}

StreamPosition CpuOps::BeginStates(const BeginParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  return CpuStream::From(stream).Submit(BeginOp{params});
}

StreamPosition CpuOps::MergeStates(const MergeParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  return CpuStream::From(stream).Submit(MergeOp{params});
}

StreamPosition CpuOps::FinalizeStates(const FinalizeParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  return CpuStream::From(stream).Submit(FinalizeOp{params});
}

}  // namespace sluice
