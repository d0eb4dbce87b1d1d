// Launchers of the attention kernel, which is compiled in several files, one for each pair of dtype
// and number of row pieces.

#ifndef KERNELS_CUDA_ATTEND_KERNELS_H_
#define KERNELS_CUDA_ATTEND_KERNELS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend_args.h"

namespace sluice::cuda {

// Query rows of a kv head that one entry takes: 16 where they are more than 8 and registers allow.
inline constexpr int kMaxPiecesHeadDim = 128;
inline int PiecesOf(int head_dim, int64_t max_rows) {
  return head_dim <= kMaxPiecesHeadDim && max_rows > 8 ? 2 : 1;
}

// Blocks of threads that a multiprocessor holds.
inline constexpr int kTwoBlocksHeadDim = 64;
inline int BlocksPerSm(int head_dim) { return head_dim <= kTwoBlocksHeadDim ? 2 : 1; }

// Each launches args.num_teams teams.
cudaError_t LaunchAttendBf16x1(const AttendKernelArgs& args, cudaStream_t stream);
cudaError_t LaunchAttendBf16x2(const AttendKernelArgs& args, cudaStream_t stream);
cudaError_t LaunchAttendFp16x1(const AttendKernelArgs& args, cudaStream_t stream);
cudaError_t LaunchAttendFp16x2(const AttendKernelArgs& args, cudaStream_t stream);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_KERNELS_H_
