// The operations seam on the CPU: checks the params and submits them to the stream's strand.

#ifndef KERNELS_CPU_CPU_OPS_H_
#define KERNELS_CPU_CPU_OPS_H_

#include "kernels/ops/ops.h"

namespace sluice {

class CpuOps final : public Ops {
 public:
  StreamPosition StoreTokens(const TokenCopyParams& params, Stream& stream) override;
  StreamPosition GatherTokens(const TokenCopyParams& params, Stream& stream) override;
  StreamPosition CopyBytes(const ByteCopyParams& params, Stream& stream) override;
  StreamPosition ProjectKeys(const ProjectKeysParams& params, Stream& stream) override;
  int64_t ScoreWorkspaceBytes(const ScoreParams& params) const override;
  StreamPosition ScoreBlocks(const ScoreParams& params, Stream& stream) override;
  int64_t AttendWorkspaceBytes(const AttendParams& params) const override;
  StreamPosition Attend(const AttendParams& params, Stream& stream) override;
  StreamPosition BeginStates(const BeginParams& params, Stream& stream) override;
  StreamPosition MergeStates(const MergeParams& params, Stream& stream) override;
  StreamPosition FinalizeStates(const FinalizeParams& params, Stream& stream) override;
};

}  // namespace sluice

#endif  // KERNELS_CPU_CPU_OPS_H_
