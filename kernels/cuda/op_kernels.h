// Launchers of the kernels other than attention. Arrays that the params point to must be readable
// by the GPU; nothing is checked here.

#ifndef KERNELS_CUDA_OP_KERNELS_H_
#define KERNELS_CUDA_OP_KERNELS_H_

#include <cuda_runtime_api.h>

#include "kernels/ops/params.h"

namespace sluice::cuda {

// max_tokens: the most num_tokens + zero_tokens of a copy.
cudaError_t LaunchTokenCopy(const TokenCopyParams& params, int max_tokens, bool store,
                            cudaStream_t stream);
cudaError_t LaunchByteCopy(const ByteCopyParams& params, int64_t max_bytes, cudaStream_t stream);
cudaError_t LaunchProjectKeys(const ProjectKeysParams& params, int max_tokens, cudaStream_t stream);

int64_t ScoreWorkspaceBytes(const ScoreParams& params);
cudaError_t LaunchScore(const ScoreParams& params, cudaStream_t stream);

cudaError_t LaunchBegin(const BeginParams& params, cudaStream_t stream);
cudaError_t LaunchMerge(const MergeParams& params, cudaStream_t stream);
cudaError_t LaunchFinalize(const FinalizeParams& params, cudaStream_t stream);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_OP_KERNELS_H_
