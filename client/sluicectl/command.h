// What a sluicectl command is, and what it is given to run with.
//
//   std::vector<Command> AdminCommands() {
//     return {{.path = "log-level", .operands = "LEVEL", .summary = "Change the daemon's log
//     level",
//              .examples = {"sluicectl log-level debug"}, .run = &RunLogLevel}};
//   }
//
// Threads: one.

#ifndef CLIENT_SLUICECTL_COMMAND_H_
#define CLIENT_SLUICECTL_COMMAND_H_

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "client/sluicectl/args.h"
#include "google/protobuf/message.h"

namespace sluice::ctl {

// One run of a command.
class Invocation {
 public:
  Invocation(const Args& args, client::Client client, client::CallOptions call_options, bool json,
             std::ostream& out);

  const Args& args() const { return args_; }
  const client::Client& client() const { return client_; }
  // The deadline of --timeout, for every call.
  const client::CallOptions& call_options() const { return call_options_; }
  // The same for streams, which have no deadline unless one was asked for.
  client::CallOptions stream_options() const;

  // The operands, which must be `count` (or at least that many where `more` is set).
  [[nodiscard]] absl::Status CheckOperands(size_t count, bool more = false) const;
  // The session of that name, or the one of --session. The daemon is asked for its handle: nothing
  // is opened again, so no scheduler is fenced. NOT_FOUND with reason SESSION_NOT_FOUND where there
  // is none.
  [[nodiscard]] absl::StatusOr<v1::Session> FindSession(const std::string& name) const;
  [[nodiscard]] absl::StatusOr<client::Session> UseSession() const;

  // With --output json the response as protobuf JSON, otherwise what `text` makes of it.
  [[nodiscard]] absl::Status Print(const google::protobuf::Message& response,
                                   const std::function<std::string()>& text) const;

 private:
  const Args& args_;
  client::Client client_;
  client::CallOptions call_options_;
  bool json_;
  std::ostream& out_;
};

struct Command {
  std::string path;      // "sessions open"
  std::string operands;  // "NAME", for help
  std::string summary;   // one line without a full stop
  std::string details;   // paragraphs for its help, lines of at most 80 characters; may be empty
  std::vector<Option> options;
  std::vector<std::string> examples;
  absl::Status (*run)(const Invocation& invocation) = nullptr;
};

std::vector<Command> AdminCommands();
std::vector<Command> SessionCommands();
std::vector<Command> SequenceCommands();
std::vector<Command> BlockCommands();
std::vector<Command> ArrayCommands();
// All of them, in the order of help.
const std::vector<Command>& AllCommands();

// Options that every command has.
const std::vector<Option>& GlobalOptions();
// The --session of commands that work in one.
Option SessionOption();
// The --layers of commands that take some layers.
Option LayersOption();

// "BF16" of DTYPE_BF16: a value's name without that of its enum.
template <typename Enum>
std::string ShortName(const std::string& name, absl::string_view prefix, Enum value) {
  if (value == 0) return "-";
  return name.substr(0, prefix.size()) == prefix ? name.substr(prefix.size()) : name;
}
std::string ShortName(v1::Dtype dtype);
std::string ShortName(v1::SessionState state);
std::string ShortName(v1::BlockState state);
std::string ShortName(v1::Tier tier);

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_COMMAND_H_
