#include "server/rpc/wire.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "server/base/error.h"

namespace sluice {

using Traits = grpc::SerializationTraits<google::protobuf::MessageLite>;

absl::Status ParseMessage(grpc::ByteBuffer* bytes, google::protobuf::MessageLite* message) {
  const auto length_bytes = static_cast<int64_t>(bytes->Length());
  const grpc::Status status = Traits::Deserialize(bytes, message);
  bytes->Clear();
  if (status.ok()) return absl::OkStatus();
  return InvalidField("request", absl::StrCat(length_bytes, " bytes"),
                      absl::StrCat("a serialized ", message->GetTypeName()));
}

absl::Status SerializeMessage(const google::protobuf::MessageLite& message,
                              const Admission& admission, grpc::ByteBuffer* bytes) {
  const absl::Status fits = admission.CheckReply(static_cast<int64_t>(message.ByteSizeLong()));
  if (!fits.ok()) return fits;
  bool own_buffer = false;
  const grpc::Status status = Traits::Serialize(message, bytes, &own_buffer);
  if (status.ok()) return absl::OkStatus();
  return Error(absl::StatusCode::kInternal, Reason::kInternal,
               absl::StrCat("the reply could not be serialized: ", status.error_message()));
}

}  // namespace sluice
