// The texts of `sluicectl help`, made from the commands themselves.
//
// Threads: any.

#ifndef CLIENT_SLUICECTL_HELP_H_
#define CLIENT_SLUICECTL_HELP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace sluice::ctl {

// The commands, the options of all, the exit codes.
std::string GeneralHelp();
// Of a command ("sessions open") or of a group of them ("sessions"). Empty: there is none of that
// name.
std::string HelpFor(absl::string_view path);

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_HELP_H_
