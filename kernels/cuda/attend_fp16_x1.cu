#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendFp16x1(const AttendKernelArgs& args, cudaStream_t stream) {
  return LaunchAttendHeadDim<__half, 1>(args, stream);
}

}  // namespace sluice::cuda
