#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendFp16x1(AttendKernelArgs& args, int num_sms, cudaStream_t stream) {
  return LaunchAttendHeadDim<__half, 1>(args, num_sms, stream);
}

}  // namespace sluice::cuda
