// The CUDA device: both kernel seams on one GPU. This header names nothing of CUDA's, and the
// function is there in a build without CUDA too.
//
//   absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice({});
//   if (absl::IsUnavailable(device.status())) ...  // no GPU, no driver, or a build without CUDA

#ifndef KERNELS_CUDA_CUDA_DEVICE_H_
#define KERNELS_CUDA_CUDA_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace sluice {

struct CudaDeviceOptions {
  // GPU memory that Commit may take in all; 0: 90 % of what is free at start.
  int64_t hbm_budget_bytes = 0;
  // Threads that run host tasks; at least 1. Where one is held up, others go on.
  int num_completion_threads = 2;
  // Told once of the error after which nothing works any more (Device::status), with the place in
  // the source that saw it; by any thread, whatever locks it holds: it must be short, must not
  // block and must not call the device. Where it is not given, the process ends with 70.
  std::function<void(const absl::Status&)> on_fatal;
};

// The first GPU that CUDA_VISIBLE_DEVICES leaves. UNAVAILABLE where there is none that can be used,
// or where it has failed in this process. At most one device is alive at a time.
[[nodiscard]] absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(
    const CudaDeviceOptions& options);

}  // namespace sluice

#endif  // KERNELS_CUDA_CUDA_DEVICE_H_
