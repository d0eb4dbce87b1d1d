#include "server/rpc/status.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "google/rpc/error_details.pb.h"
#include "server/base/error.h"
#include "server/base/logging.h"

namespace sluice {
namespace {

constexpr char kDomain[] = "sluice";
// Clients accept 8 KiB of trailers by default; the details travel in base64 beside the message.
constexpr size_t kMaxMessageBytes = 1200;
constexpr size_t kMaxValueBytes = 256;

// Length of the well-formed UTF-8 sequence at the front of `text`, or 0.
size_t Utf8SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0x80   ? 1
                        : lead < 0xc2 ? 0
                        : lead < 0xe0 ? 2
                        : lead < 0xf0 ? 3
                        : lead < 0xf5 ? 4
                                      : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies behind U+10FFFF.
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;
  if (lead == 0xed && byte(1) > 0x9f) return 0;
  if (lead == 0xf0 && byte(1) < 0x90) return 0;
  if (lead == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

// Valid UTF-8 of at most about `max_bytes`; what a client sent may be neither.
std::string Presentable(absl::string_view text, size_t max_bytes) {
  std::string out;
  size_t at = 0;
  while (at < text.size() && out.size() < max_bytes) {
    const size_t length = Utf8SequenceLength(text.substr(at));
    if (length == 0) {
      out.append(absl::CHexEscape(text.substr(at, 1)));
      ++at;
    } else {
      out.append(text.data() + at, length);
      at += length;
    }
  }
  if (at < text.size()) absl::StrAppend(&out, "... (", text.size(), " bytes)");
  return out;
}

// Statuses that no one gave a reason, from libraries, get the one that their code allows.
std::string ReasonFor(const absl::Status& status) {
  std::string reason = ReasonOf(status);
  if (!reason.empty()) return reason;
  if (status.code() == absl::StatusCode::kCancelled)
    return std::string(ReasonName(Reason::kCancelled));
  if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    return std::string(ReasonName(Reason::kDeadlineExceeded));
  }
  LogWarning("error without a reason", {{"status", status.ToString()}});
  return std::string(ReasonName(Reason::kInternal));
}

void AddBadRequest(const google::rpc::ErrorInfo& info, google::rpc::Status* out) {
  const auto field = info.metadata().find("field");
  if (field == info.metadata().end()) return;
  google::rpc::BadRequest bad_request;
  auto* violation = bad_request.add_field_violations();
  violation->set_field(field->second);
  const auto value = info.metadata().find("value");
  const auto allowed = info.metadata().find("allowed");
  if (value != info.metadata().end() && allowed != info.metadata().end()) {
    violation->set_description(absl::StrCat("is ", value->second, "; allowed: ", allowed->second));
  }
  out->add_details()->PackFrom(bad_request);
}

}  // namespace

void ToRpcStatus(const absl::Status& status, google::rpc::Status* out) {
  out->Clear();
  if (status.ok()) return;
  out->set_code(static_cast<int>(status.code()));
  const absl::string_view message = status.message();
  out->set_message(Presentable(message, kMaxMessageBytes));

  google::rpc::ErrorInfo info;
  info.set_domain(kDomain);
  info.set_reason(ReasonFor(status));
  google::rpc::RetryInfo retry;
  google::rpc::ResourceInfo resource;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    const std::string value(payload);
    int64_t retry_ms = 0;
    if (absl::ConsumePrefix(&url, "sluice/meta/")) {
      (*info.mutable_metadata())[std::string(url)] = Presentable(value, kMaxValueBytes);
    } else if (url == "sluice/retry_ms" && absl::SimpleAtoi(value, &retry_ms)) {
      retry.mutable_retry_delay()->set_seconds(retry_ms / 1000);
      retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(retry_ms % 1000) * 1'000'000);
    } else if (url == "sluice/resource_type") {
      resource.set_resource_type(Presentable(value, kMaxValueBytes));
    } else if (url == "sluice/resource_name") {
      resource.set_resource_name(Presentable(value, kMaxValueBytes));
    }
  });
  out->add_details()->PackFrom(info);
  if (retry.has_retry_delay()) out->add_details()->PackFrom(retry);
  if (!resource.resource_type().empty()) out->add_details()->PackFrom(resource);
  if (status.code() == absl::StatusCode::kInvalidArgument) AddBadRequest(info, out);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status();
  if (status.code() == absl::StatusCode::kInternal) {
    LogError("internal error", {{"status", status.ToString()}});
  }
  google::rpc::Status details;
  ToRpcStatus(status, &details);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), details.message(),
                      details.SerializeAsString());
}

}  // namespace sluice
