#include "server/swap/row_pool.h"

#include <cstring>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/base/resident_bytes.h"
#include "tests/base/test_device.h"

namespace sluice {
namespace {

TEST(RowPool, HandsOutEachRowOnceAndThenNone) {
  TestDevice device(1);
  auto pool = RowPool::Create(100, 72, &device);
  ASSERT_TRUE(pool.ok()) << pool.status();
  std::set<std::byte*> rows;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(pool->free_rows(), 100 - i);
    std::byte* row = pool->Take();
    ASSERT_NE(row, nullptr);
    std::memset(row, i, 72);
    rows.insert(row);
  }
  EXPECT_EQ(rows.size(), 100u);
  EXPECT_EQ(*rows.rbegin() - *rows.begin(), 99 * 72);
  EXPECT_EQ(pool->Take(), nullptr);
  EXPECT_EQ(pool->used_rows(), 100);
  pool->Give(*rows.begin());
  EXPECT_EQ(pool->free_rows(), 1);
  EXPECT_EQ(pool->Take(), *rows.begin());
  for (std::byte* row : rows) pool->Give(row);
  EXPECT_EQ(pool->used_rows(), 0);
}

TEST(RowPool, CommitsAsRowsAreTakenAndMayBeRefused) {
  TestDevice device(1);
  const int64_t row_bytes = 1 << 20;
  auto pool = RowPool::Create(64, row_bytes, &device);
  ASSERT_TRUE(pool.ok());
  device.commits_left = 1;
  EXPECT_NE(pool->Take(), nullptr);
  EXPECT_NE(pool->Take(), nullptr) << "commits are of 2 MiB";
  EXPECT_EQ(pool->Take(), nullptr);
  EXPECT_EQ(pool->used_rows(), 2);
  device.commits_left = 100;
  EXPECT_NE(pool->Take(), nullptr) << "and had again later";
}

TEST(RowPool, ARowThatNobodyWroteCostsNoMemory) {
  if (Sanitized()) GTEST_SKIP() << "resident memory is the sanitizer's";
  TestDevice device(1);
  const int64_t before = ResidentBytes();
  auto pool = RowPool::Create(int64_t{1} << 34, 64, &device);
  ASSERT_TRUE(pool.ok()) << pool.status();
  for (int i = 0; i < 1000; ++i) ASSERT_NE(pool->Take(), nullptr);
  EXPECT_LT(ResidentBytes() - before, 4 << 20);
}

TEST(RowPool, NoAddressSpaceIsAnError) {
  TestDevice device(1);
  EXPECT_FALSE(RowPool::Create(int64_t{1} << 34, int64_t{1} << 24, &device).ok());
}

}  // namespace
}  // namespace sluice
