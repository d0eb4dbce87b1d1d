// Messages to and from the bytes that gRPC moves.
//
// Handlers take raw bytes from gRPC and parse them here: a request is then admitted by its true
// size before memory is spent on it, one that does not parse is an error like any other (and ends
// no stream), and request and reply messages can be used again and again by whoever owns them.

#ifndef SERVER_RPC_WIRE_H_
#define SERVER_RPC_WIRE_H_

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/rpc/admission.h"

namespace sluice {

// Parses and lets go of the bytes, whatever comes of it. INVALID_ARGUMENT INVALID_FIELD when they
// are no such message.
[[nodiscard]] absl::Status ParseMessage(grpc::ByteBuffer* bytes,
                                        google::protobuf::MessageLite* message);

// RESOURCE_EXHAUSTED MESSAGE_TOO_LARGE when the reply is larger than a message may be.
[[nodiscard]] absl::Status SerializeMessage(const google::protobuf::MessageLite& message,
                                            const Admission& admission, grpc::ByteBuffer* bytes);

}  // namespace sluice

#endif  // SERVER_RPC_WIRE_H_
