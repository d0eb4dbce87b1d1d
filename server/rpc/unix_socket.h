// Unix sockets beside what gRPC does with them: it binds over whatever is there.

#ifndef SERVER_RPC_UNIX_SOCKET_H_
#define SERVER_RPC_UNIX_SOCKET_H_

#include <string>

#include "absl/status/status.h"

namespace sluice {

// Makes the path free to bind to: a socket that nobody listens on is removed. INVALID_ARGUMENT for
// a path that cannot be a socket's; FAILED_PRECONDITION where somebody listens on it, or it is
// something else.
[[nodiscard]] absl::Status PrepareUnixSocket(const std::string& path);

}  // namespace sluice

#endif  // SERVER_RPC_UNIX_SOCKET_H_
