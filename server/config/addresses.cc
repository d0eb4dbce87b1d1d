#include "server/config/addresses.h"

#include <arpa/inet.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

constexpr char kSocketName[] = "sluiced.sock";

bool IsLoopback(const std::string& host) {
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

// Whether the folder is there afterwards, made by us if need be.
bool MakeFolder(const std::string& path, mode_t mode) {
  return mkdir(path.c_str(), mode) == 0 || errno == EEXIST;
}

bool CanWriteTo(const std::string& folder) { return access(folder.c_str(), W_OK | X_OK) == 0; }

}  // namespace

absl::Status CheckListenAddress(absl::string_view address, bool insecure) {
  if (address.empty()) return absl::OkStatus();
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen_address is '", address,
                     "'; allowed: HOST:PORT with a port of 0..65535, an IPv6 host in brackets"));
  };
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return bad();
  std::string host(address.substr(0, colon));
  uint32_t port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) return bad();
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return bad();
    host = host.substr(1, host.size() - 2);
  } else if (absl::StrContains(host, ":") || absl::StrContains(host, "/")) {
    return bad();
  }
  if (insecure || IsLoopback(host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--listen_address is '", address,
      "', which is not loopback: anybody who reaches it could read and change every session; "
      "say --insecure if that is wanted"));
}

absl::StatusOr<std::string> DefaultUnixSocket() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') {
    const std::string folder = absl::StrCat(runtime, "/sluice");
    if (MakeFolder(folder, 0700) && CanWriteTo(folder)) {
      return absl::StrCat(folder, "/", kSocketName);
    }
  }
  if (MakeFolder("/run/sluice", 0750) && CanWriteTo("/run/sluice")) {
    return absl::StrCat("/run/sluice/", kSocketName);
  }
  const std::string folder = absl::StrCat("/tmp/sluice-", geteuid());
  struct stat info;
  if (!MakeFolder(folder, 0700) || lstat(folder.c_str(), &info) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the folder ", folder, " for the unix socket cannot be made: ", std::strerror(errno)));
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 022) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the folder ", folder,
                     " for the unix socket belongs to, or can be written to by, somebody else"));
  }
  return absl::StrCat(folder, "/", kSocketName);
}

}  // namespace sluice
