#include "client/sluicectl/format.h"

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace sluice::ctl {
namespace {

TEST(HumanBytes, ThreeDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1 KiB");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(65536), "64 KiB");
  EXPECT_EQ(HumanBytes(12 * 1024 * 1024 + 300 * 1024), "12.3 MiB");
  EXPECT_EQ(HumanBytes(int64_t{1} << 40), "1 TiB");
  EXPECT_EQ(HumanBytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(HumanBytes(-2048), "-2 KiB");
}

TEST(HumanDuration, TwoUnits) {
  EXPECT_EQ(HumanDuration(absl::Milliseconds(350)), "350 ms");
  EXPECT_EQ(HumanDuration(absl::Seconds(12)), "12 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(200)), "3 min 20 s");
  EXPECT_EQ(HumanDuration(absl::Minutes(302)), "5 h 2 min");
  EXPECT_EQ(HumanDuration(absl::Hours(76)), "3 d 4 h");
}

TEST(HumanTime, RelativeToNow) {
  google::protobuf::Timestamp time;
  EXPECT_EQ(HumanTime(time, absl::Now()), "-");
  time.set_seconds(1000000000);
  const absl::Time then = absl::FromUnixSeconds(1000000000);
  EXPECT_EQ(HumanTime(time, then + absl::Seconds(5)), "2001-09-09 01:46:40 UTC (5 s ago)");
  EXPECT_EQ(HumanTime(time, then - absl::Seconds(5)), "2001-09-09 01:46:40 UTC (in 5 s)");
}

TEST(HumanTag, HexWhereNotPrintable) {
  EXPECT_EQ(HumanTag(""), "-");
  EXPECT_EQ(HumanTag("prompt-1"), "prompt-1");
  EXPECT_EQ(HumanTag(std::string("\x01\xff", 2)), "0x01ff");
  EXPECT_EQ(HumanTag("a b"), "0x612062");
}

TEST(HumanIds, Ranges) {
  EXPECT_EQ(HumanIds({}), "-");
  EXPECT_EQ(HumanIds({0, 1, 2, 8, 7}), "0-2,8,7");
}

TEST(Table, AlignsTextLeftAndNumbersRight) {
  Table table({"NAME", "BLOCKS", "SIZE"});
  table.Add({"a", "7", "64 KiB"});
  table.Add({"longer", "1200", "-"});
  EXPECT_EQ(table.Render(),
            "NAME    BLOCKS    SIZE\n"
            "a            7  64 KiB\n"
            "longer    1200       -\n");
}

TEST(Table, DatesAndIdsAreText) {
  Table table({"WHEN", "IDS"});
  table.Add({"2026-01-31 12:00:00", "0-3"});
  table.Add({"-", "7"});
  EXPECT_EQ(table.Render(),
            "WHEN                 IDS\n"
            "2026-01-31 12:00:00  0-3\n"
            "-                    7\n");
}

TEST(Table, NoSpacesAtLineEnds) {
  Table table({"A", "B"});
  table.Add({"long text", "x"});
  table.Add({"t", ""});
  EXPECT_EQ(table.Render(), "A          B\nlong text  x\nt\n");
}

TEST(Fields, OneColumnOfValues) {
  Fields fields;
  fields.Add("a", "1");
  fields.Add("long", "2");
  EXPECT_EQ(fields.Render(), "a     1\nlong  2\n");
}

}  // namespace
}  // namespace sluice::ctl
