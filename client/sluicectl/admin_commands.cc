// The daemon itself: server, usage, log-level, health, wait-ready.

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/format.h"
#include "client/status.h"
#include "grpc/health/v1/health.pb.h"

namespace sluice::ctl {
namespace {

template <typename Pools>
std::string MemoryTable(const Pools& pools) {
  Table table({"MEMORY", "BUDGET", "USED", "FREE"});
  for (const v1::MemoryPool& pool : pools) {
    table.Add({pool.name(), HumanBytes(pool.budget_bytes()), HumanBytes(pool.used_bytes()),
               HumanBytes(pool.budget_bytes() - pool.used_bytes())});
  }
  return table.Render();
}

std::string ServerText(const v1::GetServerResponse& response) {
  const v1::DeviceDescription& device = response.device();
  const v1::ServerLimits& limits = response.limits();
  Fields fields;
  fields.Add("version", response.version());
  fields.Add("started", HumanTime(response.start_time(), absl::Now()));
  fields.Add("device", absl::StrCat(device.kind(), " (", device.name(), ")"));
  fields.Add("instruction set", device.instruction_set());
  fields.Add("workers", absl::StrCat(device.num_workers()));
  fields.Add("device memory", HumanBytes(device.total_memory_bytes()));
  if (!device.failure().empty()) fields.Add("device failure", device.failure());
  fields.Add("resident memory", HumanBytes(response.rss_bytes()));
  Table limit_table({"LIMIT", "VALUE"});
  limit_table.Add({"max_message_bytes", HumanBytes(limits.max_message_bytes())});
  limit_table.Add({"max_inflight_bytes", HumanBytes(limits.max_inflight_bytes())});
  limit_table.Add({"max_sessions", absl::StrCat(limits.max_sessions())});
  limit_table.Add(
      {"max_queued_calls_per_session", absl::StrCat(limits.max_queued_calls_per_session())});
  limit_table.Add({"max_tile_runs_per_session", absl::StrCat(limits.max_tile_runs_per_session())});
  return absl::StrCat(fields.Render(), "\n", MemoryTable(response.memory()), "\n",
                      limit_table.Render());
}

absl::Status RunServer(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  auto response = invocation.client().GetServer(invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] { return ServerText(*response); });
}

std::string UsageText(const v1::GetUsageResponse& response) {
  std::string text = MemoryTable(response.memory());
  absl::StrAppend(&text, "\nrequest bytes held now: ", HumanBytes(response.inflight_bytes()), "\n");
  if (response.sessions().empty()) return absl::StrCat(text, "\nno sessions\n");
  Table table({"SESSION", "STATE", "BLOCKS", "ITEM", "RESERVED", "USED"});
  for (const v1::SessionUsage& session : response.sessions()) {
    // The session stands on its first line alone; that is what the eye looks for.
    std::vector<std::string> start = {session.name(), ShortName(session.state()),
                                      absl::StrCat(session.num_blocks())};
    if (session.items().empty()) table.Add({start[0], start[1], start[2], "-", "-", "-"});
    for (const v1::MemoryItem& item : session.items()) {
      table.Add({start[0], start[1], start[2], item.name(), HumanBytes(item.reserved_bytes()),
                 HumanBytes(item.used_bytes())});
      start = {"", "", ""};
    }
  }
  return absl::StrCat(text, "\n", table.Render());
}

absl::Status RunUsage(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  auto response =
      invocation.client().GetUsage(invocation.args().Get("session"), invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] { return UsageText(*response); });
}

absl::Status RunLogLevel(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  const std::string& level = invocation.args().positional()[0];
  auto response = invocation.client().SetLogLevel(level, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("log level is ", level, " (was ", response->previous_level(), ")\n");
  });
}

absl::Status RunHealth(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0, /*more=*/true); !status.ok()) return status;
  const auto& operands = invocation.args().positional();
  if (operands.size() > 1) return UsageError("takes one service, or none");
  const std::string service = operands.empty() ? "" : operands[0];
  auto serving = invocation.client().CheckHealth(service, invocation.call_options());
  if (!serving.ok()) return serving.status();
  grpc::health::v1::HealthCheckResponse response;
  response.set_status(*serving ? grpc::health::v1::HealthCheckResponse::SERVING
                               : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  absl::Status printed = invocation.Print(
      response, [&] { return absl::StrCat(*serving ? "SERVING" : "NOT_SERVING", "\n"); });
  if (!printed.ok()) return printed;
  if (*serving) return absl::OkStatus();
  return absl::UnavailableError("the daemon runs, but does not serve now");
}

absl::Status RunWaitReady(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  absl::Status status = invocation.client().WaitReady(invocation.call_options().timeout);
  if (!status.ok()) return status;
  grpc::health::v1::HealthCheckResponse response;
  response.set_status(grpc::health::v1::HealthCheckResponse::SERVING);
  return invocation.Print(response, [] { return std::string("SERVING\n"); });
}

}  // namespace

std::vector<Command> AdminCommands() {
  return {
      {.path = "server",
       .operands = "",
       .summary = "Show the daemon's version, device, memory and limits",
       .details = "",
       .options = {},
       .examples = {"sluicectl server", "sluicectl server --output json"},
       .run = &RunServer},
      {.path = "usage",
       .operands = "",
       .summary = "Show memory by kind and by session",
       .details = "",
       .options = {{"session", "NAME", "only this session"}},
       .examples = {"sluicectl usage", "sluicectl usage --session scheduler-0/rank-0"},
       .run = &RunUsage},
      {.path = "log-level",
       .operands = "LEVEL",
       .summary = "Change the daemon's log level",
       .details =
           "LEVEL is trace, debug, info, warning, error or off. It lasts until the daemon ends.",
       .options = {},
       .examples = {"sluicectl log-level debug"},
       .run = &RunLogLevel},
      {.path = "health",
       .operands = "[SERVICE]",
       .summary = "Say whether the daemon, or one of its services, serves",
       .details = "Exits with 0 when it is SERVING, with 3 when it is not.",
       .options = {},
       .examples = {"sluicectl health", "sluicectl health sluice.v1.SwapService"},
       .run = &RunHealth},
      {.path = "wait-ready",
       .operands = "",
       .summary = "Wait until the daemon serves, at most for --timeout",
       .details = "Exits with 0 when it is SERVING, with 3 when it is not after the timeout.",
       .options = {},
       .examples = {"sluicectl wait-ready --timeout 1m"},
       .run = &RunWaitReady},
  };
}

}  // namespace sluice::ctl
