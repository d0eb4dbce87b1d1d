// The program itself: exit codes, the port file, and an end on SIGTERM and SIGINT.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/base/version.h"

namespace sluice {
namespace {

constexpr char kProgram[] = "server/sluiced";

class Sluiced {
 public:
  explicit Sluiced(std::vector<std::string> arguments) {
    output_ = absl::StrCat(::testing::TempDir(), "/output");
    arguments.insert(arguments.begin(), kProgram);
    pid_ = fork();
    if (pid_ != 0) return;
    const int fd = open(output_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(fd, 1);
    dup2(fd, 2);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(kProgram, argv.data());
    _exit(127);
  }
  void Signal(int signal) { kill(pid_, signal); }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string Output() const {
    std::ifstream file(output_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  pid_t pid_ = 0;
  std::string output_;
};

TEST(Sluiced, SaysItsVersion) {
  Sluiced sluiced({"--version"});
  EXPECT_EQ(sluiced.Wait(), 0);
  EXPECT_EQ(sluiced.Output(), absl::StrCat("sluiced ", kVersion, "\n"));
}

TEST(Sluiced, AWrongFlagIsExitCode2) {
  Sluiced sluiced({"--max_sessions=none"});
  EXPECT_EQ(sluiced.Wait(), 2);
  EXPECT_NE(sluiced.Output().find("--max_sessions=none"), std::string::npos);
}

TEST(Sluiced, EndsCleanlyOnASignal) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string port_file = absl::StrCat(::testing::TempDir(), "/port");
    unlink(port_file.c_str());
    Sluiced sluiced({"--listen_address=127.0.0.1:0", "--unix_socket=", "--port_file", port_file,
                     "--log_format=json", "--num_threads=1"});
    int port = 0;
    for (int i = 0; i < 1000 && port == 0; ++i) {
      absl::SleepFor(absl::Milliseconds(10));
      std::ifstream(port_file) >> port;
    }
    EXPECT_GT(port, 0) << sluiced.Output();
    sluiced.Signal(signal);
    EXPECT_EQ(sluiced.Wait(), 0);
    const std::string output = sluiced.Output();
    EXPECT_NE(output.find(absl::StrCat("\"port\":", port)), std::string::npos) << output;
    EXPECT_NE(output.find("\"message\":\"shutting down\""), std::string::npos) << output;
  }
}

}  // namespace
}  // namespace sluice
