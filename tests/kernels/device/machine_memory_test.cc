#include "kernels/device/machine_memory.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace sluice {
namespace {

class MachineMemory : public ::testing::Test {
 protected:
  // A file below the mount.
  void Put(const std::string& path, const std::string& text) {
    const std::filesystem::path file = mount_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  const std::string mount_ = ::testing::TempDir() + "cgroup-" +
                             ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

constexpr int64_t kPhysical = int64_t{64} << 30;

TEST_F(MachineMemory, WithoutAGroupItIsWhatTheMachineHas) {
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, ""), kPhysical);
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "0::/\n"), kPhysical);
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "nonsense\n0::\n4:memory:x\n"), kPhysical);
}

TEST_F(MachineMemory, TheLowestLimitOfAGroupAndItsParentsHolds) {
  Put("/a/b/memory.max", "max");
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "0::/a/b\n"), kPhysical);
  Put("/a/memory.max", "3000000");
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "0::/a/b\n"), 3'000'000);
  Put("/a/b/memory.max", "2000000");
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "0::/a/b\n"), 2'000'000);
  // Inside a container the path may be the host's, and the mount the container's own group.
  Put("/memory.max", "1000000");
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "0::/not/here\n"), 1'000'000);
}

TEST_F(MachineMemory, Version1) {
  Put("/memory/a/memory.limit_in_bytes", "5000000");
  Put("/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(MachineMemoryBytes(kPhysical, mount_, "9:cpu:/a\n4:memory:/a\n0::/\n"), 5'000'000);
}

TEST(MachineMemoryOfThisMachine, IsPositive) { EXPECT_GT(MachineMemoryBytes(), 1 << 20); }

}  // namespace
}  // namespace sluice
