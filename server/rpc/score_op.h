// ScoreBlocks and ReadProjectedKeys.

#ifndef SERVER_RPC_SCORE_OP_H_
#define SERVER_RPC_SCORE_OP_H_

#include "absl/status/status.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_op.h"
#include "server/session/calls.h"
#include "server/session/session.h"
#include "sluice/v1/attention.pb.h"

namespace sluice {

class ScoreOp : public CallOp<ScoreCall> {
 public:
  using Request = v1::ScoreBlocksRequest;
  using Response = v1::ScoreBlocksResponse;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);

 private:
  bool top_only_ = false;
};

class ReadProjectedKeysOp : public CallOp<ReadProjectedKeysCall> {
 public:
  using Request = v1::ReadProjectedKeysRequest;
  using Response = v1::ReadProjectedKeysResponse;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);
};

}  // namespace sluice

#endif  // SERVER_RPC_SCORE_OP_H_
