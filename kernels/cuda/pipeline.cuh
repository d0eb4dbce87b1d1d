// Asynchronous copies from global into shared memory, and barriers that warps pass in phases.

#ifndef KERNELS_CUDA_PIPELINE_CUH_
#define KERNELS_CUDA_PIPELINE_CUH_

#include <cstddef>
#include <cstdint>

namespace sluice::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes, past L1. Both addresses are multiples of 16.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// The same, or 16 zeros, in which case nothing is read.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const std::byte* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(present ? 16 : 0)
               : "memory");
}

// Ends a group: this thread's copies since the one before.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the newest kPending have ended.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A barrier in shared memory that threads arrive at and wait for at different times. It goes from
// phase 0 to 1, 0, 1, ... whenever all have arrived.
struct Barrier {
  uint64_t word;

  // By one thread, before the block synchronizes.
  __device__ __forceinline__ void Init(int num_threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(&word)), "r"(num_threads)
                 : "memory");
  }
  // What this thread has done in shared memory is seen by those who wait.
  __device__ __forceinline__ void Arrive() {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(SharedAddress(&word))
        : "memory");
  }
  // Until phase `phase` is over.
  __device__ __forceinline__ void Wait(int phase) {
    uint32_t is_over = 0;
    while (is_over == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(is_over)
          : "r"(SharedAddress(&word)), "r"(phase)
          : "memory");
    }
    __syncwarp();
  }
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_PIPELINE_CUH_
