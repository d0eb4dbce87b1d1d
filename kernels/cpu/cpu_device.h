// The CPU device: both kernel seams on a thread pool of its own, in SIMD through Highway.

#ifndef KERNELS_CPU_CPU_DEVICE_H_
#define KERNELS_CPU_CPU_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace sluice {

struct CpuDeviceOptions {
  int num_threads = 0;  // workers; 0: one a core that the process may use
};

[[nodiscard]] absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(
    const CpuDeviceOptions& options);

}  // namespace sluice

#endif  // KERNELS_CPU_CPU_DEVICE_H_
