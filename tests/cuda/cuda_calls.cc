#include "tests/cuda/cuda_calls.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace sluice {
namespace {

std::mutex mutex;
std::atomic<bool> counting{false};

std::map<std::string, int>& Counts() {
  static auto* const counts = new std::map<std::string, int>;
  return *counts;
}
std::set<std::string>& Unknown() {
  static auto* const names = new std::set<std::string>;
  return *names;
}

void Count(const char* name) {
  if (!counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  ++Counts()[name];
}

// A driver function that is counted: the real one, and one of the same type in its place.
template <typename Result, typename... Arguments>
struct Shim {
  using Function = Result (*)(Arguments...);
  template <const char* kName>
  struct Named {
    static inline Function real = nullptr;
    static Result Call(Arguments... arguments) {
      Count(kName);
      return real(arguments...);
    }
  };
};
template <const char* kName, typename Result, typename... Arguments>
void* Wrap(void* real, Result (*)(Arguments...)) {
  using Named = typename Shim<Result, Arguments...>::template Named<kName>;
  Named::real = reinterpret_cast<Result (*)(Arguments...)>(real);
  return reinterpret_cast<void*>(&Named::Call);
}

#define SLUICE_COUNTED(name, version)                                        \
  if (symbol == #name) {                                                     \
    static constexpr char kName[] = #name;                                   \
    return Wrap<kName>(real, static_cast<PFN_##name##_v##version>(nullptr)); \
  }

void* WrapEntryPoint(const std::string& symbol, void* real) {
  SLUICE_COUNTED(cuMemCreate, 10020)
  SLUICE_COUNTED(cuMemRelease, 10020)
  SLUICE_COUNTED(cuMemAddressReserve, 10020)
  SLUICE_COUNTED(cuMemAddressFree, 10020)
  SLUICE_COUNTED(cuMemMap, 10020)
  SLUICE_COUNTED(cuMemUnmap, 10020)
  SLUICE_COUNTED(cuMemSetAccess, 10020)
  SLUICE_COUNTED(cuMemAlloc, 3020)
  SLUICE_COUNTED(cuMemFree, 3020)
  SLUICE_COUNTED(cuMemHostRegister, 6050)
  SLUICE_COUNTED(cuMemHostUnregister, 4000)
  SLUICE_COUNTED(cuCtxSynchronize, 2000)
  SLUICE_COUNTED(cuStreamSynchronize, 2000)
  if (symbol != "cuMemGetAllocationGranularity" && symbol != "cuStreamWriteValue64" &&
      symbol != "cuStreamWaitValue64") {
    std::lock_guard<std::mutex> lock(mutex);
    Unknown().insert(symbol);
  }
  return real;
}

}  // namespace

void CudaCalls::Start() {
  std::lock_guard<std::mutex> lock(mutex);
  Counts().clear();
  counting = true;
}

std::vector<std::string> CudaCalls::Stop() {
  counting = false;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> calls;
  for (const auto& [name, count] : Counts()) calls.push_back(name + " x " + std::to_string(count));
  return calls;
}

std::vector<std::string> CudaCalls::UnknownEntryPoints() {
  std::lock_guard<std::mutex> lock(mutex);
  return {Unknown().begin(), Unknown().end()};
}

}  // namespace sluice

// The runtime's functions. A name here needs its line in targets.bzl: without it, nothing defines
// the real one, and the program does not link.
#define SLUICE_WRAPPED(name, parameters, arguments) \
  cudaError_t __real_##name parameters;             \
  cudaError_t __wrap_##name parameters {            \
    sluice::Count(#name);                           \
    return __real_##name arguments;                 \
  }

extern "C" {

SLUICE_WRAPPED(cudaMalloc, (void** p, size_t n), (p, n))
SLUICE_WRAPPED(cudaMallocManaged, (void** p, size_t n, unsigned flags), (p, n, flags))
SLUICE_WRAPPED(cudaMallocPitch, (void** p, size_t* pitch, size_t w, size_t h), (p, pitch, w, h))
SLUICE_WRAPPED(cudaMallocAsync, (void** p, size_t n, cudaStream_t s), (p, n, s))
SLUICE_WRAPPED(cudaMallocFromPoolAsync, (void** p, size_t n, cudaMemPool_t pool, cudaStream_t s),
               (p, n, pool, s))
SLUICE_WRAPPED(cudaMallocHost, (void** p, size_t n), (p, n))
SLUICE_WRAPPED(cudaHostAlloc, (void** p, size_t n, unsigned flags), (p, n, flags))
SLUICE_WRAPPED(cudaFree, (void* p), (p))
SLUICE_WRAPPED(cudaFreeAsync, (void* p, cudaStream_t s), (p, s))
SLUICE_WRAPPED(cudaFreeHost, (void* p), (p))
SLUICE_WRAPPED(cudaHostRegister, (void* p, size_t n, unsigned flags), (p, n, flags))
SLUICE_WRAPPED(cudaHostUnregister, (void* p), (p))
SLUICE_WRAPPED(cudaDeviceSynchronize, (), ())
SLUICE_WRAPPED(cudaStreamSynchronize, (cudaStream_t s), (s))
SLUICE_WRAPPED(cudaEventSynchronize, (cudaEvent_t e), (e))
SLUICE_WRAPPED(cudaStreamCreate, (cudaStream_t * s), (s))
SLUICE_WRAPPED(cudaStreamCreateWithFlags, (cudaStream_t * s, unsigned flags), (s, flags))
SLUICE_WRAPPED(cudaStreamCreateWithPriority, (cudaStream_t * s, unsigned flags, int priority),
               (s, flags, priority))
SLUICE_WRAPPED(cudaStreamDestroy, (cudaStream_t s), (s))
SLUICE_WRAPPED(cudaEventCreate, (cudaEvent_t * e), (e))
SLUICE_WRAPPED(cudaEventCreateWithFlags, (cudaEvent_t * e, unsigned flags), (e, flags))
SLUICE_WRAPPED(cudaEventDestroy, (cudaEvent_t e), (e))
SLUICE_WRAPPED(cudaMemcpy, (void* to, const void* from, size_t n, cudaMemcpyKind kind),
               (to, from, n, kind))
SLUICE_WRAPPED(cudaMemset, (void* p, int value, size_t n), (p, value, n))

cudaError_t __real_cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                    unsigned version, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* result);
cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                    unsigned version, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* result) {
  const cudaError_t error =
      __real_cudaGetDriverEntryPointByVersion(symbol, function, version, flags, result);
  if (error == cudaSuccess && *function != nullptr) {
    *function = sluice::WrapEntryPoint(symbol, *function);
  }
  return error;
}

}  // extern "C"
