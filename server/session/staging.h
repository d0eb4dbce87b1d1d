// Host memory that the device reaches, grown on demand and kept: where a call's arrays travel.
//
//   staging.Begin();
//   const int64_t q = staging.Add(q_bytes);
//   SLUICE_RETURN_IF_ERROR(staging.Commit(device));
//   std::memcpy(staging.at(q), ...);
//
// Pieces are aligned to 64 bytes.
// Threads: not safe; a call owns one.

#ifndef SERVER_SESSION_STAGING_H_
#define SERVER_SESSION_STAGING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device.h"
#include "server/base/status_macros.h"

namespace sluice {

class Staging {
 public:
  void Begin() { planned_bytes_ = 0; }
  // Returns the piece's offset.
  int64_t Add(int64_t bytes) {
    const int64_t offset = planned_bytes_;
    planned_bytes_ += (bytes + 63) / 64 * 64;
    return offset;
  }
  // Makes room for all pieces added since Begin. Pointers from an earlier round are not valid any
  // more.
  [[nodiscard]] absl::Status Commit(Device& device) {
    if (planned_bytes_ <= buffer_.bytes()) return absl::OkStatus();
    const int64_t bytes = std::max(planned_bytes_ + planned_bytes_ / 2, int64_t{64} << 10);
    SLUICE_ASSIGN_OR_RETURN(Buffer buffer, device.Reserve(MemoryKind::kHost, bytes));
    SLUICE_RETURN_IF_ERROR(device.Commit(buffer, 0, bytes));
    buffer_ = std::move(buffer);
    return absl::OkStatus();
  }
  template <typename T = std::byte>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(buffer_.data() + offset);
  }
  int64_t bytes() const { return buffer_.bytes(); }

 private:
  Buffer buffer_;
  int64_t planned_bytes_ = 0;
};

}  // namespace sluice

#endif  // SERVER_SESSION_STAGING_H_
