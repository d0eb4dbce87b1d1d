// The CPU device, once for each instruction set that this machine has.

#include <cctype>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/instruction_set.h"
#include "tests/conformance/device_factory.h"

namespace sluice {

std::vector<DeviceFactory> DeviceFactories() {
  std::vector<DeviceFactory> factories;
  for (const int64_t target : CpuInstructionSets()) {
    ForceCpuInstructionSetForTest(target);
    DeviceFactory factory;
    factory.name = "cpu_" + CpuInstructionSet();
    factory.thorough = factories.empty();
    factory.f32_tolerance = 1e-4;
    factory.create = [target](int num_workers) {
      ForceCpuInstructionSetForTest(target);
      absl::StatusOr<std::unique_ptr<Device>> device =
          CreateCpuDevice({.num_threads = num_workers > 0 ? num_workers : 2});
      EXPECT_TRUE(device.ok()) << device.status();
      return *std::move(device);
    };
    factories.push_back(std::move(factory));
  }
  ForceCpuInstructionSetForTest(0);
  return factories;
}

}  // namespace sluice
