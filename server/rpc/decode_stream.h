// DecodeStream: steps in, their results out, in order.

#ifndef SERVER_RPC_DECODE_STREAM_H_
#define SERVER_RPC_DECODE_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/service_context.h"

namespace sluice {

// Belongs to gRPC.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewDecodeStream(
    ServiceContext* context, grpc::CallbackServerContext* call);

}  // namespace sluice

#endif  // SERVER_RPC_DECODE_STREAM_H_
