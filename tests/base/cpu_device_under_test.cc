#include "kernels/cpu/cpu_device.h"
#include "tests/base/device_under_test.h"

namespace sluice {

std::unique_ptr<Device> CreateDeviceUnderTest(int num_threads) {
  return *CreateCpuDevice({.num_threads = num_threads});
}

}  // namespace sluice
