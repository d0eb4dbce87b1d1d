// Slots in memory that the device addresses: HBM, or pinned host memory (on the CPU device both are
// ordinary memory).
//
// Slots of one stride share chunks. Chunks come from the device one by one and go back to it with
// their last slot; or, after TakeAll, they are cut from slabs that hold the whole budget, so that
// no later call asks the device for anything.

#ifndef SERVER_STORE_MEMORY_SLOT_STORE_H_
#define SERVER_STORE_MEMORY_SLOT_STORE_H_

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

struct MemorySlotStoreOptions {
  int64_t budget_bytes = 0;
  // Chunks are of about this many bytes (of the budget, where that is less), and hold at least one
  // slot.
  int64_t chunk_bytes = int64_t{64} << 20;
  MemoryKind kind = MemoryKind::kHost;
  // Slabs of TakeAll are of at most this many bytes; a slot lies in one of them.
  int64_t slab_bytes = int64_t{1} << 30;
};

class MemorySlotStore final : public SlotStore {
 public:
  // `device` must outlive the store.
  MemorySlotStore(const MemorySlotStoreOptions& options, Device* device);
  ~MemorySlotStore() override;

  // Takes the whole budget from the device now. Before the first Allocate. RESOURCE_EXHAUSTED when
  // the machine has not that much.
  [[nodiscard]] absl::Status TakeAll();

  absl::Status Allocate(int64_t slot_bytes, absl::Span<std::byte*> slots) override;
  int64_t AllocateUpTo(int64_t slot_bytes, absl::Span<std::byte*> slots) override;
  void Free(int64_t slot_bytes, absl::Span<std::byte* const> slots) override;
  // After TakeAll of a budget that is one slab.
  absl::Span<const std::byte> range() const override;
  int64_t budget_bytes() const override { return budget_.total_bytes(); }
  int64_t used_bytes() const override { return budget_.used_bytes(); }

 private:
  // Memory of TakeAll, and which parts of it no chunk holds: offset to bytes.
  struct Slab {
    Buffer buffer;
    std::map<int64_t, int64_t> free;
  };
  struct Chunk {
    Buffer own;            // where the chunk is no part of a slab
    Slab* slab = nullptr;  // where it is
    std::byte* data = nullptr;
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
    int64_t live_slots = 0;
  };

  // With the lock. Null, and a status that says why: none is to be had.
  std::unique_ptr<Chunk> NewChunk(int64_t stride_bytes, int64_t num_wanted, absl::Status* status);
  bool CutFromSlab(int64_t bytes, Chunk* chunk);
  void GiveToSlab(const Chunk& chunk, int64_t bytes);
  absl::Status AllocateLocked(int64_t stride_bytes, absl::Span<std::byte*> slots,
                              int64_t* num_taken);
  void FreeLocked(int64_t stride_bytes, absl::Span<std::byte* const> slots);

  const MemorySlotStoreOptions options_;
  Device* const device_;
  Budget budget_;
  std::vector<std::unique_ptr<Slab>> slabs_;  // fixed after TakeAll
  std::mutex mutex_;
  std::map<int64_t, StrideClass> classes_;  // by stride
};

}  // namespace sluice

#endif  // SERVER_STORE_MEMORY_SLOT_STORE_H_
