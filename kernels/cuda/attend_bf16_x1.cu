#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendBf16x1(const AttendKernelArgs& args, cudaStream_t stream) {
  return LaunchAttendHeadDim<__nv_bfloat16, 1>(args, stream);
}

}  // namespace sluice::cuda
