// How sluicectl ends: its exit code, and what it says of an error.
//
// Threads: any.

#ifndef CLIENT_SLUICECTL_ERRORS_H_
#define CLIENT_SLUICECTL_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace sluice::ctl {

// Stable: scripts depend on them. `sluicectl help` lists them.
enum ExitCode : int {
  kExitOk = 0,
  kExitOther = 1,
  kExitUsage = 2,
  kExitUnavailable = 3,
  kExitNotFound = 4,
  kExitRefused = 5,
  kExitExhausted = 6,
  kExitInvalidArgument = 7,
};
ExitCode ExitCodeOf(const absl::Status& status);

// Lines for people: the code and reason, the message, metadata, when to try again, and a hint where
// there is one. `address` is named in the hint where the daemon was not reached.
std::string DescribeError(const absl::Status& status, absl::string_view address);

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_ERRORS_H_
