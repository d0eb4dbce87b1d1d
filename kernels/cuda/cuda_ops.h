// Seam 2 on the GPU: checks, packs what kernels read into memory of theirs, launches.

#ifndef KERNELS_CUDA_CUDA_OPS_H_
#define KERNELS_CUDA_CUDA_OPS_H_

#include "kernels/ops/ops.h"

namespace sluice::cuda {

class CudaOps final : public Ops {
 public:
  explicit CudaOps(int num_sms) : num_sms_(num_sms) {}

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

 private:
  const int num_sms_;
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_CUDA_OPS_H_
