#include "kernels/cuda/error.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/driver.h"

namespace sluice::cuda {
namespace {

std::mutex handler_mutex;
std::function<void(const absl::Status&)> fatal_handler;

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
  const std::string message = absl::StrCat(what, ": driver error ", static_cast<int>(result));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

void SetFatalHandler(std::function<void(const absl::Status&)> handler) {
  std::lock_guard<std::mutex> lock(handler_mutex);
  fatal_handler = std::move(handler);
}

void Fatal(const absl::Status& status, const char* file, int line) {
  std::function<void(const absl::Status&)> handler;
  {
    std::lock_guard<std::mutex> lock(handler_mutex);
    handler = std::exchange(fatal_handler, nullptr);
  }
  std::fprintf(stderr, "%s:%d: CUDA failed: %s\n", file, line, status.ToString().c_str());
  std::fflush(stderr);
  if (handler) handler(status);
  std::_Exit(70);
}

}  // namespace sluice::cuda
