#include "server/swap/row_pool.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"

namespace sluice {
namespace {

constexpr int64_t kCommitBytes = int64_t{2} << 20;

}  // namespace

absl::StatusOr<RowPool> RowPool::Create(int64_t capacity_rows, int64_t row_bytes, Device* device) {
  SLUICE_ASSIGN_OR_RETURN(Buffer buffer,
                          device->Reserve(MemoryKind::kDevice, capacity_rows * row_bytes));
  return RowPool(std::move(buffer), capacity_rows, row_bytes, device);
}

std::byte* RowPool::Take() {
  if (!freed_.empty()) {
    std::byte* row = freed_.back();
    freed_.pop_back();
    ++used_rows_;
    return row;
  }
  if (fresh_rows_ == capacity_rows_) return nullptr;
  const int64_t end_bytes = (fresh_rows_ + 1) * row_bytes_;
  if (end_bytes > committed_bytes_) {
    const int64_t target_bytes =
        std::min(buffer_.bytes(), (end_bytes + kCommitBytes - 1) / kCommitBytes * kCommitBytes);
    status_ = device_->Commit(buffer_, committed_bytes_, target_bytes - committed_bytes_);
    if (!status_.ok()) return nullptr;
    committed_bytes_ = target_bytes;
  }
  ++used_rows_;
  return buffer_.data() + row_bytes_ * fresh_rows_++;
}

void RowPool::Give(std::byte* row) {
  freed_.push_back(row);
  --used_rows_;
}

}  // namespace sluice
