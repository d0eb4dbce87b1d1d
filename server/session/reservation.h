// What a session sets aside in device memory before it allocates anything, and what to say when it
// does not fit.

#ifndef SERVER_SESSION_RESERVATION_H_
#define SERVER_SESSION_RESERVATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"
#include "server/session/types.h"

namespace sluice {

struct Reservation {
  // Device memory.
  int64_t a_g_bytes = 0;              // num_layers max_blocks num_kv_heads block_tokens rank 2
  int64_t a_g_replacement_bytes = 0;  // rows of blocks that are being replaced
  int64_t projection_bytes = 0;       // head_dim rank 2
  int64_t running_state_bytes = 0;    // run_rows rows of q and (m, l, o)
  int64_t split_workspace_bytes = 0;  // partial states of a step
  int64_t score_workspace_bytes = 0;  // partial states of a score
  std::vector<MemoryItem> items;      // the same, named, with formulas
  // Derived.
  int64_t total_rows = 0;  // of A_g, replacement included
  int64_t run_rows = 0;    // rows of all tile runs together

  int64_t total_bytes() const {
    return a_g_bytes + a_g_replacement_bytes + projection_bytes + running_state_bytes +
           split_workspace_bytes + score_workspace_bytes;
  }
};

// `spec` is checked, defaults filled in. `max_message_bytes` bounds the blocks of one batch.
Reservation ComputeReservation(const SessionSpec& spec, int64_t max_message_bytes, const Ops& ops);

// Checks ranges and fills in defaults; INVALID_FIELD names the field, its value and what is
// allowed.
[[nodiscard]] absl::StatusOr<SessionSpec> NormalizeSpec(const SessionSpec& spec);

// A session may take device memory until this share of the budget is left.
inline constexpr int64_t kReservedShareDivisor = 20;  // 5 %
inline constexpr int64_t UsableBytes(int64_t budget_bytes) {
  return budget_bytes - budget_bytes / kReservedShareDivisor;
}

// How the device budget is split.
struct DeviceBudget {
  static constexpr int64_t kBlockShareDivisor = 4;  // sessions get one part of four ...

  int64_t total_bytes = 0;
  int64_t block_bytes = 0;
  bool block_share_chosen = false;  // ... unless told otherwise

  int64_t session_bytes() const { return total_bytes - block_bytes; }
  // The least total that leaves this much for sessions.
  int64_t TotalFor(int64_t bytes) const {
    return block_share_chosen ? bytes * kBlockShareDivisor : bytes + block_bytes;
  }
};

// RESOURCE_EXHAUSTED DEVICE_MEMORY: the need, the free memory, the formula of A_g with its numbers,
// and each setting that alone would make the session fit, with a value that fits.
absl::Status DoesNotFit(const SessionSpec& spec, const Reservation& reservation,
                        const DeviceBudget& budget, int64_t used_bytes, int64_t machine_bytes,
                        int64_t max_message_bytes, const Ops& ops);

}  // namespace sluice

#endif  // SERVER_SESSION_RESERVATION_H_
