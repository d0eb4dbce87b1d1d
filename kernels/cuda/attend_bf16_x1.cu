#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendBf16x1(AttendKernelArgs& args, int num_sms, cudaStream_t stream) {
  return LaunchAttendHeadDim<__nv_bfloat16, 1>(args, num_sms, stream);
}

}  // namespace sluice::cuda
