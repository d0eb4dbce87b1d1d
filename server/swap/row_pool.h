// The A_g store of a session: rows of projected keys, one row ([kv_head, token, rank] BF16) per
// predicted block.
//
// The whole pool is reserved at once; its pages are committed as rows are handed out.
// Threads: not safe; the session's lock guards it.

#ifndef SERVER_SWAP_ROW_POOL_H_
#define SERVER_SWAP_ROW_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace sluice {

class RowPool {
 public:
  // `device` must outlive the pool.
  [[nodiscard]] static absl::StatusOr<RowPool> Create(int64_t capacity_rows, int64_t row_bytes,
                                                      Device* device);

  // A row's address, or null: none is left, or its pages are not to be had (`status`). What a new
  // row holds is not defined.
  std::byte* Take();
  // Why the newest Take gave null although rows are left; OK where none was.
  const absl::Status& status() const { return status_; }
  void Give(std::byte* row);

  int64_t free_rows() const { return capacity_rows_ - used_rows_; }
  int64_t used_rows() const { return used_rows_; }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  RowPool(Buffer buffer, int64_t capacity_rows, int64_t row_bytes, Device* device)
      : buffer_(std::move(buffer)),
        capacity_rows_(capacity_rows),
        row_bytes_(row_bytes),
        device_(device) {}

  Buffer buffer_;
  int64_t capacity_rows_;
  int64_t row_bytes_;
  Device* device_;
  int64_t fresh_rows_ = 0;       // rows from here on were never handed out
  int64_t committed_bytes_ = 0;  // pages up to here are usable
  int64_t used_rows_ = 0;
  absl::Status status_;
  std::vector<std::byte*> freed_;
};

}  // namespace sluice

#endif  // SERVER_SWAP_ROW_POOL_H_
