#include "server/base/logging.h"

#include "gtest/gtest.h"

namespace sluice {
namespace {

TEST(Logging, TextLineQuotesWhatNeedsIt) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, "session opened",
                          {{"session", "a/b"}, {"epoch", 3}, {"note", "two words"}, {"empty", ""}}),
            "session opened session=a/b epoch=3 note=\"two words\" empty=\"\"");
}

TEST(Logging, JsonLineEscapesAndKeepsNumbersBare) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, "m\"x", {{"name", "a\nb\\"}, {"n", 5}, {"ok", true}}),
            R"("message":"m\"x","name":"a\u000ab\\","n":5,"ok":true)");
}

TEST(Logging, LevelsGoByName) {
  LogLevel level = LogLevel::kInfo;
  for (const char* name : {"trace", "debug", "info", "warning", "error", "off"}) {
    ASSERT_TRUE(ParseLogLevel(name, &level)) << name;
    EXPECT_EQ(LogLevelName(level), name);
  }
  EXPECT_FALSE(ParseLogLevel("loud", &level));
  EXPECT_FALSE(ParseLogLevel("", &level));
}

TEST(Logging, SetLogLevelReturnsThePreviousOne) {
  const LogLevel before = SetLogLevel(LogLevel::kError);
  EXPECT_FALSE(LogEnabled(LogLevel::kWarning));
  EXPECT_TRUE(LogEnabled(LogLevel::kError));
  EXPECT_EQ(SetLogLevel(before), LogLevel::kError);
}

}  // namespace
}  // namespace sluice
