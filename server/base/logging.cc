#include "server/base/logging.h"

#include <array>
#include <atomic>
#include <memory>

#include "absl/strings/str_format.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace sluice {
namespace {

constexpr std::array<absl::string_view, 6> kLevelNames = {"trace",   "debug", "info",
                                                          "warning", "error", "off"};

std::atomic<LogFormat>& Format() {
  static std::atomic<LogFormat> format{LogFormat::kText};
  return format;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::off;
}

LogLevel FromSpdlog(spdlog::level::level_enum level) {
  for (int i = 0; i < static_cast<int>(kLevelNames.size()); ++i) {
    if (ToSpdlog(static_cast<LogLevel>(i)) == level) return static_cast<LogLevel>(i);
  }
  return LogLevel::kOff;
}

void SetPattern(spdlog::logger& logger, LogFormat format) {
  // The JSON line is closed here; FormatLogLine makes what stands between level and brace.
  logger.set_formatter(std::make_unique<spdlog::pattern_formatter>(
      format == LogFormat::kJson ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                                 : "%Y-%m-%dT%H:%M:%S.%eZ %l %v",
      spdlog::pattern_time_type::utc));
}

spdlog::logger& Logger() {
  // Never destroyed: threads may log while the process ends.
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger("sluice", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::info);
    made->flush_on(spdlog::level::trace);
    SetPattern(*made, LogFormat::kText);
    return made;
  }();
  return *logger;
}

// Control characters never reach a terminal or break a line, whatever a client put into a name.
void AppendEscaped(absl::string_view text, std::string* out) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(out, "\\u%04x", byte);
    } else {
      out->push_back(c);
    }
  }
}

bool NeedsQuotes(absl::string_view text) {
  if (text.empty()) return true;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte <= 0x20 || byte == 0x7f || c == '"' || c == '\\' || c == '=') return true;
  }
  return false;
}

void AppendQuoted(absl::string_view text, std::string* out) {
  out->push_back('"');
  AppendEscaped(text, out);
  out->push_back('"');
}

}  // namespace

absl::string_view LogLevelName(LogLevel level) { return kLevelNames[static_cast<int>(level)]; }

bool ParseLogLevel(absl::string_view name, LogLevel* level) {
  for (int i = 0; i < static_cast<int>(kLevelNames.size()); ++i) {
    if (kLevelNames[i] == name) {
      *level = static_cast<LogLevel>(i);
      return true;
    }
  }
  return false;
}

void SetLogFormat(LogFormat format) {
  Format() = format;
  SetPattern(Logger(), format);
}

LogLevel SetLogLevel(LogLevel level) {
  const LogLevel previous = FromSpdlog(Logger().level());
  Logger().set_level(ToSpdlog(level));
  return previous;
}

bool LogEnabled(LogLevel level) { return Logger().should_log(ToSpdlog(level)); }

std::string FormatLogLine(LogFormat format, absl::string_view message, LogFields fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line.append("\"message\":");
    AppendQuoted(message, &line);
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",\"", field.key, "\":");
      if (field.quoted) {
        AppendQuoted(field.value, &line);
      } else {
        line.append(field.value);
      }
    }
    return line;
  }
  line = std::string(message);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    if (NeedsQuotes(field.value)) {
      AppendQuoted(field.value, &line);
    } else {
      line.append(field.value);
    }
  }
  return line;
}

void Log(LogLevel level, absl::string_view message, LogFields fields) {
  if (level == LogLevel::kOff || !LogEnabled(level)) return;
  Logger().log(ToSpdlog(level), spdlog::string_view_t(FormatLogLine(Format(), message, fields)));
}

}  // namespace sluice
