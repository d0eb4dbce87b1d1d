// The store seam: slots of bytes in one tier. Knows nothing of attention, sessions or blocks.
//
//   std::vector<std::byte*> slots(16);
//   SLUICE_RETURN_IF_ERROR(store->Allocate(slot_bytes, absl::MakeSpan(slots)));
//   ... store->Free(slot_bytes, slots);
//
// Threads: every method may be called from any thread; none blocks on I/O.

#ifndef SERVER_STORE_SLOT_STORE_H_
#define SERVER_STORE_SLOT_STORE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace sluice {

class SlotStore {
 public:
  virtual ~SlotStore() = default;

  // Bytes that one slot counts for: its bytes rounded up to 4,096.
  static constexpr int64_t StrideBytes(int64_t slot_bytes) {
    return (slot_bytes + 4095) / 4096 * 4096;
  }

  // Fills `slots` with addresses of that many slots, or takes none: RESOURCE_EXHAUSTED HOST_MEMORY.
  // What a new slot holds is not defined.
  [[nodiscard]] virtual absl::Status Allocate(int64_t slot_bytes, absl::Span<std::byte*> slots) = 0;
  // Fills the first of `slots` with as many as there is room for; returns how many.
  [[nodiscard]] virtual int64_t AllocateUpTo(int64_t slot_bytes, absl::Span<std::byte*> slots) = 0;
  // Gives slots back. Nobody may read or write them any more.
  virtual void Free(int64_t slot_bytes, absl::Span<std::byte* const> slots) = 0;

  // The one range of addresses that holds all slots of this store and no others; empty where there
  // is no such range.
  virtual absl::Span<const std::byte> range() const { return {}; }

  virtual int64_t budget_bytes() const = 0;
  virtual int64_t used_bytes() const = 0;  // strides of the slots handed out
};

}  // namespace sluice

#endif  // SERVER_STORE_SLOT_STORE_H_
