// Arguments of one sluicectl command.
//
//   absl::StatusOr<Args> args = Args::Parse(command.options, {"--session", "a", "--layer=3", "7"});
//   args->Get("session"), args->GetInt("layer", 0), args->positional()
//
// `--name value` and `--name=value` are the same; options and operands may be mixed; what follows
// `--` is operands. Errors: a usage error (exit code 2) that names the option, what came and what
// is allowed.
//
// Threads: const methods may be called from any thread.

#ifndef CLIENT_SLUICECTL_ARGS_H_
#define CLIENT_SLUICECTL_ARGS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace sluice::ctl {

struct Option {
  std::string name;   // without the dashes
  std::string value;  // what stands for its value in help: "NAME"; empty: a switch
  std::string help;
  bool required = false;
};

// INVALID_ARGUMENT marked as the caller's own, in contrast to one that the daemon sent.
absl::Status UsageError(absl::string_view message);
bool IsUsageError(const absl::Status& status);

class Args {
 public:
  [[nodiscard]] static absl::StatusOr<Args> Parse(absl::Span<const Option> options,
                                                  absl::Span<const std::string> words);

  // Operands, in order.
  const std::vector<std::string>& positional() const { return positional_; }

  bool Has(absl::string_view name) const;
  // "" where it was not given.
  std::string Get(absl::string_view name) const;
  [[nodiscard]] absl::StatusOr<int64_t> GetInt(absl::string_view name, int64_t fallback,
                                               int64_t lowest, int64_t highest) const;
  // 500ms, 30s, 2h.
  [[nodiscard]] absl::StatusOr<absl::Duration> GetDuration(absl::string_view name,
                                                           absl::Duration fallback) const;
  // 4096, 64KiB, 1.5GiB.
  [[nodiscard]] absl::StatusOr<int64_t> GetBytes(absl::string_view name, int64_t fallback) const;
  // As ParseIds; empty where it was not given.
  [[nodiscard]] absl::StatusOr<std::vector<uint32_t>> GetIds(absl::string_view name) const;

 private:
  std::map<std::string, std::string, std::less<>> values_;
  std::vector<std::string> positional_;
};

// "0-3,8,11": ids and ranges of them, both ends included, in this order. `what` names them in an
// error.
[[nodiscard]] absl::StatusOr<std::vector<uint32_t>> ParseIds(absl::string_view what,
                                                             absl::string_view text);
// An id alone.
[[nodiscard]] absl::StatusOr<uint32_t> ParseId(absl::string_view what, absl::string_view text);
// "4096", "64KiB", "1.5GiB".
std::optional<int64_t> ParseBytes(absl::string_view text);
// A tag: "0x" and hexadecimal digits, or else the text itself.
[[nodiscard]] absl::StatusOr<std::string> ParseTag(absl::string_view text);

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_ARGS_H_
