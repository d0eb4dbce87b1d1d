#include "client/sluicectl/help.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/sluicectl/command.h"

namespace sluice::ctl {
namespace {

constexpr absl::string_view kExitCodes = R"(exit codes
  0  done
  1  any other error
  2  the command line, or a file that it names, is not as it must be
  3  the daemon cannot be reached, is not ready, or did not answer in time
  4  not found: session, sequence, block
  5  refused: the state of things does not allow it, or it came too late (fenced, stale)
  6  out of memory, or over a limit
  7  the daemon found an argument invalid
)";

// Pairs as two columns, indented.
std::string TwoColumns(const std::vector<std::pair<std::string, std::string>>& lines) {
  size_t width = 0;
  for (const auto& [left, right] : lines) width = std::max(width, left.size());
  std::string text;
  for (const auto& [left, right] : lines) {
    absl::StrAppend(&text, "  ", left, std::string(width - left.size() + 2, ' '), right, "\n");
  }
  return text;
}

std::string Synopsis(const Command& command) {
  return command.operands.empty() ? command.path
                                  : absl::StrCat(command.path, " ", command.operands);
}

std::string OptionLines(const std::vector<Option>& options) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Option& option : options) {
    lines.emplace_back(
        absl::StrCat("--", option.name, option.value.empty() ? "" : " ", option.value),
        absl::StrCat(option.help, option.required ? " (required)" : ""));
  }
  return TwoColumns(lines);
}

std::string CommandHelp(const Command& command) {
  std::string text = absl::StrCat(command.summary, ".\n\nusage: sluicectl ", command.path);
  for (const Option& option : command.options) {
    if (option.required) absl::StrAppend(&text, " --", option.name, " ", option.value);
  }
  if (!command.operands.empty()) absl::StrAppend(&text, " ", command.operands);
  absl::StrAppend(&text, " [OPTIONS]\n");
  if (!command.details.empty()) absl::StrAppend(&text, "\n", command.details, "\n");
  if (!command.options.empty()) absl::StrAppend(&text, "\noptions\n", OptionLines(command.options));
  absl::StrAppend(&text, "\noptions of all commands\n", OptionLines(GlobalOptions()));
  absl::StrAppend(&text, "\nexamples\n");
  for (const std::string& example : command.examples) absl::StrAppend(&text, "  ", example, "\n");
  return text;
}

std::string CommandLines(absl::string_view group_prefix) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Command& command : AllCommands()) {
    if (!absl::StartsWith(command.path, group_prefix)) continue;
    lines.emplace_back(Synopsis(command), command.summary);
  }
  if (lines.empty()) return std::string();
  if (group_prefix.empty()) {
    lines.emplace_back("help COMMAND", "Show a command's options and examples");
  }
  return TwoColumns(lines);
}

}  // namespace

std::string GeneralHelp() {
  return absl::StrCat(
      "sluicectl looks at a Sluice daemon and works with its sessions.\n\n"
      "usage: sluicectl COMMAND [OPTIONS]\n\ncommands\n",
      CommandLines(""), "\noptions of all commands\n", OptionLines(GlobalOptions()), "\n",
      kExitCodes,
      "\nexamples\n"
      "  sluicectl server\n"
      "  sluicectl sessions list --output json\n"
      "  sluicectl --address unix:/run/sluice/sluiced.sock usage\n");
}

std::string HelpFor(absl::string_view path) {
  for (const Command& command : AllCommands()) {
    if (command.path == path) return CommandHelp(command);
  }
  const std::string commands = CommandLines(absl::StrCat(path, " "));
  if (commands.empty()) return std::string();
  return absl::StrCat("usage: sluicectl ", path, " COMMAND [OPTIONS]\n\ncommands\n", commands,
                      "\n`sluicectl help ", path,
                      " COMMAND` shows a command's options and examples.\n");
}

}  // namespace sluice::ctl
