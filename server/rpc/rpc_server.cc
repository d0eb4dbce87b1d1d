#include "server/rpc/rpc_server.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "server/base/logging.h"
#include "server/base/status_macros.h"
#include "server/rpc/service_context.h"
#include "server/rpc/services.h"
#include "server/rpc/unix_socket.h"

namespace sluice {
namespace {

constexpr const char* kServiceNames[] = {"sluice.v1.SessionService", "sluice.v1.SequenceService",
                                         "sluice.v1.SwapService", "sluice.v1.AttentionService",
                                         "sluice.v1.AdminService"};

// gRPC answers a message over its own limit without details and ends the stream it came in. So its
// limit is somewhat higher than ours: what lies between is refused here, with details, and the
// stream goes on.
constexpr int64_t kMinReceiveMarginBytes = int64_t{1} << 20;
// Messages are at most this large, so that margins and sums stay far from gRPC's and protobuf's 2
// GiB.
constexpr int64_t kMaxMessageBytes = int64_t{1} << 30;
// Server reflection is the one service that blocks a thread for each of its streams.
constexpr int kMaxReflectionThreads = 16;
// A client whose host is gone is noticed, and its calls are cancelled, after the sum of these.
constexpr int kKeepaliveTimeMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;
constexpr int kMinPingIntervalMs = 5'000;
// What is left when work in hand is done or out of time (watchers of health, reflection) gets this
// long to end.
constexpr std::chrono::milliseconds kLastGrace{100};
constexpr mode_t kSocketMode = 0660;

// gRPC's own lines, about connections mostly, go where ours go.
void LogFromGrpc(gpr_log_func_args* line) {
  const LogLevel level = line->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                         : line->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kDebug
                                                                   : LogLevel::kTrace;
  Log(level, "grpc", {{"text", line->message}});
}

void InitGrpcOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(LogFromGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // gRPC's health service speaks without generated code; this links its descriptor in, for
    // reflection.
    grpc::health::v1::HealthCheckRequest::descriptor();
  });
}

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const RpcServerOptions& options, SessionManager* sessions)
      : context_(options, sessions) {
    services_.push_back(NewSessionService(&context_));
    services_.push_back(NewSequenceService(&context_));
    services_.push_back(NewSwapService(&context_));
    services_.push_back(NewAttentionService(&context_));
    services_.push_back(NewAdminService(&context_));
  }
  ~RpcServerImpl() override { Shutdown(absl::ZeroDuration()); }

  absl::Status Listen();
  int port() const override { return port_; }
  void ReportNotServing() override { server_->GetHealthCheckService()->SetServingStatus(false); }
  void Shutdown(absl::Duration grace) override;

 private:
  void Configure(grpc::ServerBuilder* builder);

  ServiceContext context_;
  std::vector<std::unique_ptr<grpc::Service>> services_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
  std::once_flag shut_down_;
};

void RpcServerImpl::Configure(grpc::ServerBuilder* builder) {
  const int64_t max_message_bytes = context_.options().max_message_bytes;
  builder->SetMaxReceiveMessageSize(static_cast<int>(
      max_message_bytes + std::max(max_message_bytes / 4, kMinReceiveMarginBytes)));
  builder->SetMaxSendMessageSize(-1);
  // A compressed message is measured after it was inflated, which is too late to bound memory.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  grpc::ResourceQuota quota("sluice");
  quota.SetMaxThreads(kMaxReflectionThreads);
  builder->SetResourceQuota(quota);
  builder->SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder->SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 1);
  // Two daemons on one port would each get some of the calls.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinPingIntervalMs);
  for (const std::unique_ptr<grpc::Service>& service : services_) {
    builder->RegisterService(service.get());
  }
}

absl::Status RpcServerImpl::Listen() {
  const RpcServerOptions& options = context_.options();
  grpc::ServerBuilder builder;
  Configure(&builder);
  if (!options.listen_address.empty()) {
    builder.AddListeningPort(options.listen_address, grpc::InsecureServerCredentials(), &port_);
  }
  mode_t previous_mask = 0;
  if (!options.unix_socket.empty()) {
    SLUICE_RETURN_IF_ERROR(PrepareUnixSocket(options.unix_socket));
    builder.AddListeningPort(absl::StrCat("unix:", options.unix_socket),
                             grpc::InsecureServerCredentials());
    // From its first moment on, nobody else can connect.
    previous_mask = umask(0777 & ~kSocketMode);
  }
  server_ = builder.BuildAndStart();
  if (!options.unix_socket.empty()) umask(previous_mask);
  if (server_ == nullptr || (!options.listen_address.empty() && port_ == 0)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on ", options.listen_address.empty() ? "no address" : options.listen_address,
        options.unix_socket.empty() ? "" : absl::StrCat(" and unix socket ", options.unix_socket),
        ": not an address of this host, or in use, or not allowed"));
  }
  if (!options.unix_socket.empty()) chmod(options.unix_socket.c_str(), kSocketMode);
  for (const char* name : kServiceNames) {
    server_->GetHealthCheckService()->SetServingStatus(name, true);
  }
  return absl::OkStatus();
}

void RpcServerImpl::Shutdown(absl::Duration grace) {
  std::call_once(shut_down_, [&] {
    if (server_ == nullptr) return;
    ReportNotServing();
    context_.admission().Drain();
    if (!context_.admission().WaitIdle(grace) && grace > absl::ZeroDuration()) {
      LogWarning("calls are cancelled that were not done within the grace",
                 {{"grace_ms", absl::ToInt64Milliseconds(grace)}});
    }
    server_->Shutdown(std::chrono::system_clock::now() + kLastGrace);
    server_->Wait();
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            SessionManager* sessions) {
  if (options.listen_address.empty() && options.unix_socket.empty()) {
    return absl::InvalidArgumentError("neither an address nor a unix socket to listen on");
  }
  if (options.max_message_bytes < 1 || options.max_message_bytes > kMaxMessageBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_message_bytes is ", options.max_message_bytes, "; allowed: 1..", kMaxMessageBytes));
  }
  if (options.max_inflight_bytes < options.max_message_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_inflight_bytes is ", options.max_inflight_bytes,
                     "; allowed: max_message_bytes (", options.max_message_bytes, ") or more"));
  }
  InitGrpcOnce();
  auto server = std::make_unique<RpcServerImpl>(options, sessions);
  SLUICE_RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace sluice
