#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/logging.h"
#include "server/base/status_macros.h"
#include "server/base/version.h"
#include "server/rpc/convert.h"
#include "server/rpc/services.h"
#include "server/rpc/unary.h"
#include "sluice/v1/admin.grpc.pb.h"

namespace sluice {
namespace {

using Base = v1::AdminService::WithRawCallbackMethod_GetServer<
    v1::AdminService::WithRawCallbackMethod_GetUsage<
        v1::AdminService::WithRawCallbackMethod_SetLogLevel<v1::AdminService::Service>>>;

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  if (!(statm >> total_pages >> resident_pages)) return 0;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

void AddPools(const std::vector<MemoryPoolUsage>& pools,
              google::protobuf::RepeatedPtrField<v1::MemoryPool>* out) {
  for (const MemoryPoolUsage& pool : pools) {
    v1::MemoryPool* const to = out->Add();
    to->set_name(pool.name);
    to->set_budget_bytes(pool.budget_bytes);
    to->set_used_bytes(pool.used_bytes);
  }
}

void AddUsage(const SessionInfo& info, v1::GetUsageResponse* response) {
  v1::SessionUsage* const usage = response->add_sessions();
  usage->set_name(info.name);
  usage->set_state(StateOf(info));
  usage->set_num_blocks(info.num_blocks);
  for (const MemoryItem& item : info.memory) ToProto(item, usage->add_items());
}

class AdminServiceImpl final : public Base {
 public:
  explicit AdminServiceImpl(ServiceContext* context) : context_(*context) {}

  grpc::ServerUnaryReactor* GetServer(grpc::CallbackServerContext* call,
                                      const grpc::ByteBuffer* request_bytes,
                                      grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::GetServerRequest, v1::GetServerResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::GetServerRequest&, v1::GetServerResponse* response) {
          DescribeServer(response);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* GetUsage(grpc::CallbackServerContext* call,
                                     const grpc::ByteBuffer* request_bytes,
                                     grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::GetUsageRequest, v1::GetUsageResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::GetUsageRequest& request, v1::GetUsageResponse* response) -> absl::Status {
          if (!request.session_name().empty()) {
            SLUICE_ASSIGN_OR_RETURN(const SessionInfo info,
                                    context_.sessions().Describe(request.session_name()));
            AddUsage(info, response);
          } else {
            const int64_t max_sessions = context_.sessions().options().max_sessions;
            for (const SessionInfo& info : context_.sessions().List("", max_sessions)) {
              AddUsage(info, response);
            }
          }
          AddPools(context_.sessions().MemoryUsage(), response->mutable_memory());
          response->set_inflight_bytes(context_.admission().inflight_bytes());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* SetLogLevel(grpc::CallbackServerContext* call,
                                        const grpc::ByteBuffer* request_bytes,
                                        grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::SetLogLevelRequest, v1::SetLogLevelResponse>(
        context_, call, request_bytes, reply_bytes,
        [](const v1::SetLogLevelRequest& request,
           v1::SetLogLevelResponse* response) -> absl::Status {
          LogLevel level = LogLevel::kInfo;
          if (!ParseLogLevel(request.level(), &level)) {
            return InvalidField("level", request.level().empty() ? "empty" : request.level(),
                                "trace, debug, info, warning, error or off");
          }
          const LogLevel previous = sluice::SetLogLevel(level);
          response->set_previous_level(std::string(LogLevelName(previous)));
          return absl::OkStatus();
        });
  }

 private:
  void DescribeServer(v1::GetServerResponse* response) {
    response->set_version(kVersion);
    ToProto(context_.start_time(), response->mutable_start_time());
    const ServerDevice& device = context_.options().device;
    v1::DeviceDescription* const description = response->mutable_device();
    description->set_kind(device.kind);
    description->set_name(device.name);
    description->set_instruction_set(device.instruction_set);
    description->set_num_workers(device.num_workers);
    description->set_total_memory_bytes(device.total_memory_bytes);
    description->set_failure(std::string(context_.sessions().DeviceStatus().message()));
    v1::ServerLimits* const limits = response->mutable_limits();
    limits->set_max_message_bytes(context_.admission().max_message_bytes());
    limits->set_max_inflight_bytes(context_.admission().max_inflight_bytes());
    const SessionManagerOptions& sessions = context_.sessions().options();
    limits->set_max_sessions(sessions.max_sessions);
    limits->set_max_queued_calls_per_session(sessions.max_queued_calls_per_session);
    limits->set_max_tile_runs_per_session(sessions.max_tile_runs_per_session);
    AddPools(context_.sessions().MemoryUsage(), response->mutable_memory());
    response->set_rss_bytes(ResidentBytes());
  }

  ServiceContext& context_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewAdminService(ServiceContext* context) {
  return std::make_unique<AdminServiceImpl>(context);
}

}  // namespace sluice
