#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendFp16x2(const AttendKernelArgs& args, cudaStream_t stream) {
  return LaunchAttendHeadDim<__half, 2>(args, stream);
}

}  // namespace sluice::cuda
