#include "client/sluicectl/format.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace sluice::ctl {
namespace {

constexpr absl::string_view kColumnGap = "  ";

// "-" stands for nothing, and should not push a column of numbers to the left. Dates and lists of
// ids start with a digit too, but are no numbers.
bool IsNumeric(absl::string_view cell) {
  if (cell == "-") return true;
  const absl::string_view digits = absl::StripPrefix(cell, "-");
  return !digits.empty() && absl::ascii_isdigit(static_cast<unsigned char>(digits[0])) &&
         digits.find_first_of("-,:") == absl::string_view::npos;
}

void AppendPadding(size_t count, std::string* line) { line->append(count, ' '); }

}  // namespace

std::string HumanBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  // 1023.6 would be shown as 1024 of the smaller unit.
  while (std::abs(value) >= 1023.5 && unit < 6) {
    value /= 1024;
    ++unit;
  }
  const bool whole = unit == 0 || value == static_cast<double>(static_cast<int64_t>(value));
  const int decimals = whole || std::abs(value) >= 99.95 ? 0 : std::abs(value) >= 9.995 ? 1 : 2;
  return absl::StrFormat("%.*f %s", decimals, value, kUnits[unit]);
}

std::string HumanDuration(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return "forever";
  if (duration < absl::Seconds(1)) {
    return absl::StrCat(absl::ToInt64Milliseconds(duration), " ms");
  }
  const int64_t seconds = absl::ToInt64Seconds(duration);
  const int64_t minutes = seconds / 60;
  const int64_t hours = minutes / 60;
  if (hours >= 24) return absl::StrCat(hours / 24, " d ", hours % 24, " h");
  if (hours > 0) return absl::StrCat(hours, " h ", minutes % 60, " min");
  if (minutes > 0) return absl::StrCat(minutes, " min ", seconds % 60, " s");
  return absl::StrCat(seconds, " s");
}

std::string HumanTime(const google::protobuf::Timestamp& time, absl::Time now) {
  if (time.seconds() == 0 && time.nanos() == 0) return "-";
  const absl::Time when = absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
  const std::string distance = when > now ? absl::StrCat("in ", HumanDuration(when - now))
                                          : absl::StrCat(HumanDuration(now - when), " ago");
  return absl::StrCat(absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", when, absl::UTCTimeZone()), " (",
                      distance, ")");
}

std::string HumanTag(absl::string_view tag) {
  if (tag.empty()) return "-";
  const bool printable = std::all_of(tag.begin(), tag.end(), [](char c) {
    return absl::ascii_isgraph(static_cast<unsigned char>(c));
  });
  return printable ? std::string(tag) : absl::StrCat("0x", absl::BytesToHexString(tag));
}

std::string HumanIds(const std::vector<uint32_t>& ids) {
  if (ids.empty()) return "-";
  std::vector<std::string> parts;
  for (size_t first = 0; first < ids.size();) {
    size_t last = first;
    while (last + 1 < ids.size() && ids[last + 1] == ids[last] + 1) ++last;
    parts.push_back(first == last ? absl::StrCat(ids[first])
                                  : absl::StrCat(ids[first], "-", ids[last]));
    first = last + 1;
  }
  return absl::StrJoin(parts, ",");
}

Table::Table(std::vector<std::string> headings) : headings_(std::move(headings)) {}

void Table::Add(std::vector<std::string> cells) {
  cells.resize(headings_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::Render() const {
  const size_t num_columns = headings_.size();
  std::vector<size_t> widths(num_columns);
  std::vector<bool> flush_right(num_columns);
  for (size_t column = 0; column < num_columns; ++column) {
    widths[column] = headings_[column].size();
    flush_right[column] = !rows_.empty();
    for (const std::vector<std::string>& row : rows_) {
      widths[column] = std::max(widths[column], row[column].size());
      if (!IsNumeric(row[column])) flush_right[column] = false;
    }
  }
  std::string text;
  const auto append_row = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t column = 0; column < num_columns; ++column) {
      if (column > 0) absl::StrAppend(&line, kColumnGap);
      const size_t padding = widths[column] - row[column].size();
      if (flush_right[column]) AppendPadding(padding, &line);
      absl::StrAppend(&line, row[column]);
      if (!flush_right[column]) AppendPadding(padding, &line);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&text, line, "\n");
  };
  append_row(headings_);
  for (const std::vector<std::string>& row : rows_) append_row(row);
  return text;
}

void Fields::Add(std::string name, std::string value) {
  fields_.emplace_back(std::move(name), std::move(value));
}

std::string Fields::Render() const {
  size_t width = 0;
  for (const auto& [name, value] : fields_) width = std::max(width, name.size());
  std::string text;
  for (const auto& [name, value] : fields_) {
    absl::StrAppend(&text, name, std::string(width - name.size(), ' '), kColumnGap, value, "\n");
  }
  return text;
}

}  // namespace sluice::ctl
