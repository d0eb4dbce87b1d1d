// sluicectl as a function: what main() calls, and tests.
//
// Threads: one.

#ifndef CLIENT_SLUICECTL_APP_H_
#define CLIENT_SLUICECTL_APP_H_

#include <ostream>
#include <string>

#include "absl/types/span.h"

namespace sluice::ctl {

// Runs the command that `words` (without the program's name) say; results go to `out`, errors to
// `err`. The result is the exit code (errors.h).
int RunSluicectl(absl::Span<const std::string> words, std::ostream& out, std::ostream& err);

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_APP_H_
