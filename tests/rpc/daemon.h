// A whole daemon in the test's process, reached over a real socket: CPU device, sessions, server,
// and stubs. With SLUICE_TEST_STRICT_DEVICE in the environment the device is strict about memory,
// as a GPU is (tests/base/strict_device.h).
//
//   Daemon daemon;
//   const v1::SessionHandle handle = daemon.Open("a");
//   v1::DecodeStepResponse response;
//   ASSERT_TRUE(Invoke(*daemon.attention, &v1::AttentionService::Stub::DecodeStep, request,
//   &response).ok());

#ifndef TESTS_RPC_DAEMON_H_
#define TESTS_RPC_DAEMON_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/device/device.h"
#include "server/base/error.h"
#include "server/rpc/rpc_server.h"
#include "server/session/session_manager.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "sluice/v1/attention.grpc.pb.h"
#include "sluice/v1/sequence.grpc.pb.h"
#include "sluice/v1/session.grpc.pb.h"
#include "sluice/v1/swap.grpc.pb.h"
#include "tests/base/test_device.h"

namespace sluice {

struct DaemonOptions {
  SessionManagerOptions sessions;
  RpcServerOptions rpc;
  int num_threads = 2;

  DaemonOptions() {
    rpc.listen_address = "127.0.0.1:0";
    sessions.hbm_budget_bytes = int64_t{1} << 30;
    sessions.host_budget_bytes = int64_t{1} << 30;
  }
  DaemonOptions&& MaxMessageBytes(int64_t bytes) && {
    rpc.max_message_bytes = bytes;
    sessions.max_message_bytes = bytes;
    return std::move(*this);
  }
};

// What grpc.health.v1 knows: the whole server, and each service.
inline constexpr const char* kHealthServices[] = {
    "",
    "sluice.v1.SessionService",
    "sluice.v1.SequenceService",
    "sluice.v1.SwapService",
    "sluice.v1.AttentionService",
    "sluice.v1.AdminService",
};

// A small geometry: 2 layers, 4 query heads over 2 kv heads of 32, blocks of 16 tokens, rank 16, 64
// blocks.
v1::SessionSpec SmallSpec(const std::string& name);

class Daemon {
 public:
  explicit Daemon(DaemonOptions options = DaemonOptions());
  ~Daemon();

  v1::SessionHandle Open(const std::string& name) { return Open(SmallSpec(name)); }
  v1::SessionHandle Open(const v1::SessionSpec& spec);

  TestDevice& device() { return *device_; }
  SessionManager& manager() { return *manager_; }
  RpcServer& server() { return *server_; }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() const;

  std::unique_ptr<v1::SessionService::Stub> session;
  std::unique_ptr<v1::SequenceService::Stub> sequence;
  std::unique_ptr<v1::SwapService::Stub> swap;
  std::unique_ptr<v1::AttentionService::Stub> attention;
  std::unique_ptr<v1::AdminService::Stub> admin;

 private:
  std::unique_ptr<TestDevice> device_;
  std::unique_ptr<SessionManager> manager_;
  std::unique_ptr<RpcServer> server_;
};

// Holds every worker of the device, so that what is submitted stays queued or in flight until
// Release.
class DeviceStall {
 public:
  explicit DeviceStall(Device& device);
  ~DeviceStall() { Release(); }
  void Release();

 private:
  struct Holder final : HostTask {
    explicit Holder(DeviceStall* stall) : stall(stall) {}
    void Run() override;
    DeviceStall* const stall;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_held_ = 0;
  bool released_ = false;
  std::vector<std::unique_ptr<Holder>> holders_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

// A unary call with a deadline far away.
template <typename Stub, typename Request, typename Response>
grpc::Status Invoke(Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return (stub.*method)(&context, request, response);
}

// Polls until `condition` holds; false after ten seconds.
template <typename Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return condition();
}

// Errors.

google::rpc::Status DetailsOf(const grpc::Status& status);
// ErrorInfo.metadata[key], or "".
std::string Metadata(const google::rpc::Status& status, const std::string& key);
bool HasRetryInfo(const google::rpc::Status& status);

// Checks code, message, ErrorInfo with its domain, ResourceInfo on NOT_FOUND, the field violation
// where there is a field; and notes that the reason was met.
void ExpectRefused(const google::rpc::Status& status, grpc::StatusCode code, Reason reason,
                   const std::string& field = "");
void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, Reason reason,
                   const std::string& field = "");
// The reasons that ExpectRefused has met in this program.
std::vector<std::string> ReasonsMet();

}  // namespace sluice

#endif  // TESTS_RPC_DAEMON_H_
