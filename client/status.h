// What a status from the daemon says beside its code and message.
//
//   absl::Status status = session.DecodeStep(&batch);
//   if (client::ReasonOf(status) == "TOKENS_MISSING") Replay(client::MetadataOf(status,
//   "position")); if (auto delay = client::RetryDelayOf(status)) absl::SleepFor(*delay);
//
// The daemon sends google.rpc.ErrorInfo, RetryInfo and ResourceInfo. They are kept in the status as
// payloads under their type URLs ("type.googleapis.com/google.rpc.ErrorInfo" and so on),
// serialized, so that they survive copies and can be passed on as they came. A status of the
// client's own, or of the connection, has none of them.
//
// Threads: every function may be called from any thread.

#ifndef CLIENT_STATUS_H_
#define CLIENT_STATUS_H_

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace google::rpc {
class Status;
}  // namespace google::rpc

namespace sluice::client {

// Everything that a status carries; empty where it carries nothing.
struct StatusDetails {
  std::string reason;  // ErrorInfo: stable, upper case, for programs: "FENCED"
  std::string domain;  // ErrorInfo: "sluice"
  std::map<std::string, std::string> metadata;  // ErrorInfo: the values that matter
  std::optional<absl::Duration> retry_delay;    // RetryInfo: a retry after this can help
  std::string resource_type;                    // ResourceInfo, with NOT_FOUND
  std::string resource_name;
};
StatusDetails DetailsOf(const absl::Status& status);

// One value of DetailsOf, for callers who want no more.
std::string ReasonOf(const absl::Status& status);
std::string MetadataOf(const absl::Status& status, absl::string_view key);
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// The same status with its details as payloads. Code 0 gives OK; a code that no one knows gives
// UNKNOWN.
absl::Status FromRpcStatus(const google::rpc::Status& status);

}  // namespace sluice::client

#endif  // CLIENT_STATUS_H_
