// Internal: the connection of a Client and how its unary calls are made. The only header of the
// client that includes gRPC; those that programs include do not, so that they compile quickly.

#ifndef CLIENT_CORE_H_
#define CLIENT_CORE_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/options.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "sluice/v1/attention.grpc.pb.h"
#include "sluice/v1/sequence.grpc.pb.h"
#include "sluice/v1/session.grpc.pb.h"
#include "sluice/v1/swap.grpc.pb.h"

namespace sluice::client {

// The details of a status travel as a serialized google.rpc.Status; this is the one place that
// unpacks it.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Sets the deadline of a stream that starts now; none where `timeout` is zero or infinite.
void SetDeadline(absl::Duration timeout, grpc::ClientContext* context);

// Whether doing a call a second time changes nothing and says the same.
enum class Repeat { kSafe, kUnsafe };

class Core {
 public:
  static absl::StatusOr<std::shared_ptr<Core>> Create(const ClientOptions& options);

  // Calls `attempt` until it succeeds, fails for good, or may not be repeated.
  absl::Status Run(const CallOptions& options, Repeat repeat,
                   absl::FunctionRef<grpc::Status(grpc::ClientContext*)> attempt) const;

  // A unary call: Call(*core.swap, &v1::SwapService::Stub::ListBlocks, request, &response, ...).
  template <typename Stub, typename Request, typename Response>
  absl::Status Call(Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, const CallOptions& options,
                    Repeat repeat) const {
    return Run(options, repeat, [&](grpc::ClientContext* context) {
      return (stub.*method)(context, request, response);
    });
  }
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(
      Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
      const Request& request, const CallOptions& options, Repeat repeat) const {
    Response response;
    absl::Status status = Call(stub, method, request, &response, options, repeat);
    if (!status.ok()) return status;
    return response;
  }

  const ClientOptions options;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::AdminService::Stub> admin;
  const std::unique_ptr<v1::AttentionService::Stub> attention;
  const std::unique_ptr<v1::SequenceService::Stub> sequences;
  const std::unique_ptr<v1::SessionService::Stub> sessions;
  const std::unique_ptr<v1::SwapService::Stub> swap;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health;

 private:
  Core(const ClientOptions& options, std::shared_ptr<grpc::Channel> channel);
};

}  // namespace sluice::client

#endif  // CLIENT_CORE_H_
