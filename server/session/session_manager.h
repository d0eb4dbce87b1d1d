// All sessions of a daemon: opening, attaching, leases, retention, closing, and what they may use.
//
//   SLUICE_ASSIGN_OR_RETURN(auto manager, SessionManager::Create(options, device.get()));
//   SLUICE_ASSIGN_OR_RETURN(auto opened, manager->Open(spec));
//   SLUICE_ASSIGN_OR_RETURN(auto session, manager->Find(opened.info.name, opened.info.epoch));
//
// Threads: every method may be called from any thread and does not block, Shutdown and the
// destructor apart. Ownership: the device must outlive the manager.

#ifndef SERVER_SESSION_SESSION_MANAGER_H_
#define SERVER_SESSION_SESSION_MANAGER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "server/session/session.h"
#include "server/session/types.h"

namespace sluice {

struct SessionManagerOptions {
  // Device memory, of which blocks may take hbm_block_budget_bytes; the rest is for what sessions
  // reserve: A_g, tables, states and workspaces. 0: nine tenths of the HBM that is free at start,
  // or a quarter of the machine's memory where the device has no HBM.
  int64_t hbm_budget_bytes = 0;
  // -1: three quarters of hbm_budget_bytes, or nothing where the device has no HBM.
  int64_t hbm_block_budget_bytes = -1;
  // Pinned host memory for slots. 0: half of the machine's memory.
  int64_t host_budget_bytes = 0;
  // Sessions, attached and detached.
  int64_t max_sessions = 256;
  // Calls of one session that wait for or run on the device (offloads and fetch pieces included).
  int64_t max_queued_calls_per_session = 256;
  // Tile runs of one session.
  int64_t max_tile_runs_per_session = 64;
  // Largest message; bounds the A_g rows kept for replaced blocks.
  int64_t max_message_bytes = int64_t{64} << 20;
  // Pinned host memory that offloads and fetches pass through, taken at start and only where the
  // device does not read any host memory. At least max_message_bytes. 0: 512 MiB, or two messages
  // where that is more.
  int64_t transfer_staging_bytes = 0;
  // Threads that copy in and out of it. 0: four, or one a core where there are fewer.
  int transfer_staging_threads = 0;
  // For tests: the clock that leases go by. Null: the system's.
  std::function<absl::Time()> now = nullptr;
};

class SessionManager {
 public:
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<SessionManager>> Create(
      const SessionManagerOptions& options, Device* device);
  virtual ~SessionManager() = default;

  struct Opened {
    SessionInfo info;
    bool attached = false;
  };
  // See OpenSession in proto/sluice/v1/session.proto.
  [[nodiscard]] virtual absl::StatusOr<Opened> Open(const SessionSpec& spec) = 0;
  // The session of a handle, lease renewed. NOT_FOUND SESSION_NOT_FOUND, and Session::CheckHandle's
  // errors.
  [[nodiscard]] virtual absl::StatusOr<std::shared_ptr<Session>> Find(const std::string& name,
                                                                      uint64_t epoch) = 0;
  // Sessions with name >= first_name, in order of name, at most `limit`.
  virtual std::vector<SessionInfo> List(const std::string& first_name, int64_t limit) const = 0;
  // By name alone, whoever holds it, lease not renewed. NOT_FOUND SESSION_NOT_FOUND.
  [[nodiscard]] virtual absl::StatusOr<SessionInfo> Describe(const std::string& name) const = 0;
  // `done` gets the bytes of blocks given back; it runs once, on another thread or on this one.
  virtual void Close(const std::string& name, uint64_t epoch, bool keep_data,
                     std::function<void(absl::StatusOr<int64_t>)> done) = 0;

  virtual std::vector<MemoryPoolUsage> MemoryUsage() const = 0;
  // OK, or why the device failed: Open, Find and every call on a session are UNAVAILABLE
  // DEVICE_FAILED from then on.
  virtual absl::Status DeviceStatus() const = 0;
  virtual const SessionManagerOptions& options() const = 0;  // with defaults filled in
  // Applies lease expiry and retention as of now; also done by a thread of the manager.
  virtual void Sweep() = 0;
  // Refuses new sessions and calls, waits until work in flight is done.
  virtual void Shutdown() = 0;
};

}  // namespace sluice

#endif  // SERVER_SESSION_SESSION_MANAGER_H_
