#include "client/sluicectl/args.h"

#include "gtest/gtest.h"

namespace sluice::ctl {
namespace {

const std::vector<Option>& Options() {
  static const auto& options = *new std::vector<Option>{
      {"session", "NAME", ""}, {"layer", "N", ""}, {"blocks", "IDS", ""}, {"dry", "", ""}};
  return options;
}

Args MustParse(const std::vector<std::string>& words) {
  absl::StatusOr<Args> args = Args::Parse(Options(), words);
  EXPECT_TRUE(args.ok()) << args.status();
  return *std::move(args);
}

void ExpectUsageError(const std::vector<std::string>& words, absl::string_view part) {
  const absl::StatusOr<Args> args = Args::Parse(Options(), words);
  ASSERT_FALSE(args.ok());
  EXPECT_TRUE(IsUsageError(args.status()));
  EXPECT_NE(args.status().message().find(part), absl::string_view::npos) << args.status();
}

TEST(Args, BothFormsAndOperandsMixed) {
  const Args args = MustParse({"one", "--session", "a/b", "--layer=3", "--dry", "two"});
  EXPECT_EQ(args.positional(), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(args.Get("session"), "a/b");
  EXPECT_EQ(*args.GetInt("layer", 0, 0, 10), 3);
  EXPECT_TRUE(args.Has("dry"));
  EXPECT_FALSE(args.Has("blocks"));
}

TEST(Args, DoubleDashEndsOptions) {
  EXPECT_EQ(MustParse({"--", "--session", "-"}).positional(),
            (std::vector<std::string>{"--session", "-"}));
}

TEST(Args, ValueMayBeEmptyOrStartWithDash) {
  EXPECT_EQ(MustParse({"--session="}).Get("session"), "");
  EXPECT_EQ(MustParse({"--layer", "-1"}).Get("layer"), "-1");
}

TEST(Args, RefusesWhatItDoesNotKnow) {
  ExpectUsageError({"--nope"}, "unknown option --nope");
  ExpectUsageError({"-s"}, "options start with --");
  ExpectUsageError({"--session"}, "--session NAME");
  ExpectUsageError({"--dry=1"}, "takes no value");
  ExpectUsageError({"--layer=1", "--layer=2"}, "twice");
}

TEST(Args, NumbersOutOfRangeNameWhatIsAllowed) {
  const absl::Status status = MustParse({"--layer=11"}).GetInt("layer", 0, 0, 10).status();
  EXPECT_TRUE(IsUsageError(status));
  EXPECT_EQ(status.message(), "--layer is '11'; allowed: 0..10");
  EXPECT_FALSE(MustParse({"--layer=1x"}).GetInt("layer", 0, 0, 10).ok());
  EXPECT_EQ(*MustParse({}).GetInt("layer", 5, 0, 10), 5);
}

TEST(Args, Durations) {
  EXPECT_EQ(*MustParse({"--layer=250ms"}).GetDuration("layer", {}), absl::Milliseconds(250));
  EXPECT_FALSE(MustParse({"--layer=5"}).GetDuration("layer", {}).ok());
  EXPECT_FALSE(MustParse({"--layer=-5s"}).GetDuration("layer", {}).ok());
}

TEST(ParseIds, Ranges) {
  EXPECT_EQ(*ParseIds("ids", "0-3,8,5-5"), (std::vector<uint32_t>{0, 1, 2, 3, 8, 5}));
  EXPECT_EQ(*ParseIds("ids", "4294967295"), (std::vector<uint32_t>{4294967295u}));
  for (const char* bad : {"", "a", "3-1", "1-2-3", "1,", "-1", "4294967296"}) {
    EXPECT_TRUE(IsUsageError(ParseIds("ids", bad).status())) << bad;
  }
  EXPECT_TRUE(IsUsageError(ParseIds("ids", "0-4294967295").status()));
}

TEST(ParseBytes, Units) {
  EXPECT_EQ(ParseBytes("4096"), 4096);
  EXPECT_EQ(ParseBytes("64KiB"), 65536);
  EXPECT_EQ(ParseBytes("1.5GiB"), 1610612736);
  EXPECT_EQ(ParseBytes("2 MiB"), 2097152);
  for (const char* bad : {"", "x", "-1", "1.5", "1MB", "nanMiB", "99999999TiB"}) {
    EXPECT_EQ(ParseBytes(bad), std::nullopt) << bad;
  }
}

TEST(ParseTag, TextAndHex) {
  EXPECT_EQ(*ParseTag("prompt"), "prompt");
  EXPECT_EQ(*ParseTag("0x00ff"), std::string("\x00\xff", 2));
  EXPECT_TRUE(IsUsageError(ParseTag("0xabc").status()));
  EXPECT_TRUE(IsUsageError(ParseTag("0xzz").status()));
}

}  // namespace
}  // namespace sluice::ctl
