#include "server/config/flags.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/status_macros.h"
#include "server/base/version.h"
#include "server/config/addresses.h"

ABSL_FLAG(
    std::string, listen_address, "127.0.0.1:7464",
    "HOST:PORT to serve gRPC on; port 0 takes any free one; empty: no TCP. Any address but "
    "loopback needs --insecure, since nothing is encrypted and nobody is asked who they are.");
ABSL_FLAG(bool, insecure, false, "Allow --listen_address to be other than loopback.");
ABSL_FLAG(std::string, unix_socket, "default",
          "Path of a Unix socket to serve gRPC on, mode 0660; empty: none. default: "
          "sluice/sluiced.sock in $XDG_RUNTIME_DIR, else in /run, else in /tmp/sluice-UID.");
ABSL_FLAG(std::string, port_file, "",
          "File that gets the TCP port once the daemon serves; empty: none.");
ABSL_FLAG(std::string, device, "auto",
          "What computes: cuda, the first GPU that CUDA_VISIBLE_DEVICES leaves; cpu; or auto, the "
          "GPU where one can be used and else the CPU.");
ABSL_FLAG(
    int64_t, hbm_budget_bytes, 0,
    "Device memory that the daemon takes; what its parts lose to rounding, at most a sixteenth and "
    "128 MiB, may come on top. 0: nine tenths of the HBM that is free at start; on "
    "the CPU device a quarter of the machine's memory.");
ABSL_FLAG(int64_t, hbm_block_budget_bytes, -1,
          "What blocks may take of --hbm_budget_bytes; the rest is for projected keys, tables, "
          "states and workspaces. -1: three quarters; on the CPU device nothing.");
ABSL_FLAG(
    int64_t, host_budget_bytes, 0,
    "Pinned host memory for blocks; with a GPU it is taken at start. 0: half of the machine's "
    "memory, or of the control group's limit.");
ABSL_FLAG(
    int64_t, transfer_staging_bytes, 0,
    "Pinned host memory that offloads and fetches pass through on a GPU, taken at start, beside "
    "--host_budget_bytes; at least --max_message_bytes. 0: 512 MiB, or two messages where that "
    "is more. The CPU device needs none.");
ABSL_FLAG(int32_t, num_threads, 0, "Threads of the CPU device. 0: one a core.");
ABSL_FLAG(int64_t, max_message_bytes, int64_t{64} << 20,
          "Largest message, in either direction: 1,024 .. 1 GiB.");
ABSL_FLAG(int64_t, max_inflight_bytes, int64_t{512} << 20,
          "Request bytes held at once, over all calls; at least --max_message_bytes.");
ABSL_FLAG(int64_t, max_sessions, 256, "Sessions, attached and detached: 1 or more.");
ABSL_FLAG(int64_t, max_queued_calls_per_session, 256,
          "Calls of one session that wait for or run on the device: 1 or more.");
ABSL_FLAG(int64_t, max_tile_runs_per_session, 64, "Tile runs of one session: 1 or more.");
ABSL_FLAG(int64_t, shutdown_grace_ms, 10'000,
          "After SIGTERM or SIGINT, how long work in hand may take before it is cancelled.");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warning, error or off.");
ABSL_FLAG(std::string, log_format, "text", "text or json, one line each, to standard error.");

