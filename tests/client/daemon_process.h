// A sluiced of its own for a test: started on a free port, ended with SIGTERM.
//
//   DaemonProcess daemon;
//   auto client = Client::Create({.address = daemon.address()});
//
// Threads: one. Ownership: the destructor ends the process and waits for it.

#ifndef TESTS_CLIENT_DAEMON_PROCESS_H_
#define TESTS_CLIENT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace sluice::client {

class DaemonProcess {
 public:
  // Where Bazel puts the daemon for a test that has it as data.
  static constexpr char kDaemon[] = "server/sluiced";

  // Aborts the test program when the daemon does not come up. `flags` are added to the daemon's.
  // Another `program` must know --listen_address, --port_file and --unix_socket as the daemon does.
  explicit DaemonProcess(const std::vector<std::string>& flags = {},
                         const std::string& program = kDaemon);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // "127.0.0.1:PORT".
  const std::string& address() const { return address_; }
  // "unix:PATH", the other way to it.
  std::string unix_address() const { return "unix:" + folder_ + "/sluiced.sock"; }

  // Sends SIGTERM and waits; the exit status, or -1 where a signal ended it.
  int Stop();

 private:
  std::string folder_;
  std::string address_;
  pid_t pid_ = -1;
};

}  // namespace sluice::client

#endif  // TESTS_CLIENT_DAEMON_PROCESS_H_
