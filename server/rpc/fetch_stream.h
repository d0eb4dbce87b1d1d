// FetchBlocks: blocks out, in pieces of about a MiB.
//
// A piece is copied out of its slots in one go and then belongs to the reader: while a reader is
// slow, no slot is held, and at most two pieces wait, one being written and one that follows. K and
// V are written by the device into the very bytes that gRPC sends; the message around them is put
// together here, field by field.

#ifndef SERVER_RPC_FETCH_STREAM_H_
#define SERVER_RPC_FETCH_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/service_context.h"

namespace sluice {

// Belongs to gRPC.
grpc::ServerWriteReactor<grpc::ByteBuffer>* NewFetchStream(ServiceContext* context,
                                                           const grpc::ByteBuffer* request_bytes);

}  // namespace sluice

#endif  // SERVER_RPC_FETCH_STREAM_H_
