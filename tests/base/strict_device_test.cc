#include "tests/base/strict_device.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/ops/ops.h"

namespace sluice {
namespace {

constexpr int64_t kBytes = 1 << 20;

class StrictDeviceTest : public ::testing::Test {
 protected:
  StrictDeviceTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  Buffer Reserved(MemoryKind kind, int64_t committed_bytes = kBytes) {
    Buffer buffer = *device_->Reserve(kind, kBytes);
    EXPECT_TRUE(device_->Commit(buffer, 0, committed_bytes).ok());
    return buffer;
  }
  void Copy(std::byte* to, const std::byte* from) {
    const ByteCopy copy{to, from, 64};
    device_->ops().CopyBytes({&copy, 1}, *stream_);
    stream_->Synchronize();
  }

  const std::unique_ptr<Device> device_ = CreateStrictDevice(*CreateCpuDevice({.num_threads = 2}));
  const std::unique_ptr<Stream> stream_ = device_->CreateStream(StreamPriority::kCopy);
};

TEST_F(StrictDeviceTest, OperationsReachAllMemoryOfTheDeviceAndTheHostItsOwn) {
  EXPECT_FALSE(device_->info().reads_any_host_memory);
  const Buffer from = Reserved(MemoryKind::kHost), to = Reserved(MemoryKind::kHost);
  const Buffer hbm = Reserved(MemoryKind::kDevice);
  std::memset(from.data() + 100, 7, 64);
  Copy(hbm.data() + 5000, from.data() + 100);
  Copy(to.data(), hbm.data() + 5000);
  EXPECT_EQ(std::memcmp(to.data(), from.data() + 100, 64), 0);
}

using StrictDeviceDeathTest = StrictDeviceTest;

TEST_F(StrictDeviceDeathTest, OtherMemoryIsAFault) {
  const Buffer pinned = Reserved(MemoryKind::kHost, 4096);
  const std::vector<std::byte> heap(64);
  EXPECT_DEATH(Copy(pinned.data(), heap.data()), "CopyBytes: from at .* is no memory");
  EXPECT_DEATH(Copy(pinned.data() + kBytes - 63, pinned.data()), "to at .* is no memory");
  EXPECT_DEATH(Copy(pinned.data() + 4096 - 63, pinned.data()), "to at .* is not committed");
}

TEST_F(StrictDeviceDeathTest, TheHostCannotTouchDeviceMemory) {
  const Buffer hbm = Reserved(MemoryKind::kDevice);
  EXPECT_DEATH(std::memset(hbm.data(), 0, 1), "");
}

}  // namespace
}  // namespace sluice
