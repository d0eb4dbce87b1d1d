// What the Ops of submit_rpc.h share when they run on a session's attention stream.

#ifndef SERVER_RPC_CALL_OP_H_
#define SERVER_RPC_CALL_OP_H_

#include <cstdint>

#include "absl/time/time.h"
#include "server/session/calls.h"
#include "server/session/session.h"

namespace sluice {

// Bytes of a reply beside its arrays, at most, for what is refused before it is computed: shapes,
// tags, lengths, stats.
inline constexpr int64_t kReplyOverheadBytes = 512;

template <typename CallType>
class CallOp : public CallType {
 public:
  // Whether the object is used again for later calls.
  static constexpr bool kKept = true;

  void Run(Session& session) { session.Submit(this); }
  void SetDeadline(absl::Time deadline) { this->deadline = deadline; }
  void CancelRun() { this->Cancel(); }
};

}  // namespace sluice

#endif  // SERVER_RPC_CALL_OP_H_
