#include "client/status.h"

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace sluice::client {
namespace {

constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";
constexpr absl::string_view kResourceInfoUrl = "type.googleapis.com/google.rpc.ResourceInfo";

// False where the status has no such payload, or one that does not parse.
template <typename Message>
bool ReadPayload(const absl::Status& status, absl::string_view url, Message* message) {
  const auto payload = status.GetPayload(url);
  return payload.has_value() && message->ParseFromString(std::string(*payload));
}

absl::Duration ToDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace

StatusDetails DetailsOf(const absl::Status& status) {
  StatusDetails details;
  if (google::rpc::ErrorInfo info; ReadPayload(status, kErrorInfoUrl, &info)) {
    details.reason = info.reason();
    details.domain = info.domain();
    details.metadata.insert(info.metadata().begin(), info.metadata().end());
  }
  if (google::rpc::ResourceInfo info; ReadPayload(status, kResourceInfoUrl, &info)) {
    details.resource_type = info.resource_type();
    details.resource_name = info.resource_name();
  }
  details.retry_delay = RetryDelayOf(status);
  return details;
}

std::string ReasonOf(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  return ReadPayload(status, kErrorInfoUrl, &info) ? info.reason() : std::string();
}

std::string MetadataOf(const absl::Status& status, absl::string_view key) {
  google::rpc::ErrorInfo info;
  if (!ReadPayload(status, kErrorInfoUrl, &info)) return std::string();
  const auto found = info.metadata().find(std::string(key));
  return found == info.metadata().end() ? std::string() : found->second;
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  google::rpc::RetryInfo info;
  if (!ReadPayload(status, kRetryInfoUrl, &info)) return std::nullopt;
  return ToDuration(info.retry_delay());
}

absl::Status FromRpcStatus(const google::rpc::Status& status) {
  // absl::Status keeps an unknown code as it came; its code() then says UNKNOWN.
  absl::Status result(static_cast<absl::StatusCode>(status.code()), status.message());
  for (const google::protobuf::Any& detail : status.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

}  // namespace sluice::client
