// A connection to one daemon: its sessions and the daemon itself.
//
//   absl::StatusOr<client::Client> client = client::Client::Create({.address =
//   "unix:/run/sluice/sluiced.sock"}); if (absl::Status ready =
//   client->WaitReady(absl::Seconds(10)); !ready.ok()) return ready; v1::SessionSpec spec;
//   spec.set_name("scheduler-0/rank-0");  // and the geometry
//   absl::StatusOr<client::Session> session = client->OpenSession(spec);
//
// What a session does is in client/session.h. A whole program: client/examples/decode.cc.
//
// Errors: the daemon's code and message, with its details as client/status.h reads them.
// UNAVAILABLE without a reason means that the daemon was not reached; DEADLINE_EXCEEDED without
// one, that the deadline passed on this side. Retries: a unary call is tried again when the error
// says when (RetryInfo), repeating it changes nothing, and the deadline leaves time for it. Calls
// that cannot be repeated say so. Blocking: every call waits for its reply. Threads: every method
// may be called from any thread, any number at a time. Ownership: a Client is a cheap copy of one
// connection, which closes with the last Client, Session and stream on it. Each Create makes a
// connection of its own.

#ifndef CLIENT_CLIENT_H_
#define CLIENT_CLIENT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/options.h"
#include "client/session.h"
#include "sluice/v1/admin.pb.h"
#include "sluice/v1/session.pb.h"

namespace sluice::client {

class Core;

class Client {
 public:
  // Does not connect yet: the first call does. INVALID_ARGUMENT for options that make no sense.
  [[nodiscard]] static absl::StatusOr<Client> Create(const ClientOptions& options = {});

  // Waits until the daemon says that it serves, at most `timeout`. DEADLINE_EXCEEDED names the last
  // that was heard.
  [[nodiscard]] absl::Status WaitReady(absl::Duration timeout) const;
  // Whether a service ("sluice.v1.SwapService", say; "": the daemon as a whole) serves. NOT_FOUND:
  // there is none such.
  [[nodiscard]] absl::StatusOr<bool> CheckHealth(const std::string& service = "",
                                                 const CallOptions& options = {}) const;

  // Opens a session, or attaches to the one of that name, which fences its older handles.
  // Not repeated when the name is empty: the daemon would make two.
  [[nodiscard]] absl::StatusOr<Session> OpenSession(const v1::SessionSpec& spec,
                                                    const CallOptions& options = {}) const;
  // A session that is open already, as GetSession or ListSessions tells of it; no handle is fenced.
  // No call is made.
  Session UseSession(const v1::Session& session) const;
  // One page.
  [[nodiscard]] absl::StatusOr<v1::ListSessionsResponse> ListSessions(
      const v1::ListSessionsRequest& request, const CallOptions& options = {}) const;
  // All pages.
  [[nodiscard]] absl::StatusOr<std::vector<v1::Session>> ListAllSessions(
      const CallOptions& options = {}) const;

  [[nodiscard]] absl::StatusOr<v1::GetServerResponse> GetServer(
      const CallOptions& options = {}) const;
  // Of one session, or of all where the name is empty.
  [[nodiscard]] absl::StatusOr<v1::GetUsageResponse> GetUsage(
      const std::string& session_name = "", const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::SetLogLevelResponse> SetLogLevel(
      const std::string& level, const CallOptions& options = {}) const;

 private:
  explicit Client(std::shared_ptr<Core> core);

  std::shared_ptr<Core> core_;
};

}  // namespace sluice::client

#endif  // CLIENT_CLIENT_H_
