// OffloadStream: batches in, an ack per batch out, in order.

#ifndef SERVER_RPC_OFFLOAD_STREAM_H_
#define SERVER_RPC_OFFLOAD_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/service_context.h"

namespace sluice {

// Belongs to gRPC.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewOffloadStream(
    ServiceContext* context);

}  // namespace sluice

#endif  // SERVER_RPC_OFFLOAD_STREAM_H_