namespace sluice {
namespace {

constexpr int kUsageError = 2;

// In the order of --help.
constexpr const char* kFlagNames[] = {"listen_address",
                                      "insecure",
                                      "unix_socket",
                                      "port_file",
                                      "device",
                                      "hbm_budget_bytes",
                                      "hbm_block_budget_bytes",
                                      "host_budget_bytes",
                                      "transfer_staging_bytes",
                                      "num_threads",
                                      "max_message_bytes",
                                      "max_inflight_bytes",
                                      "max_sessions",
                                      "max_queued_calls_per_session",
                                      "max_tile_runs_per_session",
                                      "shutdown_grace_ms",
                                      "log_level",
                                      "log_format"};

absl::CommandLineFlag* FindFlag(absl::string_view name) {
  for (const char* known : kFlagNames) {
    if (name == known) return absl::FindCommandLineFlag(name);
  }
  return nullptr;
}

std::string Help() {
  std::string help =
      "sluiced keeps LLM KV caches and computes decode attention where they are.\n\n"
      "Usage: sluiced [--FLAG=VALUE ...]\n\n"
      "  --help\n      This text.\n  --version\n      The version.\n";
  for (const char* name : kFlagNames) {
    const absl::CommandLineFlag& flag = *FindFlag(name);
    absl::StrAppend(&help, "  --", name, "=", flag.DefaultValue(), "\n      ", flag.Help(), "\n");
  }
  return help;
}

// --name=value, --name value; --name and --noname for switches.
absl::Status SetFlags(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--") && !absl::ConsumePrefix(&argument, "-")) {
      return absl::InvalidArgumentError(absl::StrCat("'", argv[i], "' is no flag"));
    }
    const size_t equals = argument.find('=');
    const bool has_value = equals != absl::string_view::npos;
    const absl::string_view name = argument.substr(0, equals);
    std::string value(has_value ? argument.substr(equals + 1) : "");
    absl::CommandLineFlag* flag = FindFlag(name);
    if (flag == nullptr && !has_value && absl::StartsWith(name, "no")) {
      flag = FindFlag(name.substr(2));
      if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
      value = "false";
    } else if (flag != nullptr && !has_value) {
      if (flag->IsOfType<bool>()) {
        value = "true";
      } else if (i + 1 < argc) {
        value = argv[++i];
      } else {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
      }
    }
    if (flag == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("there is no flag --", name));
    }
    std::string error;
    if (!flag->ParseFrom(value, &error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag->Name(), "=", value, " is not a value that it can have"));
    }
  }
  return absl::OkStatus();
}

absl::Status AtLeast(absl::string_view name, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " is ", value, "; allowed: ", least, " or more"));
}

absl::Status ReadLimits(LimitOptions* limits) {
  constexpr int64_t kLeastMessageBytes = 1024;
  constexpr int64_t kMostMessageBytes = int64_t{1} << 30;
  limits->max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  limits->max_inflight_bytes = absl::GetFlag(FLAGS_max_inflight_bytes);
  limits->max_sessions = absl::GetFlag(FLAGS_max_sessions);
  limits->max_queued_calls_per_session = absl::GetFlag(FLAGS_max_queued_calls_per_session);
  limits->max_tile_runs_per_session = absl::GetFlag(FLAGS_max_tile_runs_per_session);
  if (limits->max_message_bytes < kLeastMessageBytes ||
      limits->max_message_bytes > kMostMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_message_bytes is ", limits->max_message_bytes,
                     "; allowed: ", kLeastMessageBytes, "..", kMostMessageBytes));
  }
  if (limits->max_inflight_bytes < limits->max_message_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_inflight_bytes is ", limits->max_inflight_bytes,
                     "; allowed: --max_message_bytes (", limits->max_message_bytes, ") or more"));
  }
  SLUICE_RETURN_IF_ERROR(AtLeast("max_sessions", limits->max_sessions, 1));
  SLUICE_RETURN_IF_ERROR(
      AtLeast("max_queued_calls_per_session", limits->max_queued_calls_per_session, 1));
  return AtLeast("max_tile_runs_per_session", limits->max_tile_runs_per_session, 1);
}

