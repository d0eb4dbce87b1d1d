#include "server/store/memory_slot_store.h"

#include <algorithm>
#include <utility>

#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

// Device or pinned memory is taken in pages of this many bytes at least.
constexpr int64_t kPageBytes = 4096;

const char* Name(MemoryKind kind) { return kind == MemoryKind::kDevice ? "HBM" : "host memory"; }

}  // namespace

MemorySlotStore::MemorySlotStore(const MemorySlotStoreOptions& options, Device* device)
    : options_(options), device_(device), budget_(options.budget_bytes) {}

MemorySlotStore::~MemorySlotStore() = default;

absl::Status MemorySlotStore::TakeAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t left = options_.budget_bytes / kPageBytes * kPageBytes; left > 0;) {
    const int64_t bytes = std::min(left, options_.slab_bytes);
    auto slab = std::make_unique<Slab>();
    SLUICE_ASSIGN_OR_RETURN(slab->buffer, device_->Reserve(options_.kind, bytes));
    SLUICE_RETURN_IF_ERROR(device_->Commit(slab->buffer, 0, bytes));
    slab->free.emplace(0, bytes);
    slabs_.push_back(std::move(slab));
    left -= bytes;
  }
  std::sort(slabs_.begin(), slabs_.end(),
            [](const auto& a, const auto& b) { return a->buffer.data() < b->buffer.data(); });
  return absl::OkStatus();
}

