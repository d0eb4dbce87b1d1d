#include "server/store/host_slot_store.h"

#include <algorithm>
#include <utility>

#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {

HostSlotStore::HostSlotStore(const HostSlotStoreOptions& options, Device* device)
    : options_(options), device_(device), budget_(options.budget_bytes) {}

absl::Status HostSlotStore::Allocate(int64_t slot_bytes, absl::Span<std::byte*> slots) {
  const int64_t stride_bytes = StrideBytes(slot_bytes);
  const int64_t need_bytes = stride_bytes * static_cast<int64_t>(slots.size());
  if (!budget_.TryTake(need_bytes)) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
                 absl::StrCat("no room for ", slots.size(), " blocks of ", stride_bytes,
                              " bytes in host memory: ", budget_.used_bytes(), " of ",
                              budget_.total_bytes(), " bytes are in use"))
        .Meta("need_bytes", need_bytes)
        .Meta("free_bytes", budget_.total_bytes() - budget_.used_bytes())
        .Meta("budget_bytes", budget_.total_bytes());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t num_taken = 0;
  absl::Status status = AllocateLocked(stride_bytes, slots, &num_taken);
  if (!status.ok()) {
    FreeLocked(stride_bytes, slots.subspan(0, num_taken));
    budget_.Give(need_bytes);
  }
  return status;
}

absl::Status HostSlotStore::AllocateLocked(int64_t stride_bytes, absl::Span<std::byte*> slots,
                                           int64_t* num_taken) {
  StrideClass& stride_class = classes_[stride_bytes];
  for (std::byte*& slot : slots) {
    if (stride_class.open.empty()) {
      auto chunk = std::make_unique<Chunk>();
      chunk->capacity_slots = std::max<int64_t>(
          1, std::min(options_.chunk_bytes, options_.budget_bytes) / stride_bytes);
      const int64_t bytes = chunk->capacity_slots * stride_bytes;
      auto buffer = device_->Reserve(MemoryKind::kHost, bytes);
      absl::Status status = buffer.status();
      if (status.ok()) status = device_->Commit(*buffer, 0, bytes);
      if (!status.ok()) {
        return Error(absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
                     absl::StrCat("the machine gave no more host memory: ", status.message()));
      }
      chunk->buffer = *std::move(buffer);
      stride_class.open.push_back(chunk.get());
      stride_class.chunks.emplace(chunk->buffer.data(), std::move(chunk));
    }
    Chunk* chunk = stride_class.open.back();
    if (!chunk->freed.empty()) {
      slot = chunk->freed.back();
      chunk->freed.pop_back();
    } else {
      slot = chunk->buffer.data() + chunk->fresh_slots++ * stride_bytes;
    }
    ++chunk->live_slots;
    if (chunk->full()) stride_class.open.pop_back();
    ++*num_taken;
  }
  return absl::OkStatus();
}

void HostSlotStore::Free(int64_t slot_bytes, absl::Span<std::byte* const> slots) {
  if (slots.empty()) return;
  const int64_t stride_bytes = StrideBytes(slot_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    FreeLocked(stride_bytes, slots);
  }
  budget_.Give(stride_bytes * static_cast<int64_t>(slots.size()));
}

void HostSlotStore::FreeLocked(int64_t stride_bytes, absl::Span<std::byte* const> slots) {
  StrideClass& stride_class = classes_[stride_bytes];
  for (std::byte* slot : slots) {
    auto it = std::prev(stride_class.chunks.upper_bound(slot));
    Chunk* chunk = it->second.get();
    if (chunk->full()) stride_class.open.push_back(chunk);
    chunk->freed.push_back(slot);
    if (--chunk->live_slots == 0) {
      stride_class.open.erase(std::find(stride_class.open.begin(), stride_class.open.end(), chunk));
      stride_class.chunks.erase(it);
    }
  }
}

}  // namespace sluice
