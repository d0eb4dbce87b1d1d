#include "server/base/error.h"

#include "absl/strings/cord.h"

namespace sluice {
namespace {

constexpr absl::string_view kReasonUrl = "sluice/reason";
constexpr absl::string_view kMetaUrlPrefix = "sluice/meta/";

}  // namespace

absl::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kInvalidField:
      return "INVALID_FIELD";
    case Reason::kUnequalKv:
      return "UNEQUAL_KV";
    case Reason::kDuplicateBlock:
      return "DUPLICATE_BLOCK";
    case Reason::kDuplicateSequence:
      return "DUPLICATE_SEQUENCE";
    case Reason::kSessionNotFound:
      return "SESSION_NOT_FOUND";
    case Reason::kSessionMismatch:
      return "SESSION_MISMATCH";
    case Reason::kSessionDetached:
      return "SESSION_DETACHED";
    case Reason::kSessionClosing:
      return "SESSION_CLOSING";
    case Reason::kFenced:
      return "FENCED";
    case Reason::kTooManySessions:
      return "TOO_MANY_SESSIONS";
    case Reason::kDeviceMemory:
      return "DEVICE_MEMORY";
    case Reason::kHostMemory:
      return "HOST_MEMORY";
    case Reason::kPredictionMemory:
      return "PREDICTION_MEMORY";
    case Reason::kQueueFull:
      return "QUEUE_FULL";
    case Reason::kInflightBytes:
      return "INFLIGHT_BYTES";
    case Reason::kMessageTooLarge:
      return "MESSAGE_TOO_LARGE";
    case Reason::kTooManyRuns:
      return "TOO_MANY_RUNS";
    case Reason::kSequenceNotFound:
      return "SEQUENCE_NOT_FOUND";
    case Reason::kSequenceExists:
      return "SEQUENCE_EXISTS";
    case Reason::kStaleGeneration:
      return "STALE_GENERATION";
    case Reason::kBaseBeyondTable:
      return "BASE_BEYOND_TABLE";
    case Reason::kBlockNotFound:
      return "BLOCK_NOT_FOUND";
    case Reason::kBlockInTable:
      return "BLOCK_IN_TABLE";
    case Reason::kBlockShared:
      return "BLOCK_SHARED";
    case Reason::kTokensMissing:
      return "TOKENS_MISSING";
    case Reason::kRunNotFound:
      return "RUN_NOT_FOUND";
    case Reason::kTileOutOfOrder:
      return "TILE_OUT_OF_ORDER";
    case Reason::kCancelled:
      return "CANCELLED";
    case Reason::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Reason::kShuttingDown:
      return "SHUTTING_DOWN";
    case Reason::kDeviceFailed:
      return "DEVICE_FAILED";
    case Reason::kInternal:
      return "INTERNAL";
  }
  return "INTERNAL";
}

Error::Error(absl::StatusCode code, Reason reason, absl::string_view message)
    : status_(code, message) {
  status_.SetPayload(kReasonUrl, absl::Cord(ReasonName(reason)));
}

void Error::SetMeta(absl::string_view key, absl::string_view value) {
  status_.SetPayload(absl::StrCat(kMetaUrlPrefix, key), absl::Cord(value));
}

Error&& Error::Retry(absl::Duration delay) && {
  status_.SetPayload("sluice/retry_ms", absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(delay))));
  return std::move(*this);
}

Error&& Error::Resource(absl::string_view type, absl::string_view name) && {
  status_.SetPayload("sluice/resource_type", absl::Cord(type));
  status_.SetPayload("sluice/resource_name", absl::Cord(name));
  return std::move(*this);
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

std::string MetaOf(const absl::Status& status, absl::string_view key) {
  const auto payload = status.GetPayload(absl::StrCat(kMetaUrlPrefix, key));
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace sluice
