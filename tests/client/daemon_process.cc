#include "tests/client/daemon_process.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace sluice::client {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::abort();
}

// Not the test's own folder: the path of a socket has at most 107 bytes.
std::string MakeFolder() {
  std::string path = "/tmp/sluice-test-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) Die("cannot make a folder in /tmp");
  return path;
}

}  // namespace

DaemonProcess::DaemonProcess(const std::vector<std::string>& flags, const std::string& program)
    : folder_(MakeFolder()) {
  const std::string port_file = folder_ + "/port";
  std::vector<std::string> words = {program, "--listen_address=127.0.0.1:0",
                                    absl::StrCat("--port_file=", port_file),
                                    absl::StrCat("--unix_socket=", folder_, "/sluiced.sock")};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    // A test that crashes should not leave its daemon behind.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    execv(argv[0], argv.data());
    _exit(127);
  }
  const absl::Time deadline = absl::Now() + kStartTimeout;
  int port = 0;
  while (!(std::ifstream(port_file) >> port)) {
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) Die(program + " ended at once");
    if (absl::Now() > deadline) Die(program + " did not start");
    absl::SleepFor(absl::Milliseconds(10));
  }
  address_ = absl::StrCat("127.0.0.1:", port);
}

DaemonProcess::~DaemonProcess() {
  Stop();
  for (const char* name : {"/port", "/sluiced.sock"}) std::remove((folder_ + name).c_str());
  rmdir(folder_.c_str());
}

int DaemonProcess::Stop() {
  if (pid_ < 0) return -1;
  kill(pid_, SIGTERM);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace sluice::client
