// CUDA's errors: the one place where they become absl::Status, and what happens to one that cannot
// be answered.

#ifndef KERNELS_CUDA_ERROR_H_
#define KERNELS_CUDA_ERROR_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

#include "absl/status/status.h"

namespace sluice::cuda {

// Out of memory is RESOURCE_EXHAUSTED, no usable GPU UNAVAILABLE, anything else INTERNAL.
[[nodiscard]] absl::Status ToStatus(cudaError_t error, const char* what);
[[nodiscard]] absl::Status ToStatus(CUresult result, const char* what);

// Who is told of a fatal error before the process ends. Set while no work runs.
void SetFatalHandler(std::function<void(const absl::Status&)> handler);

// Ends the process, saying where.
[[noreturn]] void Fatal(const absl::Status& status, const char* file, int line);

}  // namespace sluice::cuda

// For what fails only when the GPU, the driver or this program is broken.
#define SLUICE_CUDA_CHECK(expression)                                                            \
  do {                                                                                           \
    const auto sluice_cuda_result = (expression);                                                \
    if (static_cast<int>(sluice_cuda_result) != 0) {                                             \
      ::sluice::cuda::Fatal(::sluice::cuda::ToStatus(sluice_cuda_result, #expression), __FILE__, \
                            __LINE__);                                                           \
    }                                                                                            \
  } while (false)

#endif  // KERNELS_CUDA_ERROR_H_
