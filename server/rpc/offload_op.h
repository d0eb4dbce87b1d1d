// OffloadBlocks, as a unary call and as a batch of an OffloadStream.

#ifndef SERVER_RPC_OFFLOAD_OP_H_
#define SERVER_RPC_OFFLOAD_OP_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/rpc/admission.h"
#include "server/session/calls.h"
#include "server/session/session.h"
#include "sluice/v1/swap.pb.h"

namespace sluice {

class OffloadOp : public OffloadCall {
 public:
  using Request = v1::OffloadBlocksRequest;
  using Response = v1::OffloadBlocksResponse;
  static constexpr bool kKept = true;

  // Keeps views of the request.
  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);
  void Run(Session& session) { session.Offload(this); }
  // A batch that has begun is stored, whoever still waits for it: all or nothing, and never in
  // doubt for long.
  void SetDeadline(absl::Time) {}
  void CancelRun() {}

 private:
  std::vector<OffloadBlock> parsed_blocks_;
};

}  // namespace sluice

#endif  // SERVER_RPC_OFFLOAD_OP_H_
