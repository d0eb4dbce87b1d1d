#include "client/sluicectl/command.h"

#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/status.h"
#include "google/protobuf/util/json_util.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace sluice::ctl {
namespace {

// As the daemon says it, so that the caller need not know who noticed.
absl::Status SessionNotFound(const std::string& name) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(absl::StatusCode::kNotFound));
  status.set_message(absl::StrCat("there is no session '", name, "'"));
  google::rpc::ErrorInfo info;
  info.set_reason("SESSION_NOT_FOUND");
  info.set_domain("sluice");
  (*info.mutable_metadata())["session"] = name;
  status.add_details()->PackFrom(info);
  return client::FromRpcStatus(status);
}

}  // namespace

Invocation::Invocation(const Args& args, client::Client client, client::CallOptions call_options,
                       bool json, std::ostream& out)
    : args_(args),
      client_(std::move(client)),
      call_options_(call_options),
      json_(json),
      out_(out) {}

client::CallOptions Invocation::stream_options() const {
  return args_.Has("timeout") ? call_options_ : client::CallOptions();
}

absl::Status Invocation::CheckOperands(size_t count, bool more) const {
  const size_t given = args_.positional().size();
  if (given == count || (more && given > count)) return absl::OkStatus();
  if (count == 0) {
    return UsageError(absl::StrCat("unexpected operand '", args_.positional().front(), "'"));
  }
  return UsageError(
      absl::StrCat("needs ", more ? "at least " : "", count, " operand(s), got ", given));
}

absl::StatusOr<v1::Session> Invocation::FindSession(const std::string& name) const {
  absl::StatusOr<std::vector<v1::Session>> sessions = client_.ListAllSessions(call_options_);
  if (!sessions.ok()) return sessions.status();
  for (v1::Session& session : *sessions) {
    if (session.handle().name() == name) return std::move(session);
  }
  return SessionNotFound(name);
}

absl::StatusOr<client::Session> Invocation::UseSession() const {
  absl::StatusOr<v1::Session> session = FindSession(args_.Get("session"));
  if (!session.ok()) return session.status();
  return client_.UseSession(*session);
}

absl::Status Invocation::Print(const google::protobuf::Message& response,
                               const std::function<std::string()>& text) const {
  if (!json_) {
    out_ << text();
    return absl::OkStatus();
  }
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  // A program should not have to know which values are left out because they are zero.
  options.always_print_primitive_fields = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(response, &json, options);
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  out_ << absl::StripTrailingAsciiWhitespace(json) << "\n";
  return absl::OkStatus();
}

const std::vector<Command>& AllCommands() {
  static const auto& commands = *[] {
    auto* all = new std::vector<Command>();
    for (std::vector<Command> group : {AdminCommands(), SessionCommands(), SequenceCommands(),
                                       BlockCommands(), ArrayCommands()}) {
      std::move(group.begin(), group.end(), std::back_inserter(*all));
    }
    return all;
  }();
  return commands;
}

const std::vector<Option>& GlobalOptions() {
  static const auto& options = *new std::vector<Option>{
      {"address", "HOST:PORT",
       "the daemon, or unix:PATH (default: $SLUICE_ADDRESS, else 127.0.0.1:7464)"},
      {"timeout", "DURATION", "how long a call may take, such as 500ms or 30s (default 30s)"},
      {"output", "text|json", "tables for people, or the response as JSON (default text)"},
      {"help", "", "show the help of the command"},
  };
  return options;
}

Option SessionOption() { return {"session", "NAME", "the session", /*required=*/true}; }

Option LayersOption() {
  return {"layers", "IDS", "only these layers, such as 0-3,8 (default all)"};
}

std::string ShortName(v1::Dtype dtype) { return ShortName(v1::Dtype_Name(dtype), "DTYPE_", dtype); }
std::string ShortName(v1::SessionState state) {
  return absl::AsciiStrToLower(ShortName(v1::SessionState_Name(state), "SESSION_STATE_", state));
}
std::string ShortName(v1::BlockState state) {
  return absl::AsciiStrToLower(ShortName(v1::BlockState_Name(state), "BLOCK_STATE_", state));
}
std::string ShortName(v1::Tier tier) {
  return absl::AsciiStrToLower(ShortName(v1::Tier_Name(tier), "TIER_", tier));
}

}  // namespace sluice::ctl
