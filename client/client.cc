#include "client/client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/core.h"

namespace sluice::client {
namespace {

constexpr int kSessionsPerPage = 1000;
constexpr absl::Duration kReadyPollInterval = absl::Milliseconds(100);
constexpr absl::Duration kReadyPollTimeout = absl::Seconds(2);

}  // namespace

absl::StatusOr<Client> Client::Create(const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<Core>> core = Core::Create(options);
  if (!core.ok()) return core.status();
  return Client(*std::move(core));
}

Client::Client(std::shared_ptr<Core> core) : core_(std::move(core)) {}

absl::Status Client::WaitReady(absl::Duration timeout) const {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    CallOptions options;
    options.timeout =
        std::min(std::max(deadline - absl::Now(), absl::Milliseconds(1)), kReadyPollTimeout);
    const absl::StatusOr<bool> serving = CheckHealth("", options);
    if (serving.ok() && *serving) return absl::OkStatus();
    if (absl::Now() + kReadyPollInterval >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon at ", core_->options.address, " is not ready after ",
                       absl::FormatDuration(timeout), ": ",
                       serving.ok() ? "it says NOT_SERVING" : serving.status().ToString()));
    }
    absl::SleepFor(kReadyPollInterval);
  }
}

absl::StatusOr<bool> Client::CheckHealth(const std::string& service,
                                         const CallOptions& options) const {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  auto response = core_->Call(*core_->health, &grpc::health::v1::Health::Stub::Check, request,
                              options, Repeat::kSafe);
  if (!response.ok()) return response.status();
  return response->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::StatusOr<Session> Client::OpenSession(const v1::SessionSpec& spec,
                                            const CallOptions& options) const {
  v1::OpenSessionRequest request;
  *request.mutable_spec() = spec;
  const Repeat repeat = spec.name().empty() ? Repeat::kUnsafe : Repeat::kSafe;
  auto response = core_->Call(*core_->sessions, &v1::SessionService::Stub::OpenSession, request,
                              options, repeat);
  if (!response.ok()) return response.status();
  return Session(core_, std::move(*response->mutable_session()), response->attached());
}

Session Client::UseSession(const v1::Session& session) const {
  return Session(core_, session, /*attached=*/true);
}

absl::StatusOr<v1::ListSessionsResponse> Client::ListSessions(
    const v1::ListSessionsRequest& request, const CallOptions& options) const {
  return core_->Call(*core_->sessions, &v1::SessionService::Stub::ListSessions, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<std::vector<v1::Session>> Client::ListAllSessions(const CallOptions& options) const {
  std::vector<v1::Session> sessions;
  v1::ListSessionsRequest request;
  request.set_page_size(kSessionsPerPage);
  do {
    absl::StatusOr<v1::ListSessionsResponse> page = ListSessions(request, options);
    if (!page.ok()) return page.status();
    std::move(page->mutable_sessions()->begin(), page->mutable_sessions()->end(),
              std::back_inserter(sessions));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return sessions;
}

absl::StatusOr<v1::GetServerResponse> Client::GetServer(const CallOptions& options) const {
  return core_->Call(*core_->admin, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(),
                     options, Repeat::kSafe);
}

absl::StatusOr<v1::GetUsageResponse> Client::GetUsage(const std::string& session_name,
                                                      const CallOptions& options) const {
  v1::GetUsageRequest request;
  request.set_session_name(session_name);
  return core_->Call(*core_->admin, &v1::AdminService::Stub::GetUsage, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::SetLogLevelResponse> Client::SetLogLevel(const std::string& level,
                                                            const CallOptions& options) const {
  v1::SetLogLevelRequest request;
  request.set_level(level);
  // Repeated, it would give the level that it set itself as the one before.
  return core_->Call(*core_->admin, &v1::AdminService::Stub::SetLogLevel, request, options,
                     Repeat::kUnsafe);
}

}  // namespace sluice::client