absl::Status ReadListen(ListenOptions* listen) {
  listen->listen_address = absl::GetFlag(FLAGS_listen_address);
  listen->port_file = absl::GetFlag(FLAGS_port_file);
  SLUICE_RETURN_IF_ERROR(CheckListenAddress(listen->listen_address, absl::GetFlag(FLAGS_insecure)));
  listen->unix_socket = absl::GetFlag(FLAGS_unix_socket);
  if (listen->unix_socket == "default") {
    SLUICE_ASSIGN_OR_RETURN(listen->unix_socket, DefaultUnixSocket());
  }
  if (listen->listen_address.empty() && listen->unix_socket.empty()) {
    return absl::InvalidArgumentError(
        "--listen_address and --unix_socket are both empty; there is nothing to listen on");
  }
  if (listen->listen_address.empty() && !listen->port_file.empty()) {
    return absl::InvalidArgumentError("--port_file needs a --listen_address");
  }
  return absl::OkStatus();
}

absl::Status ReadFlags(DaemonOptions* options) {
  SLUICE_RETURN_IF_ERROR(ReadLimits(&options->limits));
  options->memory.hbm_budget_bytes = absl::GetFlag(FLAGS_hbm_budget_bytes);
  options->memory.host_budget_bytes = absl::GetFlag(FLAGS_host_budget_bytes);
  options->memory.hbm_block_budget_bytes = absl::GetFlag(FLAGS_hbm_block_budget_bytes);
  const int64_t staging_bytes = absl::GetFlag(FLAGS_transfer_staging_bytes);
  options->memory.transfer_staging_bytes = staging_bytes;
  options->device.num_threads = absl::GetFlag(FLAGS_num_threads);
  const int64_t grace_ms = absl::GetFlag(FLAGS_shutdown_grace_ms);
  options->shutdown_grace = absl::Milliseconds(grace_ms);
  SLUICE_RETURN_IF_ERROR(AtLeast("hbm_budget_bytes", options->memory.hbm_budget_bytes, 0));
  SLUICE_RETURN_IF_ERROR(
      AtLeast("hbm_block_budget_bytes", options->memory.hbm_block_budget_bytes, -1));
  SLUICE_RETURN_IF_ERROR(AtLeast("host_budget_bytes", options->memory.host_budget_bytes, 0));
  if (staging_bytes != 0 && staging_bytes < options->limits.max_message_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("--transfer_staging_bytes is ", staging_bytes,
                                                   "; allowed: 0, or --max_message_bytes (",
                                                   options->limits.max_message_bytes, ") or more"));
  }
  const std::string device = absl::GetFlag(FLAGS_device);
  if (device == "cuda") {
    options->device.device = DeviceChoice::kCuda;
  } else if (device == "cpu") {
    options->device.device = DeviceChoice::kCpu;
  } else if (device != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device is '", device, "'; allowed: auto, cpu or cuda"));
  }
  SLUICE_RETURN_IF_ERROR(AtLeast("num_threads", options->device.num_threads, 0));
  SLUICE_RETURN_IF_ERROR(AtLeast("shutdown_grace_ms", grace_ms, 0));
  const std::string level = absl::GetFlag(FLAGS_log_level);
  if (!ParseLogLevel(level, &options->log.log_level)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--log_level is '", level, "'; allowed: trace, debug, info, warning, error or off"));
  }
  const std::string format = absl::GetFlag(FLAGS_log_format);
  if (format != "text" && format != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("--log_format is '", format, "'; allowed: text or json"));
  }
  options->log.log_format = format == "json" ? LogFormat::kJson : LogFormat::kText;
  // Last, since it makes the socket's folder.
  return ReadListen(&options->listen);
}

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  CommandLine line;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h" || argument == "-help") {
      line.exit_code = 0;
      line.output = Help();
      return line;
    }
    if (argument == "--version" || argument == "-version") {
      line.exit_code = 0;
      line.output = absl::StrCat("sluiced ", kVersion, "\n");
      return line;
    }
  }
  absl::Status status = SetFlags(argc, argv);
  if (status.ok()) status = ReadFlags(&line.options);
  if (!status.ok()) {
    line.exit_code = kUsageError;
    line.output = absl::StrCat("sluiced: ", status.message(), "\nTry sluiced --help.\n");
  }
  return line;
}

}  // namespace sluice
