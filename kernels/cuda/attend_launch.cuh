// Dispatch over head_dim for one dtype and number of row pieces.

#ifndef KERNELS_CUDA_ATTEND_LAUNCH_CUH_
#define KERNELS_CUDA_ATTEND_LAUNCH_CUH_

#include <algorithm>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/attend_kernels.h"

namespace sluice::cuda {

template <typename T, int kPad, int kPieces>
cudaError_t LaunchAttendShape(const AttendKernelArgs& args, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(AttendShared<kPad, kPieces>));
  // No more shared memory than is used: what is left is L1, which loads on their way go through.
  static const cudaError_t set = [] {
    const auto kernel = AttendKernel<T, kPad, kPieces>;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    int bytes = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
    }
    if (error != cudaSuccess) return error;
    const int wanted = AttendShape<kPad, kPieces>::kBlocksPerSm * (kSharedBytes + 1024);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                std::min(100, (100 * wanted + bytes - 1) / bytes));
  }();
  if (set != cudaSuccess) return set;
  AttendKernel<T, kPad, kPieces>
      <<<args.num_teams * args.team_blocks, kAttendThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, int kPieces>
cudaError_t LaunchAttendHeadDim(const AttendKernelArgs& args, cudaStream_t stream) {
  switch ((args.head_dim + 31) / 32) {
    case 1:
      return LaunchAttendShape<T, 32, kPieces>(args, stream);
    case 2:
      return LaunchAttendShape<T, 64, kPieces>(args, stream);
    case 3:
      return LaunchAttendShape<T, 96, kPieces>(args, stream);
    case 4:
      return LaunchAttendShape<T, 128, kPieces>(args, stream);
    default:
      break;
  }
  if constexpr (kPieces == 1) {
    switch ((args.head_dim + 31) / 32) {
      case 5:
        return LaunchAttendShape<T, 160, 1>(args, stream);
      case 6:
        return LaunchAttendShape<T, 192, 1>(args, stream);
      case 7:
        return LaunchAttendShape<T, 224, 1>(args, stream);
      case 8:
        return LaunchAttendShape<T, 256, 1>(args, stream);
      default:
        break;
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_LAUNCH_CUH_
