#include <cuda_runtime_api.h>

#include "tests/faults/illegal_access.h"

namespace sluice {
namespace {

__global__ void Write(int* to) { *to = 1; }

}  // namespace

void WriteToIllegalAddress() {
  cudaStream_t stream;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return;
  Write<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(64));
}

}  // namespace sluice
