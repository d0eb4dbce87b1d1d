// sluiced: reads its flags, wires device, sessions and server together, and serves until it is told
// to end.

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/device/device.h"
#include "server/base/logging.h"
#include "server/base/status_macros.h"
#include "server/base/version.h"
#include "server/config/flags.h"
#include "server/config/options.h"
#include "server/planted_faults.h"
#include "server/rpc/rpc_server.h"
#include "server/session/session_manager.h"

namespace sluice {
namespace {

// Of a daemon whose device has failed: an internal error, as sysexits.h counts.
constexpr int kDeviceFailedExit = 70;
// The process sends it to itself then: who sees a device fail may hold any lock, and the thread
// that waits for signals holds none.
constexpr int kDeviceFailedSignal = SIGUSR2;
// For the replies that say so, and for watchers of health.
constexpr absl::Duration kDeviceFailedGrace = absl::Milliseconds(1500);

SessionManagerOptions ManagerOptions(const DaemonOptions& options) {
  SessionManagerOptions to;
  to.hbm_budget_bytes = options.memory.hbm_budget_bytes;
  to.hbm_block_budget_bytes = options.memory.hbm_block_budget_bytes;
  to.host_budget_bytes = options.memory.host_budget_bytes;
  to.transfer_staging_bytes = options.memory.transfer_staging_bytes;
  to.max_sessions = options.limits.max_sessions;
  to.max_queued_calls_per_session = options.limits.max_queued_calls_per_session;
  to.max_tile_runs_per_session = options.limits.max_tile_runs_per_session;
  to.max_message_bytes = options.limits.max_message_bytes;
  return to;
}

RpcServerOptions ServerOptions(const DaemonOptions& options, const DeviceInfo& device) {
  RpcServerOptions to;
  to.listen_address = options.listen.listen_address;
  to.unix_socket = options.listen.unix_socket;
  to.max_message_bytes = options.limits.max_message_bytes;
  to.max_inflight_bytes = options.limits.max_inflight_bytes;
  to.device = {device.kind, device.name, device.instruction_set, device.num_workers,
               device.total_memory_bytes};
  return to;
}

// Written under another name first: whoever waits for the file never sees half of it.
absl::Status WritePortFile(const std::string& path, int port) {
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = absl::StrCat(path, ".new");
  std::ofstream file(temporary, std::ios::trunc);
  file << port << "\n";
  file.close();
  if (file.fail() || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cannot write --port_file ", path));
  }
  return absl::OkStatus();
}

// Takes as many descriptors as the machine allows: a listener that runs out of them stops to
// accept, and connections are cheap. What is left is the operator's to raise.
void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    LogWarning("the limit of open files could not be raised",
               {{"limit", static_cast<int64_t>(limit.rlim_max)}});
  }
}

void OnDeviceFailure(const absl::Status&) { kill(getpid(), kDeviceFailedSignal); }

// Nothing that waits for the device comes to an end by itself any more, so nothing is torn down.
[[noreturn]] void EndWithFailedDevice(const absl::Status& failure, RpcServer* server) {
  server->ReportNotServing();
  LogError("the device failed; the daemon ends and has to be started again",
           {{"failure", failure.message()},
            {"grace_ms", absl::ToInt64Milliseconds(kDeviceFailedGrace)},
            {"exit_code", kDeviceFailedExit}});
  absl::SleepFor(kDeviceFailedGrace);
  std::_Exit(kDeviceFailedExit);
}

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DaemonOptions& options) {
  if (options.device.device != DeviceChoice::kCpu) {
    CudaDeviceOptions cuda;
    cuda.hbm_budget_bytes = options.memory.hbm_budget_bytes;
    cuda.on_fatal = OnDeviceFailure;
    auto device = CreateCudaDevice(cuda);
    if (device.ok() || options.device.device == DeviceChoice::kCuda ||
        !absl::IsUnavailable(device.status())) {
      return device;
    }
    LogInfo("no GPU is used", {{"why", device.status().message()}});
  }
  return CreateCpuDevice({.num_threads = options.device.num_threads});
}

absl::Status Serve(const DaemonOptions& options, const sigset_t& end_signals) {
  const absl::Time start = absl::Now();
  RaiseFileLimit();
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Device> plain_device, CreateDevice(options));
  const std::unique_ptr<Device> device = PlantFaults(std::move(plain_device), OnDeviceFailure);
  const absl::Time device_ready = absl::Now();
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<SessionManager> manager,
                          SessionManager::Create(ManagerOptions(options), device.get()));
  const absl::Time memory_ready = absl::Now();
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> server,
                          RpcServer::Start(ServerOptions(options, device->info()), manager.get()));
  SLUICE_RETURN_IF_ERROR(WritePortFile(options.listen.port_file, server->port()));
  LogInfo("serving", {{"version", kVersion},
                      {"listen_address", options.listen.listen_address},
                      {"port", server->port()},
                      {"unix_socket", options.listen.unix_socket},
                      {"device", device->info().kind},
                      {"device_name", device->info().name},
                      {"hbm_budget_bytes", manager->options().hbm_budget_bytes},
                      {"hbm_block_budget_bytes", manager->options().hbm_block_budget_bytes},
                      {"host_budget_bytes", manager->options().host_budget_bytes},
                      {"start_ms", absl::ToInt64Milliseconds(absl::Now() - start)},
                      {"device_ms", absl::ToInt64Milliseconds(device_ready - start)},
                      {"memory_ms", absl::ToInt64Milliseconds(memory_ready - device_ready)}});
  int signal = 0;
  do {
    sigwait(&end_signals, &signal);
    if (!device->status().ok()) EndWithFailedDevice(device->status(), server.get());
  } while (signal == kDeviceFailedSignal);
  LogInfo("shutting down",
          {{"signal", signal}, {"grace_ms", absl::ToInt64Milliseconds(options.shutdown_grace)}});
  server->Shutdown(options.shutdown_grace);
  manager->Shutdown();
  if (!device->status().ok()) EndWithFailedDevice(device->status(), server.get());
  LogInfo("bye");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  if (line.exit_code.has_value()) {
    std::fputs(line.output.c_str(), *line.exit_code == 0 ? stdout : stderr);
    return *line.exit_code;
  }
  SetLogFormat(line.options.log.log_format);
  SetLogLevel(line.options.log.log_level);
  // Before any thread is started, so that none of them takes the signals that are waited for.
  sigset_t end_signals;
  sigemptyset(&end_signals);
  sigaddset(&end_signals, SIGTERM);
  sigaddset(&end_signals, SIGINT);
  sigaddset(&end_signals, kDeviceFailedSignal);
  pthread_sigmask(SIG_BLOCK, &end_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = Serve(line.options, end_signals);
  if (!status.ok()) {
    LogError("cannot serve", {{"status", status.ToString()}});
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
