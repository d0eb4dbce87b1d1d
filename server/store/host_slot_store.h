// Slots in pinned host memory (on the CPU device: in memory).
//
// Slots of one stride share chunks; a chunk goes back to the device when its last slot is freed.

#ifndef SERVER_STORE_HOST_SLOT_STORE_H_
#define SERVER_STORE_HOST_SLOT_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"
#include "server/store/budget.h"
#include "server/store/slot_store.h"

namespace sluice {

struct HostSlotStoreOptions {
  int64_t budget_bytes = 0;
  // Chunks are of about this many bytes (of the budget, where that is less), and hold at least one
  // slot.
  int64_t chunk_bytes = int64_t{64} << 20;
};

class HostSlotStore final : public SlotStore {
 public:
  // `device` must outlive the store.
  HostSlotStore(const HostSlotStoreOptions& options, Device* device);

  absl::Status Allocate(int64_t slot_bytes, absl::Span<std::byte*> slots) override;
  void Free(int64_t slot_bytes, absl::Span<std::byte* const> slots) override;
  int64_t budget_bytes() const override { return budget_.total_bytes(); }
  int64_t used_bytes() const override { return budget_.used_bytes(); }

 private:
  struct Chunk {
    Buffer buffer;
    int64_t capacity_slots = 0;
    int64_t fresh_slots = 0;  // slots from here on were never handed out
    int64_t live_slots = 0;
    std::vector<std::byte*> freed;  // handed out before, free now
    bool full() const { return freed.empty() && fresh_slots == capacity_slots; }
  };
  // Chunks of one stride, by address; `open` are those with room.
  struct StrideClass {
    std::map<std::byte*, std::unique_ptr<Chunk>> chunks;
    std::vector<Chunk*> open;
  };

  absl::Status AllocateLocked(int64_t stride_bytes, absl::Span<std::byte*> slots,
                              int64_t* num_taken);
  void FreeLocked(int64_t stride_bytes, absl::Span<std::byte* const> slots);

  const HostSlotStoreOptions options_;
  Device* const device_;
  Budget budget_;
  std::mutex mutex_;
  std::map<int64_t, StrideClass> classes_;  // by stride
};

}  // namespace sluice

#endif  // SERVER_STORE_HOST_SLOT_STORE_H_
