// DecodeStep, as a unary call and as a message of a DecodeStream.

#ifndef SERVER_RPC_DECODE_OP_H_
#define SERVER_RPC_DECODE_OP_H_

#include <vector>

#include "absl/status/status.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_op.h"
#include "server/session/calls.h"
#include "server/session/session.h"
#include "sluice/v1/attention.pb.h"

namespace sluice {

class DecodeOp : public CallOp<DecodeCall> {
 public:
  using Request = v1::DecodeStepRequest;
  using Response = v1::DecodeStepResponse;

  // INVALID_FIELD for what makes the request malformed as a whole; MESSAGE_TOO_LARGE when the
  // outputs would not fit a message. Keeps views of the request.
  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);

 private:
  std::vector<DecodeSequence> parsed_sequences_;
};

// The element type of outputs. `out_dtype` is the session's kv_dtype where nothing is said.
[[nodiscard]] absl::Status ParseOutput(const v1::OutputOptions& output, const Session& session,
                                       DType* out_dtype);

}  // namespace sluice

#endif  // SERVER_RPC_DECODE_OP_H_
