#include "kernels/cpu/cpu_ops.h"

#include "kernels/cpu/attend.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/project.h"
#include "kernels/cpu/score.h"
#include "kernels/cpu/state_ops.h"
#include "kernels/ops/check_params.h"

namespace sluice {

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
  CheckProjectKeys(params);
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
