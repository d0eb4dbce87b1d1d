// A build without CUDA: no compiler was found for it.

#include "kernels/cuda/cuda_device.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const CudaDeviceOptions&) {
  return absl::UnavailableError("this program was built without CUDA");
}

}  // namespace sluice