absl::Status MemorySlotStore::Allocate(int64_t slot_bytes, absl::Span<std::byte*> slots) {
  const int64_t stride_bytes = StrideBytes(slot_bytes);
  const int64_t need_bytes = stride_bytes * static_cast<int64_t>(slots.size());
  if (!budget_.TryTake(need_bytes)) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
                 absl::StrCat("no room for ", slots.size(), " blocks of ", stride_bytes,
                              " bytes in ", Name(options_.kind), ": ", budget_.used_bytes(), " of ",
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

int64_t MemorySlotStore::AllocateUpTo(int64_t slot_bytes, absl::Span<std::byte*> slots) {
  const int64_t stride_bytes = StrideBytes(slot_bytes);
  const int64_t wanted = budget_.TakeUpTo(static_cast<int64_t>(slots.size()), stride_bytes);
  if (wanted == 0) return 0;
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t num_taken = 0;
  // What the status says does not matter: the caller has another place for the rest.
  AllocateLocked(stride_bytes, slots.subspan(0, wanted), &num_taken).IgnoreError();
  budget_.Give((wanted - num_taken) * stride_bytes);
  return num_taken;
}

bool MemorySlotStore::CutFromSlab(int64_t bytes, Chunk* chunk) {
  for (const std::unique_ptr<Slab>& slab : slabs_) {
    for (auto it = slab->free.begin(); it != slab->free.end(); ++it) {
      const auto [offset, free_bytes] = *it;
      if (free_bytes < bytes) continue;
      slab->free.erase(it);
      if (free_bytes > bytes) slab->free.emplace(offset + bytes, free_bytes - bytes);
      chunk->slab = slab.get();
      chunk->data = slab->buffer.data() + offset;
      return true;
    }
  }
  return false;
}

void MemorySlotStore::GiveToSlab(const Chunk& chunk, int64_t bytes) {
  std::map<int64_t, int64_t>& free = chunk.slab->free;
  int64_t offset = chunk.data - chunk.slab->buffer.data();
  const auto next = free.lower_bound(offset);
  if (next != free.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free.erase(previous);
    }
  }
  if (next != free.end() && offset + bytes == next->first) {
    bytes += next->second;
    free.erase(next);
  }
  free.emplace(offset, bytes);
}

std::unique_ptr<MemorySlotStore::Chunk> MemorySlotStore::NewChunk(int64_t stride_bytes,
                                                                  int64_t num_wanted,
                                                                  absl::Status* status) {
  auto chunk = std::make_unique<Chunk>();
  chunk->capacity_slots =
      std::max<int64_t>(1, std::min(options_.chunk_bytes, options_.budget_bytes) / stride_bytes);
  if (!slabs_.empty()) {
    // Slabs are shared by all strides, so a chunk is no larger than what is wanted or what its
    // stride holds already; and between others there may be room for a smaller one only.
    chunk->capacity_slots = std::clamp<int64_t>(
        std::max(num_wanted, classes_[stride_bytes].live_slots), 1, chunk->capacity_slots);
    for (; chunk->capacity_slots > 0; chunk->capacity_slots /= 2) {
      if (CutFromSlab(chunk->capacity_slots * stride_bytes, chunk.get())) return chunk;
    }
    *status = absl::ResourceExhaustedError(
        absl::StrCat("blocks of other sizes leave no ", stride_bytes, " bytes in one piece"));
  } else {
    const int64_t bytes = chunk->capacity_slots * stride_bytes;
    auto buffer = device_->Reserve(options_.kind, bytes);
    *status = buffer.status();
    if (status->ok()) *status = device_->Commit(*buffer, 0, bytes);
    if (status->ok()) {
      chunk->own = *std::move(buffer);
      chunk->data = chunk->own.data();
      return chunk;
    }
  }
  *status = Error(
      absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
      absl::StrCat("the machine gave no more ", Name(options_.kind), ": ", status->message()));
  return nullptr;
}

absl::Status MemorySlotStore::AllocateLocked(int64_t stride_bytes, absl::Span<std::byte*> slots,
                                             int64_t* num_taken) {
  StrideClass& stride_class = classes_[stride_bytes];
  for (std::byte*& slot : slots) {
    if (stride_class.open.empty()) {
      absl::Status status;
      std::unique_ptr<Chunk> chunk =
          NewChunk(stride_bytes, static_cast<int64_t>(slots.size()) - *num_taken, &status);
      if (chunk == nullptr) return status;
      stride_class.open.push_back(chunk.get());
      stride_class.chunks.emplace(chunk->data, std::move(chunk));
    }
    Chunk* chunk = stride_class.open.back();
    if (!chunk->freed.empty()) {
      slot = chunk->freed.back();
      chunk->freed.pop_back();
    } else {
      slot = chunk->data + chunk->fresh_slots++ * stride_bytes;
    }
    ++chunk->live_slots;
    ++stride_class.live_slots;
    if (chunk->full()) stride_class.open.pop_back();
    ++*num_taken;
  }
  return absl::OkStatus();
}

void MemorySlotStore::Free(int64_t slot_bytes, absl::Span<std::byte* const> slots) {
  if (slots.empty()) return;
  const int64_t stride_bytes = StrideBytes(slot_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    FreeLocked(stride_bytes, slots);
  }
  budget_.Give(stride_bytes * static_cast<int64_t>(slots.size()));
}

void MemorySlotStore::FreeLocked(int64_t stride_bytes, absl::Span<std::byte* const> slots) {
  StrideClass& stride_class = classes_[stride_bytes];
  for (std::byte* slot : slots) {
    auto it = std::prev(stride_class.chunks.upper_bound(slot));
    Chunk* chunk = it->second.get();
    if (chunk->full()) stride_class.open.push_back(chunk);
    chunk->freed.push_back(slot);
    --stride_class.live_slots;
    if (--chunk->live_slots > 0) continue;
    stride_class.open.erase(std::find(stride_class.open.begin(), stride_class.open.end(), chunk));
    if (chunk->slab != nullptr) GiveToSlab(*chunk, chunk->capacity_slots * stride_bytes);
    stride_class.chunks.erase(it);
  }
}

absl::Span<const std::byte> MemorySlotStore::range() const {
  if (slabs_.size() != 1) return {};
  const Buffer& buffer = slabs_[0]->buffer;
  return {buffer.data(), static_cast<size_t>(buffer.bytes())};
}

}  // namespace sluice
