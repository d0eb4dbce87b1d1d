#include "server/config/flags.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace sluice {
namespace {

CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), {"sluiced", "--unix_socket="});
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

// Flags keep their values, so this comes before anything sets one.
TEST(Flags, Defaults) {
  const CommandLine line = Parse({});
  ASSERT_FALSE(line.exit_code.has_value()) << line.output;
  const DaemonOptions defaults;
  EXPECT_EQ(line.options.listen.listen_address, "127.0.0.1:7464");
  EXPECT_EQ(line.options.listen.unix_socket, "");
  EXPECT_EQ(line.options.limits.max_message_bytes, 64 << 20);
  EXPECT_EQ(line.options.limits.max_inflight_bytes, defaults.limits.max_inflight_bytes);
  EXPECT_EQ(line.options.limits.max_sessions, defaults.limits.max_sessions);
  EXPECT_EQ(line.options.limits.max_queued_calls_per_session,
            defaults.limits.max_queued_calls_per_session);
  EXPECT_EQ(line.options.limits.max_tile_runs_per_session,
            defaults.limits.max_tile_runs_per_session);
  EXPECT_EQ(line.options.shutdown_grace, absl::Seconds(10));
  EXPECT_EQ(line.options.log.log_level, LogLevel::kInfo);
}

TEST(Flags, HelpAndVersion) {
  const CommandLine help = Parse({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* name : {"--listen_address", "--max_inflight_bytes", "--log_format"}) {
    EXPECT_NE(help.output.find(name), std::string::npos) << name;
  }
  EXPECT_EQ(Parse({"--version"}).exit_code, 0);
}

TEST(Flags, EveryWayOfWritingThem) {
  const CommandLine line =
      Parse({"--listen_address", "0.0.0.0:0", "--insecure", "-num_threads=3", "--max_sessions=2",
             "--hbm_budget_bytes=1000000", "--log_format=json", "--log_level", "debug",
             "--port_file=/tmp/port", "--shutdown_grace_ms=5", "--device=cuda",
             "--hbm_block_budget_bytes=1000", "--transfer_staging_bytes=100000000"});
  ASSERT_FALSE(line.exit_code.has_value()) << line.output;
  EXPECT_EQ(line.options.listen.listen_address, "0.0.0.0:0");
  EXPECT_EQ(line.options.device.num_threads, 3);
  EXPECT_EQ(line.options.limits.max_sessions, 2);
  EXPECT_EQ(line.options.memory.hbm_budget_bytes, 1'000'000);
  EXPECT_EQ(line.options.memory.hbm_block_budget_bytes, 1'000);
  EXPECT_EQ(line.options.device.device, DeviceChoice::kCuda);
  EXPECT_EQ(line.options.memory.transfer_staging_bytes, 100'000'000);
  EXPECT_EQ(line.options.log.log_format, LogFormat::kJson);
  EXPECT_EQ(line.options.log.log_level, LogLevel::kDebug);
  EXPECT_EQ(line.options.listen.port_file, "/tmp/port");
  EXPECT_EQ(line.options.shutdown_grace, absl::Milliseconds(5));
  EXPECT_EQ(Parse({"--noinsecure"}).exit_code, 2);  // the address needs it
  EXPECT_FALSE(Parse({"--listen_address=127.0.0.1:0"}).exit_code.has_value());
}

TEST(Flags, WrongOnesSayWhatIsWrong) {
  struct Case {
    std::vector<const char*> arguments;
    const char* says;
  };
  for (const Case& c : std::vector<Case>{
           {{"--bogus=1"}, "--bogus"},
           {{"serve"}, "'serve'"},
           {{"--nomax_sessions"}, "--nomax_sessions"},
           {{"--max_sessions"}, "needs a value"},
           {{"--max_sessions=many"}, "--max_sessions=many"},
           {{"--max_sessions=0"}, "1 or more"},
           {{"--max_sessions=2", "--max_queued_calls_per_session=0"}, "1 or more"},
           {{"--max_queued_calls_per_session=1", "--max_tile_runs_per_session=-1"}, "1 or more"},
           {{"--max_tile_runs_per_session=1", "--max_message_bytes=1"}, "1024.."},
           {{"--max_message_bytes=1000000", "--max_inflight_bytes=999999"}, "--max_message_bytes"},
           {{"--max_inflight_bytes=1000000", "--hbm_budget_bytes=-1"}, "0 or more"},
           {{"--hbm_budget_bytes=0", "--hbm_block_budget_bytes=-2"}, "-1 or more"},
           {{"--hbm_block_budget_bytes=-1", "--host_budget_bytes=-1"}, "0 or more"},
           {{"--host_budget_bytes=0", "--device=tpu"}, "auto, cpu or cuda"},
           {{"--device=auto", "--transfer_staging_bytes=999999"}, "--max_message_bytes"},
           {{"--transfer_staging_bytes=-1"}, "--max_message_bytes"},
           {{"--transfer_staging_bytes=0", "--num_threads=-1"}, "0 or more"},
           {{"--num_threads=0", "--shutdown_grace_ms=-1"}, "0 or more"},
           {{"--shutdown_grace_ms=1", "--log_level=loud"}, "loud"},
           {{"--log_level=info", "--log_format=xml"}, "xml"},
           {{"--log_format=text", "--listen_address=10.0.0.1:1"}, "--insecure"},
           {{"--listen_address=", "--port_file="}, "nothing to listen on"},
       }) {
    const CommandLine line = Parse(c.arguments);
    EXPECT_EQ(line.exit_code, 2) << c.arguments[0];
    EXPECT_NE(line.output.find(c.says), std::string::npos) << line.output;
  }
}

}  // namespace
}  // namespace sluice
