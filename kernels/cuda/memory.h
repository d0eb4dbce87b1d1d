// Device and pinned host memory behind Device::Reserve and Commit.
//
// Small buffers are cut from slabs that are kept. A large device buffer is address space into which
// Commit maps granules of 2 MiB from a pool that only grows, up to the budget, and whole GiB where
// so much is asked for at once; a large host buffer is address space, near the GPU where the
// machine says what is near, whose committed parts are pinned.
//
// Threads: every function may be called from any thread.

#ifndef KERNELS_CUDA_MEMORY_H_
#define KERNELS_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace sluice::cuda {

// A Buffer gives its memory back through a plain function, so the allocator is one for the process.
// Start and Stop bracket the life of the device; no buffer is alive outside.
// `numa_node` is the GPU's; -1: not known.
[[nodiscard]] absl::Status StartMemory(int64_t hbm_budget_bytes, int numa_node);
void StopMemory();

// Fills the pool of granules: Device::TakeDeviceMemory.
[[nodiscard]] absl::Status TakeDeviceMemory(int64_t bytes);

[[nodiscard]] absl::StatusOr<Buffer> ReserveMemory(MemoryKind kind, int64_t bytes);
[[nodiscard]] absl::Status CommitMemory(const Buffer& buffer, int64_t offset_bytes, int64_t bytes);

// Whether [data, data + bytes) lies in one pinned host buffer of ours, so that kernels read it in
// place.
bool IsPinned(const void* data, int64_t bytes);
// Whether `data` lies in host memory of ours at all.
bool IsHost(const void* data);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_MEMORY_H_
