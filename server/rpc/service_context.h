// What every handler needs: the sessions, the limits, and the options that the server was started
// with.
//
// Threads: safe.

#ifndef SERVER_RPC_SERVICE_CONTEXT_H_
#define SERVER_RPC_SERVICE_CONTEXT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/rpc/admission.h"
#include "server/rpc/rpc_server.h"
#include "server/session/session.h"
#include "server/session/session_manager.h"
#include "sluice/v1/session.pb.h"

namespace sluice {

class ServiceContext {
 public:
  ServiceContext(const RpcServerOptions& options, SessionManager* sessions)
      : options_(options),
        sessions_(sessions),
        admission_(options.max_message_bytes, options.max_inflight_bytes) {}

  const RpcServerOptions& options() const { return options_; }
  SessionManager& sessions() { return *sessions_; }
  Admission& admission() { return admission_; }
  absl::Time start_time() const { return start_time_; }

  // The session of a request's handle, lease renewed. INVALID_ARGUMENT INVALID_FIELD `field` where
  // there is no handle, and the errors of SessionManager::Find.
  [[nodiscard]] absl::StatusOr<std::shared_ptr<Session>> FindSession(
      const v1::SessionHandle& handle, absl::string_view field = "session");

 private:
  const RpcServerOptions options_;
  SessionManager* const sessions_;
  Admission admission_;
  const absl::Time start_time_ = absl::Now();
};

}  // namespace sluice

#endif  // SERVER_RPC_SERVICE_CONTEXT_H_
