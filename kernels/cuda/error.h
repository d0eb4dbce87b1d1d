// CUDA's errors: the one place where they become absl::Status, and the record of the first that
// cannot be answered.
//
//   SLUICE_CUDA_CHECK(cudaMemcpyAsync(...));            // must work
//   SLUICE_RETURN_IF_ERROR(SLUICE_CUDA_TRY(driver().create(...)));  // memory may be out
//
// Threads: everything here is safe to call from any thread.

#ifndef KERNELS_CUDA_ERROR_H_
#define KERNELS_CUDA_ERROR_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

#include "absl/status/status.h"
#include "kernels/device/failure.h"

namespace sluice::cuda {

// Out of memory is RESOURCE_EXHAUSTED, no usable GPU UNAVAILABLE, anything else INTERNAL.
[[nodiscard]] absl::Status ToStatus(cudaError_t error, const char* what);
[[nodiscard]] absl::Status ToStatus(CUresult result, const char* what);

// The process's one GPU. Once it has failed, no CUDA call is made any more: all that could come of
// one is a consequence of the first error.
//
// A failure is any error but out of memory, where that can still be answered.
DeviceFailure& Failure();
inline bool Failed() { return Failure().set(); }

// Who is told of the failure, as DeviceFailure::Listen says. Null: the process ends then, since a
// program that does not ask would go on with numbers that are none.
void ListenForFailure(std::function<void(const absl::Status&)> listener);

// Records a failure, with its place in the source.
void Fail(const absl::Status& status, const char* file, int line);

// Records the error of a call, unless it is out of memory, and returns it as a status: that of the
// device where it has failed.
[[nodiscard]] absl::Status Answer(const absl::Status& status, const char* file, int line);

}  // namespace sluice::cuda

// For calls that fail only when the GPU, the driver or this program is broken. Skipped on a failed
// device.
#define SLUICE_CUDA_CHECK(expression)                                                           \
  do {                                                                                          \
    if (::sluice::cuda::Failed()) break;                                                        \
    const auto sluice_cuda_result = (expression);                                               \
    if (static_cast<int>(sluice_cuda_result) != 0) {                                            \
      ::sluice::cuda::Fail(::sluice::cuda::ToStatus(sluice_cuda_result, #expression), __FILE__, \
                           __LINE__);                                                           \
    }                                                                                           \
  } while (false)

// The status of a call that may find memory out; anything else is a failure. A call is made on a
// device that works, or not at all.
#define SLUICE_CUDA_TRY(expression)                                                            \
  (::sluice::cuda::Failed()                                                                    \
       ? ::sluice::cuda::Failure().status()                                                    \
       : ::sluice::cuda::Answer(::sluice::cuda::ToStatus((expression), #expression), __FILE__, \
                                __LINE__))

#endif  // KERNELS_CUDA_ERROR_H_
