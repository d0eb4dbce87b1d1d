// The session's tests on the CUDA device of this machine. A machine without one is no place for
// them.

#include <cstdlib>
#include <iostream>

#include "kernels/cuda/cuda_device.h"
#include "tests/base/test_device.h"

namespace sluice {
namespace {

[[maybe_unused]] const TestDeviceFactory factory = test_device_factory = [](int num_threads) {
  CudaDeviceOptions options;
  options.num_completion_threads = num_threads;
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(options);
  if (!device.ok()) {
    std::cerr << device.status() << "\n";
    std::exit(1);
  }
  return *std::move(device);
};

}  // namespace
}  // namespace sluice
