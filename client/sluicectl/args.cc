#include "client/sluicectl/args.h"

#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace sluice::ctl {
namespace {

constexpr absl::string_view kUsageUrl = "sluicectl/usage";
// More ids than the daemon takes in one call; a range with a slip in it should not fill the memory.
constexpr size_t kMaxIds = size_t{1} << 24;

const Option* FindOption(absl::Span<const Option> options, absl::string_view name) {
  for (const Option& option : options) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

absl::Status BadOption(absl::string_view name, absl::string_view value, absl::string_view allowed) {
  return UsageError(absl::StrCat("--", name, " is '", value, "'; allowed: ", allowed));
}

}  // namespace

absl::Status UsageError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsageUrl, absl::Cord());
  return status;
}

bool IsUsageError(const absl::Status& status) { return status.GetPayload(kUsageUrl).has_value(); }

absl::StatusOr<Args> Args::Parse(absl::Span<const Option> options,
                                 absl::Span<const std::string> words) {
  Args args;
  for (size_t i = 0; i < words.size(); ++i) {
    absl::string_view word = words[i];
    if (word == "--") {
      args.positional_.insert(args.positional_.end(), words.begin() + i + 1, words.end());
      break;
    }
    if (!absl::ConsumePrefix(&word, "--")) {
      if (word.size() > 1 && word[0] == '-') {
        return UsageError(absl::StrCat("unknown option ", word, "; options start with --"));
      }
      args.positional_.emplace_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const absl::string_view name = word.substr(0, equals);
    const Option* option = FindOption(options, name);
    if (option == nullptr) return UsageError(absl::StrCat("unknown option --", name));
    if (args.Has(name)) return UsageError(absl::StrCat("--", name, " is given twice"));
    std::string value;
    if (option->value.empty()) {
      if (equals != absl::string_view::npos) {
        return UsageError(absl::StrCat("--", name, " takes no value"));
      }
    } else if (equals != absl::string_view::npos) {
      value = std::string(word.substr(equals + 1));
    } else if (i + 1 < words.size()) {
      value = words[++i];
    } else {
      return UsageError(absl::StrCat("--", name, " needs a value: --", name, " ", option->value));
    }
    args.values_.emplace(name, std::move(value));
  }
  return args;
}

bool Args::Has(absl::string_view name) const { return values_.find(name) != values_.end(); }

std::string Args::Get(absl::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::string() : found->second;
}

absl::StatusOr<int64_t> Args::GetInt(absl::string_view name, int64_t fallback, int64_t lowest,
                                     int64_t highest) const {
  if (!Has(name)) return fallback;
  int64_t value = 0;
  if (absl::SimpleAtoi(Get(name), &value) && value >= lowest && value <= highest) return value;
  return BadOption(name, Get(name), absl::StrCat(lowest, "..", highest));
}

absl::StatusOr<absl::Duration> Args::GetDuration(absl::string_view name,
                                                 absl::Duration fallback) const {
  if (!Has(name)) return fallback;
  absl::Duration value;
  if (absl::ParseDuration(Get(name), &value) && value >= absl::ZeroDuration()) return value;
  return BadOption(name, Get(name), "a duration such as 500ms, 30s or 2h");
}

absl::StatusOr<int64_t> Args::GetBytes(absl::string_view name, int64_t fallback) const {
  if (!Has(name)) return fallback;
  if (const std::optional<int64_t> value = ParseBytes(Get(name))) return *value;
  return BadOption(name, Get(name), "bytes such as 4096, 64KiB or 1.5GiB");
}

absl::StatusOr<std::vector<uint32_t>> Args::GetIds(absl::string_view name) const {
  if (!Has(name)) return std::vector<uint32_t>();
  return ParseIds(absl::StrCat("--", name), Get(name));
}

absl::StatusOr<std::vector<uint32_t>> ParseIds(absl::string_view what, absl::string_view text) {
  std::vector<uint32_t> ids;
  const absl::Status bad = UsageError(
      absl::StrCat(what, " is '", text, "'; allowed: ids and ranges of them, such as 0-3,8"));
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    uint32_t first = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first)) return bad;
    uint32_t last = first;
    if (ends.size() == 2 && !absl::SimpleAtoi(ends.back(), &last)) return bad;
    if (last < first) return bad;
    if (ids.size() + (last - first) >= kMaxIds) {
      return UsageError(absl::StrCat(what, " has more than ", kMaxIds, " ids"));
    }
    for (uint64_t id = first; id <= last; ++id) ids.push_back(static_cast<uint32_t>(id));
  }
  return ids;
}

absl::StatusOr<uint32_t> ParseId(absl::string_view what, absl::string_view text) {
  uint32_t id = 0;
  if (absl::SimpleAtoi(text, &id)) return id;
  return UsageError(absl::StrCat(what, " is '", text, "'; allowed: a number from 0"));
}

std::optional<int64_t> ParseBytes(absl::string_view text) {
  int64_t factor = 1;
  int64_t unit_factor = 1;
  for (absl::string_view unit : {"KiB", "MiB", "GiB", "TiB"}) {
    unit_factor *= 1024;
    if (absl::ConsumeSuffix(&text, unit)) {
      factor = unit_factor;
      break;
    }
  }
  text = absl::StripAsciiWhitespace(text);
  int64_t whole = 0;
  if (absl::SimpleAtoi(text, &whole)) {
    if (whole < 0 || whole > std::numeric_limits<int64_t>::max() / factor) return std::nullopt;
    return whole * factor;
  }
  double fraction = 0;
  // Half a byte is a slip of the pen.
  if (factor == 1 || !absl::SimpleAtod(text, &fraction)) return std::nullopt;
  const double bytes = fraction * static_cast<double>(factor);
  if (!(bytes >= 0) || bytes >= 9.2e18) return std::nullopt;
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<std::string> ParseTag(absl::string_view text) {
  absl::string_view digits = text;
  if (!absl::ConsumePrefix(&digits, "0x")) return std::string(text);
  for (char digit : digits) {
    if (!absl::ascii_isxdigit(digit) || digits.size() % 2 != 0) {
      return UsageError(absl::StrCat("the tag is '", text,
                                     "'; allowed: text, or 0x and an even number of hex digits"));
    }
  }
  return absl::HexStringToBytes(digits);
}

}  // namespace sluice::ctl
