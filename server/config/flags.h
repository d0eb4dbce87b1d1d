// The command line of sluiced.
//
//   const CommandLine line = ParseCommandLine(argc, argv);
//   if (line.exit_code.has_value()) { fputs(line.output...); return *line.exit_code; }
//   ... line.options ...
//
// The flags are absl flags, so that other ways of setting them can be added, but they are read from
// the command line here: a wrong one ends with one clear line and exit code 2, and --help lists the
// daemon's flags and nothing else.

#ifndef SERVER_CONFIG_FLAGS_H_
#define SERVER_CONFIG_FLAGS_H_

#include <optional>
#include <string>

#include "server/config/options.h"

namespace sluice {

struct CommandLine {
  DaemonOptions options;
  // Set: print `output` (to standard output for 0, else to standard error) and exit.
  std::optional<int> exit_code;
  std::string output;
};

// Sets the flags; to be called once, before any thread is started.
CommandLine ParseCommandLine(int argc, const char* const* argv);

}  // namespace sluice

#endif  // SERVER_CONFIG_FLAGS_H_
