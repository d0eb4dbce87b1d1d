#include "kernels/cuda/attend_launch.cuh"

namespace sluice::cuda {

cudaError_t LaunchAttendFp16x2(AttendKernelArgs& args, int num_sms, cudaStream_t stream) {
  return LaunchAttendHeadDim<__half, 2>(args, num_sms, stream);
}

}  // namespace sluice::cuda
