// How sluicectl shows things to people.
//
//   Table table({"BLOCK", "SIZE"});
//   table.Add({"7", HumanBytes(65536)});
//   out << table.Render();
//
// Threads: functions from any thread, a Table one at a time.

#ifndef CLIENT_SLUICECTL_FORMAT_H_
#define CLIENT_SLUICECTL_FORMAT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/timestamp.pb.h"

namespace sluice::ctl {

// "512 B", "64 KiB", "1.5 GiB": three digits, units of 1024.
std::string HumanBytes(int64_t bytes);
// "350 ms", "12 s", "3 min 20 s", "5 h 2 min", "3 d 4 h".
std::string HumanDuration(absl::Duration duration);
// "2026-01-31 12:00:00 UTC (3 min 20 s ago)"; "-" where it is not set.
std::string HumanTime(const google::protobuf::Timestamp& time, absl::Time now);
// Printable text as it is, anything else as 0x and hexadecimal digits; "-" where empty.
std::string HumanTag(absl::string_view tag);
// "0-3,8,11"; "-" where empty.
std::string HumanIds(const std::vector<uint32_t>& ids);

// Columns under a heading, each as wide as its widest cell. Columns of numbers and sizes are set
// flush right.
class Table {
 public:
  explicit Table(std::vector<std::string> headings);

  // As many cells as headings.
  void Add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // With a line end after each row; no spaces at the ends of lines.
  std::string Render() const;

 private:
  std::vector<std::string> headings_;
  std::vector<std::vector<std::string>> rows_;
};

// "name   value" lines with the values in one column.
class Fields {
 public:
  void Add(std::string name, std::string value);
  std::string Render() const;

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
};

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_FORMAT_H_
