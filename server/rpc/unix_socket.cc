#include "server/rpc/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

absl::Status SystemError(const std::string& path, absl::string_view what, int error) {
  return absl::FailedPreconditionError(
      absl::StrCat("unix socket ", path, ": ", what, ": ", std::strerror(error)));
}

// 0 where somebody listens, else the error of connecting.
int Connect(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int error =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
  close(fd);
  return error;
}

}  // namespace

absl::Status PrepareUnixSocket(const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("unix socket ", path, ": the path has ",
                                                   path.size(), " bytes; at most ",
                                                   sizeof(sockaddr_un::sun_path) - 1));
  }
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : SystemError(path, "cannot be looked at", errno);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("unix socket ", path, ": something that is no socket is there"));
  }
  const int error = Connect(path);
  // A full backlog is a sign of life as well.
  if (error == 0 || error == EAGAIN) {
    return absl::FailedPreconditionError(
        absl::StrCat("unix socket ", path, ": another process listens on it"));
  }
  if (error != ECONNREFUSED) return SystemError(path, "cannot be tried", error);
  if (unlink(path.c_str()) != 0) return SystemError(path, "cannot be removed", errno);
  return absl::OkStatus();
}

}  // namespace sluice
