// Handlers of calls that are answered at once: parse, do, reply.
//
//   grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* call, const grpc::ByteBuffer*
//   request,
//                                        grpc::ByteBuffer* reply) override {
//     return Answer<v1::GetSessionRequest, v1::GetSessionResponse>(
//         *context_, call, request, reply, [this](const auto& request, auto* response) { ...;
//         return status; });
//   }

#ifndef SERVER_RPC_UNARY_H_
#define SERVER_RPC_UNARY_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "server/base/status_macros.h"
#include "server/rpc/service_context.h"
#include "server/rpc/status.h"
#include "server/rpc/wire.h"

namespace sluice {

// gRPC hands the request out as const but lets nobody else have it: its bytes may be freed once
// they are parsed.
inline grpc::ByteBuffer* Consume(const grpc::ByteBuffer* request) {
  return const_cast<grpc::ByteBuffer*>(request);
}

template <typename Request, typename Response, typename Handle>
absl::Status ParseHandleReply(ServiceContext& context, const grpc::ByteBuffer* request_bytes,
                              grpc::ByteBuffer* reply_bytes, Handle&& handle) {
  Admission::Ticket ticket;
  SLUICE_RETURN_IF_ERROR(
      context.admission().Admit(static_cast<int64_t>(request_bytes->Length()), &ticket));
  Request request;
  SLUICE_RETURN_IF_ERROR(ParseMessage(Consume(request_bytes), &request));
  Response response;
  SLUICE_RETURN_IF_ERROR(std::forward<Handle>(handle)(std::as_const(request), &response));
  return SerializeMessage(response, context.admission(), reply_bytes);
}

template <typename Request, typename Response, typename Handle>
grpc::ServerUnaryReactor* Answer(ServiceContext& context, grpc::CallbackServerContext* call,
                                 const grpc::ByteBuffer* request_bytes,
                                 grpc::ByteBuffer* reply_bytes, Handle&& handle) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(ToGrpcStatus(ParseHandleReply<Request, Response>(
      context, request_bytes, reply_bytes, std::forward<Handle>(handle))));
  return reactor;
}

}  // namespace sluice

#endif  // SERVER_RPC_UNARY_H_
