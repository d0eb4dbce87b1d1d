// A session: one scheduler's blocks, A_g, sequences, running states and streams. Knows no RPC.
//
// Threads: every method may be called from any thread; none blocks for longer than a bookkeeping
// step. Ownership: SessionManager owns sessions and hands out shared_ptrs; a session outlives the
// calls in it. Order: calls given to Submit run in that order; only where a decode step waits for
// an offload into a block that it writes, steps of other sequences pass it. Offloads and fetches
// run beside them and are ordered against them per block: a write waits for a fetch of the same
// block that has begun, a fetch waits for writes of the same block that were enqueued before it, an
// offload becomes visible at one point.

#ifndef SERVER_SESSION_SESSION_H_
#define SERVER_SESSION_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/session/calls.h"
#include "server/session/types.h"

namespace sluice {

class Session {
 public:
  virtual ~Session() = default;

  virtual const SessionSpec& spec() const = 0;
  virtual int64_t slot_bytes() const = 0;  // payload of a block, K and V
  virtual SessionInfo Info() const = 0;

  // Checks the epoch of a handle and that the session is attached, and renews the lease.
  // ABORTED FENCED; FAILED_PRECONDITION SESSION_DETACHED or SESSION_CLOSING.
  [[nodiscard]] virtual absl::Status CheckHandle(uint64_t epoch) = 0;
  // Open streams keep the lease alive; each Enter needs one Leave.
  virtual void EnterStream() = 0;
  virtual void LeaveStream() = 0;
  // When the lease runs out if nothing more is heard.
  virtual absl::Time LeaseExpiry() const = 0;

  // Queues a call; `call->Done()` follows in any case, perhaps before Submit returns.
  virtual void Submit(Call* call) = 0;
  virtual void Offload(OffloadCall* call) = 0;
  virtual void Fetch(FetchCall* call) = 0;

  struct PutResult {
    uint32_t num_blocks = 0;
    int64_t reserved_blocks = 0;
  };
  [[nodiscard]] virtual absl::StatusOr<PutResult> PutSequence(const SequenceUpdate& update) = 0;
  [[nodiscard]] virtual absl::StatusOr<uint32_t> ForkSequence(uint32_t source_sequence_id,
                                                              uint64_t source_generation,
                                                              uint32_t target_sequence_id,
                                                              uint64_t target_generation,
                                                              int64_t context_tokens) = 0;
  [[nodiscard]] virtual absl::StatusOr<uint32_t> TruncateSequence(uint32_t sequence_id,
                                                                  uint64_t generation,
                                                                  int64_t context_tokens) = 0;
  [[nodiscard]] virtual absl::StatusOr<int64_t> ReleaseSequence(
      absl::Span<const uint32_t> sequence_ids, bool drop_blocks) = 0;
  // Sequences of id >= first_sequence_id, at most `limit`.
  virtual std::vector<SequenceInfo> ListSequences(uint32_t first_sequence_id,
                                                  int64_t limit) const = 0;

  // Errors: INVALID_FIELD for ids out of range.
  [[nodiscard]] virtual absl::StatusOr<std::vector<BlockInfo>> DescribeBlocks(
      const BlockSet& blocks) const = 0;
  struct BlockCursor {  // the first (layer, block_id) to look at
    uint32_t layer = 0;
    uint32_t block_id = 0;
  };
  // Blocks from `cursor` on, at most `limit`; sets `next` and returns true there if there may be
  // more.
  struct BlockPage {
    std::vector<BlockInfo> blocks;
    bool more = false;
    BlockCursor next;
  };
  [[nodiscard]] virtual absl::StatusOr<BlockPage> ListBlocks(absl::Span<const uint32_t> layers,
                                                             Tier tier, BlockCursor cursor,
                                                             int64_t limit) const = 0;
  [[nodiscard]] virtual absl::StatusOr<std::vector<BlockInfo>> FindBlocks(
      absl::Span<const std::string> tags, absl::Span<const uint32_t> layers) const = 0;
  struct DropResult {
    int64_t dropped_blocks = 0;
    int64_t freed_bytes = 0;
  };
  [[nodiscard]] virtual absl::StatusOr<DropResult> DropBlocks(const BlockSet& blocks,
                                                              bool allow_missing) = 0;
};

}  // namespace sluice

#endif  // SERVER_SESSION_SESSION_H_
