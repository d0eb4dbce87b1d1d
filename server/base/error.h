// Errors that a client can act on: an absl::Status with a stable reason and the values that matter.
//
//   return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidField, "rank must be 1..128")
//       .Meta("field", "spec.rank").Meta("value", 200).Meta("allowed", "1..128").Build();
//   return InvalidField("spec.rank", 200, "1..128 and at most head_dim");
//
// The details travel as payloads of the status (URLs "sluice/reason", "sluice/meta/KEY",
// "sluice/retry_ms", "sluice/resource_type", "sluice/resource_name"); server/rpc turns them into
// google.rpc details, in one place. Reasons and what to do about them: docs/api.md.
//
// Threads: everything here is safe to call from any thread.

#ifndef SERVER_BASE_ERROR_H_
#define SERVER_BASE_ERROR_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace sluice {

// Stable: a reason is never renamed or given another meaning.
enum class Reason {
  kInvalidField,    // INVALID_ARGUMENT: metadata field, value, allowed
  kUnequalKv,       // INVALID_ARGUMENT: K and V of unequal head_dim, or MLA: not supported
  kDuplicateBlock,  // INVALID_ARGUMENT: one (layer, block) twice in a batch, or written by two rows
  kDuplicateSequence,  // INVALID_ARGUMENT: one sequence twice in a step
  kSessionNotFound,    // NOT_FOUND
  kSessionMismatch,    // FAILED_PRECONDITION: attaching with another geometry or fingerprint
  kSessionDetached,    // FAILED_PRECONDITION: the lease ran out; open it again
  kSessionClosing,     // FAILED_PRECONDITION: being closed
  kFenced,             // ABORTED: an older handle
  kTooManySessions,    // RESOURCE_EXHAUSTED
  kDeviceMemory,       // RESOURCE_EXHAUSTED: a session's reservation does not fit
  kHostMemory,         // RESOURCE_EXHAUSTED: no slot left
  kPredictionMemory,   // RESOURCE_EXHAUSTED: no A_g rows left for replaced blocks; retry
  kQueueFull,          // RESOURCE_EXHAUSTED: too many calls of the session wait; retry
  kInflightBytes,      // RESOURCE_EXHAUSTED: too many request bytes held; retry
  kMessageTooLarge,    // RESOURCE_EXHAUSTED
  kTooManyRuns,        // RESOURCE_EXHAUSTED: tile runs
  kSequenceNotFound,   // NOT_FOUND
  kSequenceExists,     // ALREADY_EXISTS
  kStaleGeneration,    // ABORTED
  kBaseBeyondTable,    // FAILED_PRECONDITION
  kBlockNotFound,      // NOT_FOUND
  kBlockInTable,       // FAILED_PRECONDITION
  kBlockShared,        // FAILED_PRECONDITION
  kTokensMissing,      // FAILED_PRECONDITION: metadata layer, block_id, position
  kRunNotFound,        // NOT_FOUND
  kTileOutOfOrder,     // FAILED_PRECONDITION
  kCancelled,          // CANCELLED
  kDeadlineExceeded,   // DEADLINE_EXCEEDED
  kShuttingDown,       // UNAVAILABLE; retry
  kDeviceFailed,       // UNAVAILABLE: the GPU is broken and the daemon ends; another one starts
  kInternal,           // INTERNAL: a broken invariant of the daemon
};

// "INVALID_FIELD" and so on: the ErrorInfo.reason.
absl::string_view ReasonName(Reason reason);

class [[nodiscard]] Error {
 public:
  Error(absl::StatusCode code, Reason reason, absl::string_view message);

  // ErrorInfo.metadata; keys are lower_snake_case.
  template <typename T>
  Error&& Meta(absl::string_view key, const T& value) && {
    SetMeta(key, absl::StrCat(value));
    return std::move(*this);
  }
  // The same, for an error that is put together in steps.
  template <typename T>
  void AddMeta(absl::string_view key, const T& value) {
    SetMeta(key, absl::StrCat(value));
  }
  // RetryInfo: a retry after `delay` can help.
  Error&& Retry(absl::Duration delay) &&;
  // ResourceInfo, for NOT_FOUND.
  Error&& Resource(absl::string_view type, absl::string_view name) &&;

  absl::Status Build() && { return std::move(status_); }
  operator absl::Status() && { return std::move(status_); }  // NOLINT: reads better at a return.

 private:
  void SetMeta(absl::string_view key, absl::string_view value);
  absl::Status status_;
};

// INVALID_ARGUMENT INVALID_FIELD: "spec.rank is 200; allowed: 1..128 and at most head_dim (64)".
template <typename T>
absl::Status InvalidField(absl::string_view field, const T& value, absl::string_view allowed) {
  return Error(absl::StatusCode::kInvalidArgument, Reason::kInvalidField,
               absl::StrCat(field, " is ", value, "; allowed: ", allowed))
      .Meta("field", field)
      .Meta("value", value)
      .Meta("allowed", allowed);
}

// The ErrorInfo.reason of a status, or "" where it has none.
std::string ReasonOf(const absl::Status& status);
// A metadata value of a status, or "".
std::string MetaOf(const absl::Status& status, absl::string_view key);

}  // namespace sluice

#endif  // SERVER_BASE_ERROR_H_
