#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/cuda_device.h"
#include "tests/base/device_under_test.h"

namespace sluice {

std::unique_ptr<Device> CreateDeviceUnderTest(int num_threads) {
  CudaDeviceOptions options;
  options.num_completion_threads = num_threads;
  auto device = CreateCudaDevice(options);
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(device);
}

}  // namespace sluice
