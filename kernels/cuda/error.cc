#include "kernels/cuda/error.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sluice::cuda {
namespace {

void EndProcess(const absl::Status& failure) {
  std::fprintf(stderr, "the GPU failed: %s\n", std::string(failure.message()).c_str());
  std::fflush(stderr);
  std::_Exit(70);
}

}  // namespace

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorInitializationError:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status ToStatus(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  // Driver and runtime count errors alike.
  const auto error = static_cast<cudaError_t>(result);
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

DeviceFailure& Failure() {
  static DeviceFailure* const failure = new DeviceFailure;
  return *failure;
}

void ListenForFailure(std::function<void(const absl::Status&)> listener) {
  Failure().Listen(listener ? std::move(listener) : EndProcess);
}

void Fail(const absl::Status& status, const char* file, int line) {
  Failure().Set(absl::UnavailableError(absl::StrCat(file, ":", line, ": ", status.message())));
}

absl::Status Answer(const absl::Status& status, const char* file, int line) {
  if (status.ok()) return status;
  if (absl::IsResourceExhausted(status)) {
    // Or the next launch would seem to have failed.
    (void)cudaGetLastError();
    return status;
  }
  Fail(status, file, line);
  return Failure().status();
}

}  // namespace sluice::cuda
