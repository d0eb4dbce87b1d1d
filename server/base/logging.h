// The daemon's log: a message for people and fields for machines, as text or as JSON lines, to
// standard error.
//
//   LogInfo("session opened", {{"session", name}, {"epoch", epoch}});
//   -> 2026-01-31T12:00:00.123Z info session opened session=a epoch=1
//   -> {"time":"2026-01-31T12:00:00.123Z","level":"info","message":"session
//   opened","session":"a","epoch":1}
//
// Messages are constant; what varies goes into fields, whose keys are lower_snake_case. Fields of a
// line that is below the level cost their making: ask LogEnabled first on a path that is hot.
//
// Threads: everything here is safe to call from any thread.

#ifndef SERVER_BASE_LOGGING_H_
#define SERVER_BASE_LOGGING_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace sluice {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kOff };
enum class LogFormat { kText, kJson };

// "trace", "debug", "info", "warning", "error", "off".
absl::string_view LogLevelName(LogLevel level);
// The reverse; false when there is no such level.
[[nodiscard]] bool ParseLogLevel(absl::string_view name, LogLevel* level);

struct LogField {
  template <typename T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  LogField(absl::string_view key, T value) : key(key), value(absl::StrCat(value)), quoted(false) {}
  LogField(absl::string_view key, bool value)
      : key(key), value(value ? "true" : "false"), quoted(false) {}
  LogField(absl::string_view key, absl::string_view value) : key(key), value(value) {}
  LogField(absl::string_view key, const char* value) : key(key), value(value) {}
  LogField(absl::string_view key, const std::string& value) : key(key), value(value) {}

  absl::string_view key;
  std::string value;
  bool quoted = true;
};
using LogFields = std::initializer_list<LogField>;

// Before the first line; the default is text at info.
void SetLogFormat(LogFormat format);
// Returns the level before.
LogLevel SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

void Log(LogLevel level, absl::string_view message, LogFields fields = {});
inline void LogDebug(absl::string_view message, LogFields fields = {}) {
  Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(absl::string_view message, LogFields fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(absl::string_view message, LogFields fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(absl::string_view message, LogFields fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// The line's part after the level, for tests: message and fields in a format.
std::string FormatLogLine(LogFormat format, absl::string_view message, LogFields fields);

}  // namespace sluice

#endif  // SERVER_BASE_LOGGING_H_
