#include "server/config/addresses.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace sluice {
namespace {

TEST(Addresses, LoopbackNeedsNoWord) {
  for (const char* address : {"", "127.0.0.1:7464", "127.9.9.9:0", "localhost:1", "[::1]:65535"}) {
    EXPECT_TRUE(CheckListenAddress(address, false).ok()) << address;
  }
}

TEST(Addresses, OthersNeedInsecure) {
  for (const char* address : {"0.0.0.0:7464", "10.1.2.3:7464", "[::]:7464", "node1:7464",
                              "128.0.0.1:1", "localhost.example:1"}) {
    const absl::Status status = CheckListenAddress(address, false);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_NE(status.message().find("--insecure"), absl::string_view::npos);
    EXPECT_TRUE(CheckListenAddress(address, true).ok()) << address;
  }
}

TEST(Addresses, WhatIsNoneIsRefusedEither) {
  for (const char* address : {"127.0.0.1", "127.0.0.1:", ":7464", "127.0.0.1:65536", "::1:7464",
                              "127.0.0.1:x", "[]:1", "[::1:7", "127.0.0.1:-1", "unix:/tmp/x:1"}) {
    for (const bool insecure : {false, true}) {
      EXPECT_EQ(CheckListenAddress(address, insecure).code(), absl::StatusCode::kInvalidArgument)
          << address;
    }
  }
}

TEST(Addresses, DefaultSocketIsInTheRuntimeFolder) {
  char folder[] = "/tmp/sluice-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  setenv("XDG_RUNTIME_DIR", folder, 1);
  const auto path = DefaultUnixSocket();
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(*path, std::string(folder) + "/sluice/sluiced.sock");
  struct stat info;
  ASSERT_EQ(stat((std::string(folder) + "/sluice").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  rmdir((std::string(folder) + "/sluice").c_str());
  rmdir(folder);
}

}  // namespace
}  // namespace sluice
