// The CUDA device of this machine. A machine without one is no place for this test.

#include <cstdlib>
#include <iostream>

#include "kernels/cuda/cuda_device.h"
#include "tests/conformance/device_factory.h"

namespace sluice {

std::vector<DeviceFactory> DeviceFactories() {
  DeviceFactory factory;
  factory.name = "cuda";
  factory.f32_tolerance = 2e-4;
  factory.create = [](int) {
    absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice({});
    if (!device.ok()) {
      std::cerr << device.status() << "\n";
      std::exit(1);
    }
    return *std::move(device);
  };
  return {factory};
}

}  // namespace sluice
