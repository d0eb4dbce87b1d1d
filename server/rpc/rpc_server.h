// The daemon's face: gRPC over TCP and a Unix socket, in front of a SessionManager.
//
//   RpcServerOptions options;
//   options.listen_address = "127.0.0.1:0";
//   SLUICE_ASSIGN_OR_RETURN(auto server, RpcServer::Start(options, manager.get()));
//   ... server->port() ...
//   server->Shutdown(absl::Seconds(10));
//
// Serves every service of proto/sluice/v1, grpc.health.v1 and server reflection.
// Threads: calls run on gRPC's own threads, none of which is ever blocked; the methods here may be
// called from any thread. Ownership: the manager must outlive the server. The destructor shuts down
// without grace.

#ifndef SERVER_RPC_RPC_SERVER_H_
#define SERVER_RPC_RPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace sluice {

class SessionManager;

// What GetServer says of the device; the same fields as DeviceDescription in
// proto/sluice/v1/admin.proto.
struct ServerDevice {
  std::string kind;
  std::string name;
  std::string instruction_set;
  int32_t num_workers = 0;
  int64_t total_memory_bytes = 0;
};

struct RpcServerOptions {
  // HOST:PORT to listen on, IPv6 hosts in brackets; port 0: any free one. Empty: no TCP.
  std::string listen_address = "127.0.0.1:7464";
  // Path of a Unix socket, at most 107 bytes; its folder must be there. Empty: none.
  std::string unix_socket;
  // Largest message that is worked on, in either direction.
  int64_t max_message_bytes = int64_t{64} << 20;
  // Request bytes held at once, over all calls, from arrival to completion. At least
  // max_message_bytes.
  int64_t max_inflight_bytes = int64_t{512} << 20;
  ServerDevice device;
};

class RpcServer {
 public:
  // INVALID_ARGUMENT for an address that cannot be; FAILED_PRECONDITION where a live server has the
  // address or the socket. A socket that a dead server left is removed.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<RpcServer>> Start(
      const RpcServerOptions& options, SessionManager* sessions);
  virtual ~RpcServer() = default;

  // The TCP port; 0 without TCP.
  virtual int port() const = 0;

  // Health turns to NOT_SERVING for every service, for good; nothing else changes. For a device
  // that has failed.
  virtual void ReportNotServing() = 0;

  // Health turns to NOT_SERVING, new work is refused with UNAVAILABLE SHUTTING_DOWN, work in hand
  // is finished and answered within `grace`, the rest is cancelled. Blocks. A second call does
  // nothing.
  virtual void Shutdown(absl::Duration grace) = 0;
};

}  // namespace sluice

#endif  // SERVER_RPC_RPC_SERVER_H_
