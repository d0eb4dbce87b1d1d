#include "client/sluicectl/errors.h"

#include "absl/strings/str_cat.h"
#include "client/sluicectl/args.h"
#include "client/status.h"

namespace sluice::ctl {
namespace {

struct Hint {
  absl::string_view reason;
  absl::string_view text;
};

constexpr Hint kHints[] = {
    {"SESSION_NOT_FOUND", "`sluicectl sessions list` shows the sessions"},
    {"SESSION_MISMATCH",
     "a session of this name has another geometry or fingerprint: `sluicectl sessions get NAME` "
     "shows it; "
     "take another name, or close it with --delete-data"},
    {"SESSION_DETACHED",
     "its lease ran out: `sluicectl sessions open` with the same geometry attaches again"},
    {"SESSION_CLOSING", "wait until it is closed, then open it again"},
    {"FENCED",
     "the session was opened again meanwhile; run the command again to use the new handle"},
    {"TOO_MANY_SESSIONS", "close one that is not needed, or raise the daemon's max_sessions"},
    {"DEVICE_MEMORY",
     "lower rank, max_blocks or max_sequences, or give the daemon a larger budget; "
     "`sluicectl usage` shows who has what"},
    {"HOST_MEMORY",
     "drop blocks, close a session, or give the daemon a larger host budget; "
     "`sluicectl usage` shows who has what"},
    {"PREDICTION_MEMORY", "try again, or offload with --predict best-effort"},
    {"QUEUE_FULL", "try again: the session has too many calls under way"},
    {"INFLIGHT_BYTES", "try again: the daemon holds as many request bytes as it may"},
    {"MESSAGE_TOO_LARGE", "send fewer blocks at a time (--batch-bytes)"},
    {"SEQUENCE_NOT_FOUND", "`sluicectl sequences list --session NAME` shows the sequences"},
    {"SEQUENCE_EXISTS", "release that sequence first, or take another id"},
    {"STALE_GENERATION",
     "`sluicectl sequences list --session NAME` shows the generation of each sequence"},
    {"BASE_BEYOND_TABLE", "--base is at most the number of blocks in the table"},
    {"BLOCK_NOT_FOUND", "`sluicectl blocks list --session NAME` shows what is stored"},
    {"BLOCK_IN_TABLE",
     "release or truncate the sequences that hold the block first: "
     "`sluicectl sequences list --session NAME`"},
    {"BLOCK_SHARED", "two tables hold the block: put the new data under another id"},
    {"SHUTTING_DOWN",
     "the daemon is going down: try again when it is back (`sluicectl wait-ready`)"},
};

std::string HintFor(const absl::Status& status, absl::string_view reason,
                    absl::string_view address) {
  for (const Hint& hint : kHints) {
    if (hint.reason == reason) return std::string(hint.text);
  }
  if (status.code() == absl::StatusCode::kUnavailable && reason.empty()) {
    return absl::StrCat("is sluiced running, and does it listen on ", address,
                        "? --address or SLUICE_ADDRESS says where to look");
  }
  if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    return "a longer --timeout may help";
  }
  if (status.code() == absl::StatusCode::kUnimplemented) {
    return "the daemon does not know this call: is it older than this sluicectl?";
  }
  return std::string();
}

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitUnavailable;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitRefused;
    case absl::StatusCode::kResourceExhausted:
      return kExitExhausted;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return IsUsageError(status) ? kExitUsage : kExitInvalidArgument;
    default:
      return kExitOther;
  }
}

std::string DescribeError(const absl::Status& status, absl::string_view address) {
  if (IsUsageError(status)) return absl::StrCat("sluicectl: ", status.message(), "\n");
  const client::StatusDetails details = client::DetailsOf(status);
  std::string text = absl::StrCat("sluicectl: ", absl::StatusCodeToString(status.code()));
  if (!details.reason.empty()) absl::StrAppend(&text, " ", details.reason);
  absl::StrAppend(&text, ": ", status.message(), "\n");
  for (const auto& [key, value] : details.metadata) {
    absl::StrAppend(&text, "  ", key, ": ", value, "\n");
  }
  if (!details.resource_type.empty()) {
    absl::StrAppend(&text, "  resource: ", details.resource_type, " ", details.resource_name, "\n");
  }
  if (details.retry_delay.has_value()) {
    absl::StrAppend(&text, "  retry after: ", absl::FormatDuration(*details.retry_delay), "\n");
  }
  const std::string hint = HintFor(status, details.reason, address);
  if (!hint.empty()) absl::StrAppend(&text, "  hint: ", hint, "\n");
  return text;
}

}  // namespace sluice::ctl
