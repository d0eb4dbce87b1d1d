// What sluicectl says and how it ends where no daemon is needed.

#include "client/sluicectl/app.h"

#include <cstdlib>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace sluice::ctl {
namespace {

struct Result {
  int exit_code;
  std::string out;
  std::string err;
};

Result RunWords(absl::string_view words) {
  const std::vector<std::string> split = absl::StrSplit(words, ' ', absl::SkipEmpty());
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunSluicectl(split, out, err);
  return {exit_code, out.str(), err.str()};
}

constexpr const char* kCommands[] = {"server",
                                     "usage",
                                     "log-level",
                                     "health",
                                     "wait-ready",
                                     "sessions list",
                                     "sessions get",
                                     "sessions open",
                                     "sessions close",
                                     "sequences list",
                                     "sequences put",
                                     "sequences fork",
                                     "sequences truncate",
                                     "sequences release",
                                     "blocks list",
                                     "blocks describe",
                                     "blocks find",
                                     "blocks drop",
                                     "offload",
                                     "fetch",
                                     "score"};

TEST(Sluicectl, HelpOfEveryCommandHasAnExample) {
  for (const std::string command : kCommands) {
    const Result help = RunWords("help " + command);
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_TRUE(absl::StrContains(help.out, "usage: sluicectl " + command)) << help.out;
    EXPECT_TRUE(absl::StrContains(help.out, "examples\n  sluicectl " + command)) << help.out;
    EXPECT_EQ(RunWords(command + " --help").out, help.out);
    EXPECT_TRUE(absl::StrContains(RunWords("help").out, command)) << command;
  }
}

TEST(Sluicectl, HelpListsExitCodes) {
  EXPECT_TRUE(absl::StrContains(RunWords("help").out, "exit codes\n  0  done"));
  EXPECT_EQ(RunWords("--help").out, RunWords("help").out);
}

TEST(Sluicectl, HelpOfAGroup) {
  EXPECT_TRUE(absl::StrContains(RunWords("help sessions").out, "sessions open"));
  EXPECT_FALSE(absl::StrContains(RunWords("help sessions").out, "blocks drop"));
  EXPECT_EQ(RunWords("sessions").exit_code, 2);
  EXPECT_TRUE(absl::StrContains(RunWords("sessions").err, "sessions open"));
}

TEST(Sluicectl, UsageErrorsAreTwo) {
  for (const char* words :
       {"", "nope", "help nope", "server extra", "server --nope", "sessions get", "sessions nope",
        "server --output yaml", "server --timeout soon", "server --timeout 0s", "blocks list",
        "sequences put x --session s", "sessions close a",
        "sessions close a --keep-data --delete-data", "score --session s",
        "score --session s --q q.npy", "score --session s --q q.npy --sequence 1 --kind best",
        "score --session s --q /nope.npy --sequence 1", "blocks drop 3-1 --session s"}) {
    const Result result = RunWords(words);
    EXPECT_EQ(result.exit_code, 2) << words << "\n" << result.err;
    EXPECT_EQ(result.out, "") << words;
    EXPECT_NE(result.err, "") << words;
  }
  EXPECT_NE(RunWords("--target 127.0.0.1:1 server").err.find("unknown option --target"),
            std::string::npos)
      << "and not an unknown command";
}

TEST(Sluicectl, UsageErrorPointsToHelp) {
  EXPECT_EQ(RunWords("blocks list").err,
            "sluicectl: --session NAME is required\n"
            "  hint: `sluicectl help blocks list` shows what is allowed\n");
}

TEST(Sluicectl, UnreachableIsThree) {
  for (const char* words :
       {"--address unix:/nope server", "server --address unix:/nope",
        "wait-ready --address=unix:/nope --timeout 300ms", "sessions get a --address unix:/nope"}) {
    const Result result = RunWords(words);
    EXPECT_EQ(result.exit_code, 3) << words << "\n" << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "hint: ")) << result.err;
  }
}

TEST(Sluicectl, AddressFromTheEnvironment) {
  ASSERT_EQ(setenv("SLUICE_ADDRESS", "unix:/from-environment", 1), 0);
  EXPECT_TRUE(absl::StrContains(RunWords("server").err, "unix:/from-environment"));
  EXPECT_TRUE(absl::StrContains(RunWords("server --address unix:/nope").err, "unix:/nope"));
  unsetenv("SLUICE_ADDRESS");
}

}  // namespace
}  // namespace sluice::ctl
