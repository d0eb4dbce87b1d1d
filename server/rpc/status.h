// The one place where an absl::Status becomes what gRPC and its clients know: a code, a message and
// google.rpc details.
//
// Details are made of the payloads that server/base/error.h puts on a status: ErrorInfo (always;
// domain "sluice"), RetryInfo, ResourceInfo, and a BadRequest field violation where the metadata
// has a field. They are bounded, so that they fit the trailers that a client accepts: long values
// are cut, and bytes that are no UTF-8 are escaped.
//
// Threads: safe.

#ifndef SERVER_RPC_STATUS_H_
#define SERVER_RPC_STATUS_H_

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace sluice {

// For statuses inside messages. OK becomes an empty Status.
void ToRpcStatus(const absl::Status& status, google::rpc::Status* out);

// For the end of a call; the details go into the grpc-status-details-bin trailer.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace sluice

#endif  // SERVER_RPC_STATUS_H_
