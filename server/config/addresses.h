// Where the daemon listens: which addresses are allowed, and where its Unix socket is when nobody
// says.

#ifndef SERVER_CONFIG_ADDRESSES_H_
#define SERVER_CONFIG_ADDRESSES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace sluice {

// OK for "", and for HOST:PORT with a loopback host ("localhost", 127.x.x.x, [::1]) or, where
// `insecure`, any host.
[[nodiscard]] absl::Status CheckListenAddress(absl::string_view address, bool insecure);

// sluiced.sock in $XDG_RUNTIME_DIR/sluice, else in /run/sluice, else in /tmp/sluice-UID; makes the
// folder. A folder in /tmp that is not ours, or that others may write to, is refused: somebody else
// could take our clients.
[[nodiscard]] absl::StatusOr<std::string> DefaultUnixSocket();

}  // namespace sluice

#endif  // SERVER_CONFIG_ADDRESSES_H_
