// How a Client reaches a daemon, and how long its calls may take.

#ifndef CLIENT_OPTIONS_H_
#define CLIENT_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace sluice::client {

struct ClientOptions {
  // "host:port", or "unix:PATH" for a socket of this machine.
  std::string address = "127.0.0.1:7464";

  // Deadline of a unary call, retries included, where the call does not say otherwise.
  // InfiniteDuration: none. Streams have no deadline unless their call gives one.
  absl::Duration timeout = absl::Seconds(30);

  // Most times that a call is tried, the first one included. 1: no retries.
  int max_attempts = 4;

  // Longest pause before a retry. A pause is what the daemon asks for, doubled with each attempt.
  absl::Duration max_retry_delay = absl::Seconds(2);

  // Largest message that is taken from the daemon.
  int64_t max_message_bytes = int64_t{1} << 30;
};

// What one call does otherwise.
struct CallOptions {
  // Deadline of this call, retries included. Zero: the client's. InfiniteDuration: none.
  absl::Duration timeout = absl::ZeroDuration();

  // Whether this call may be tried again. Even then only calls that change nothing when repeated
  // are.
  bool retry = true;
};

}  // namespace sluice::client

#endif  // CLIENT_OPTIONS_H_
