// Everything that the daemon can be told, as plain values; flags.h fills it from the command line.
//
// Only what one part needs is in that part's struct; main.cc hands each part its own.

#ifndef SERVER_CONFIG_OPTIONS_H_
#define SERVER_CONFIG_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "server/base/logging.h"

namespace sluice {

struct ListenOptions {
  std::string listen_address = "127.0.0.1:7464";
  // Resolved: never "default". Empty: none.
  std::string unix_socket;
  // Empty: none.
  std::string port_file;
};

struct LimitOptions {
  int64_t max_message_bytes = int64_t{64} << 20;
  int64_t max_inflight_bytes = int64_t{512} << 20;
  int64_t max_sessions = 256;
  int64_t max_queued_calls_per_session = 256;
  int64_t max_tile_runs_per_session = 64;
};

struct MemoryOptions {
  // 0 (blocks: -1): chosen by the daemon.
  int64_t hbm_budget_bytes = 0;
  int64_t hbm_block_budget_bytes = -1;
  int64_t host_budget_bytes = 0;
  int64_t transfer_staging_bytes = 0;
};

enum class DeviceChoice { kAuto, kCpu, kCuda };

struct DeviceOptions {
  DeviceChoice device = DeviceChoice::kAuto;
  // Of the CPU device; 0: one a core.
  int num_threads = 0;
};

struct LogOptions {
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
};

struct DaemonOptions {
  ListenOptions listen;
  LimitOptions limits;
  MemoryOptions memory;
  DeviceOptions device;
  LogOptions log;
  absl::Duration shutdown_grace = absl::Seconds(10);
};

}  // namespace sluice

#endif  // SERVER_CONFIG_OPTIONS_H_
