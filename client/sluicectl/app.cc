#include "client/sluicectl/app.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/errors.h"
#include "client/sluicectl/help.h"

namespace sluice::ctl {
namespace {

constexpr absl::string_view kDefaultAddress = "127.0.0.1:7464";
constexpr absl::Duration kDefaultTimeout = absl::Seconds(30);

std::string AddressOf(const Args& args) {
  if (args.Has("address")) return args.Get("address");
  const char* address = std::getenv("SLUICE_ADDRESS");
  return address != nullptr && *address != '\0' ? address : std::string(kDefaultAddress);
}

absl::Status CheckRequired(const Command& command, const Args& args) {
  for (const Option& option : command.options) {
    if (option.required && !args.Has(option.name)) {
      return UsageError(absl::StrCat("--", option.name, " ", option.value, " is required"));
    }
  }
  return absl::OkStatus();
}

absl::Status RunCommand(const Command& command, const Args& args, const std::string& address,
                        std::ostream& out) {
  if (absl::Status status = CheckRequired(command, args); !status.ok()) return status;
  const std::string output = args.Has("output") ? args.Get("output") : "text";
  if (output != "text" && output != "json") {
    return UsageError(absl::StrCat("--output is '", output, "'; allowed: text, json"));
  }
  absl::StatusOr<absl::Duration> timeout = args.GetDuration("timeout", kDefaultTimeout);
  if (!timeout.ok()) return timeout.status();
  if (*timeout == absl::ZeroDuration()) {
    return UsageError("--timeout is 0; allowed: more than nothing");
  }
  client::ClientOptions options;
  options.address = address;
  absl::StatusOr<client::Client> client = client::Client::Create(options);
  if (!client.ok()) return UsageError(client.status().message());
  client::CallOptions call_options;
  call_options.timeout = *timeout;
  return command.run(Invocation(args, *std::move(client), call_options, output == "json", out));
}

// The words before the first option that name a command: options may come before it too, so look
// among the others.
const Command* FindCommand(absl::Span<const std::string> words, std::vector<std::string>* rest) {
  for (const Command& command : AllCommands()) {
    const std::vector<std::string> path = absl::StrSplit(command.path, ' ');
    if (words.size() < path.size() || !std::equal(path.begin(), path.end(), words.begin())) {
      continue;
    }
    rest->assign(words.begin() + path.size(), words.end());
    return &command;
  }
  return nullptr;
}

// Options may stand before the command: moves them behind it.
std::vector<std::string> CommandFirst(absl::Span<const std::string> words) {
  size_t begin = 0;
  while (begin < words.size() && absl::StartsWith(words[begin], "--") && words[begin] != "--") {
    const absl::string_view name = absl::string_view(words[begin]).substr(2);
    const auto& options = GlobalOptions();
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const Option& known) { return known.name == name; });
    const bool has_value_after = option != options.end() && !option->value.empty();
    begin += has_value_after ? 2 : 1;
  }
  begin = std::min(begin, words.size());
  std::vector<std::string> moved(words.begin() + begin, words.end());
  // Behind the words of the command, and before a "--".
  const auto end_of_options = std::find(moved.begin(), moved.end(), "--");
  moved.insert(end_of_options, words.begin(), words.begin() + begin);
  return moved;
}

int UsageFailure(absl::string_view message, absl::string_view help_of, std::ostream& err) {
  const std::string command = help_of.empty() ? "" : absl::StrCat(" ", help_of);
  err << "sluicectl: " << message << "\n  hint: `sluicectl help" << command
      << "` shows what is allowed\n";
  return kExitUsage;
}

int RunHelp(absl::Span<const std::string> words, std::ostream& out, std::ostream& err) {
  if (words.empty()) {
    out << GeneralHelp();
    return kExitOk;
  }
  const std::string path = absl::StrJoin(words, " ");
  const std::string help = HelpFor(path);
  if (help.empty()) return UsageFailure(absl::StrCat("unknown command '", path, "'"), "", err);
  out << help;
  return kExitOk;
}

}  // namespace

int RunSluicectl(absl::Span<const std::string> words, std::ostream& out, std::ostream& err) {
  const std::vector<std::string> ordered = CommandFirst(words);
  if (ordered.empty()) {
    err << GeneralHelp();
    return kExitUsage;
  }
  if (ordered[0] == "--help" || ordered[0] == "-h") return RunHelp({}, out, err);
  if (ordered[0] == "help") return RunHelp(absl::MakeConstSpan(ordered).subspan(1), out, err);
  std::vector<std::string> rest;
  const Command* command = FindCommand(ordered, &rest);
  if (command == nullptr) {
    const std::string group = HelpFor(ordered[0]);
    // An option in front of the command that is not one: its value was taken for the command.
    if (group.empty() && absl::StartsWith(words[0], "-")) {
      const std::string option = words[0].substr(0, words[0].find('='));
      const auto& options = GlobalOptions();
      if (std::none_of(options.begin(), options.end(), [&](const Option& known) {
            return absl::StrCat("--", known.name) == option;
          })) {
        return UsageFailure(absl::StrCat("unknown option ", option), "", err);
      }
    }
    if (group.empty()) {
      return UsageFailure(absl::StrCat("unknown command '", ordered[0], "'"), "", err);
    }
    const bool wants_help = std::find(ordered.begin(), ordered.end(), "--help") != ordered.end();
    (wants_help ? out : err) << group;
    return wants_help ? kExitOk : kExitUsage;
  }
  std::vector<Option> options = command->options;
  options.insert(options.end(), GlobalOptions().begin(), GlobalOptions().end());
  const absl::StatusOr<Args> args = Args::Parse(options, rest);
  if (!args.ok()) return UsageFailure(args.status().message(), command->path, err);
  if (args->Has("help")) return RunHelp({command->path}, out, err);
  const std::string address = AddressOf(*args);
  const absl::Status status = RunCommand(*command, *args, address, out);
  if (IsUsageError(status)) return UsageFailure(status.message(), command->path, err);
  if (!status.ok()) err << DescribeError(status, address);
  return ExitCodeOf(status);
}

}  // namespace sluice::ctl
