// Dispatch over head_dim for one dtype and number of row pieces.

#ifndef KERNELS_CUDA_ATTEND_LAUNCH_CUH_
#define KERNELS_CUDA_ATTEND_LAUNCH_CUH_

#include <algorithm>

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/attend_kernels.h"

namespace sluice::cuda {

template <typename T, int kPad, int kPieces>
cudaError_t LaunchAttendShape(AttendKernelArgs& args, int num_sms, cudaStream_t stream) {
  using Memory = WarpMemory<kPad, kPieces>;
  static const int shared_limit = [] {
    int bytes = 0;
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) != cudaSuccess) {
      return 0;
    }
    const cudaError_t set = cudaFuncSetAttribute(
        AttendKernel<T, kPad, kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return set == cudaSuccess ? bytes : 0;
  }();
  if (shared_limit == 0) return cudaErrorInvalidConfiguration;
  // Few units: fewer warps, each with a deeper ring.
  const int64_t units = static_cast<int64_t>(args.num_units) * args.num_kv_heads;
  int warps = kMaxWarps;
  while (warps > 1 && (warps / 2 * num_sms >= units || Memory::Bytes(1) * warps > shared_limit)) {
    warps /= 2;
  }
  const int warp_limit = shared_limit / warps / 128 * 128;
  args.num_stages = std::min(
      kMaxStages, (warp_limit - Memory::Bytes(0)) / AttendShape<kPad, kPieces>::kStageBytes);
  args.warp_bytes = (Memory::Bytes(args.num_stages) + 127) / 128 * 128;
  const int blocks = static_cast<int>(std::min<int64_t>(num_sms, (units + warps - 1) / warps));
  AttendKernel<T, kPad, kPieces><<<blocks, 32 * warps, args.warp_bytes * warps, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, int kPieces>
cudaError_t LaunchAttendHeadDim(AttendKernelArgs& args, int num_sms, cudaStream_t stream) {
  switch ((args.head_dim + 31) / 32) {
    case 1:
      return LaunchAttendShape<T, 32, kPieces>(args, num_sms, stream);
    case 2:
      return LaunchAttendShape<T, 64, kPieces>(args, num_sms, stream);
    case 3:
      return LaunchAttendShape<T, 96, kPieces>(args, num_sms, stream);
    case 4:
      return LaunchAttendShape<T, 128, kPieces>(args, num_sms, stream);
    default:
      break;
  }
  if constexpr (kPieces == 1) {
    switch ((args.head_dim + 31) / 32) {
      case 5:
        return LaunchAttendShape<T, 160, 1>(args, num_sms, stream);
      case 6:
        return LaunchAttendShape<T, 192, 1>(args, num_sms, stream);
      case 7:
        return LaunchAttendShape<T, 224, 1>(args, num_sms, stream);
      case 8:
        return LaunchAttendShape<T, 256, 1>(args, num_sms, stream);
      default:
        break;
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_LAUNCH_CUH_
