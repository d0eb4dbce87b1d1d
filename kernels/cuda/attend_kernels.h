// Launchers of the attention kernels. The kernels are compiled in several files, one for each pair
// of dtype and number of row pieces.

#ifndef KERNELS_CUDA_ATTEND_KERNELS_H_
#define KERNELS_CUDA_ATTEND_KERNELS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend_args.h"

namespace sluice::cuda {

// Query rows of a kv head that one unit takes: 16 where they are more than 8 and registers allow.
inline constexpr int kMaxPiecesHeadDim = 128;
inline int PiecesOf(int head_dim, int64_t max_rows) {
  return head_dim <= kMaxPiecesHeadDim && max_rows > 8 ? 2 : 1;
}

// Launches over args.num_units x num_kv_heads units on `num_sms` multiprocessors. Fills in what
// depends on the instantiation (num_stages, warp_bytes).
cudaError_t LaunchAttend(AttendKernelArgs& args, int pieces, int num_sms, cudaStream_t stream);
// Merges parts into outputs or running states: args.num_merges sequences of at most
// max_query_tokens.
cudaError_t LaunchAttendMerge(const AttendKernelArgs& args, int max_query_tokens,
                              cudaStream_t stream);

// One file each.
cudaError_t LaunchAttendBf16x1(AttendKernelArgs& args, int num_sms, cudaStream_t stream);
cudaError_t LaunchAttendBf16x2(AttendKernelArgs& args, int num_sms, cudaStream_t stream);
cudaError_t LaunchAttendFp16x1(AttendKernelArgs& args, int num_sms, cudaStream_t stream);
cudaError_t LaunchAttendFp16x2(AttendKernelArgs& args, int num_sms, cudaStream_t stream);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_KERNELS_H_
