// The example does what it says.

#include <array>
#include <cstdio>
#include <string>

#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"

namespace sluice::client {
namespace {

TEST(Example, DecodesOverAPromptOfOnes) {
  DaemonProcess daemon;
  std::FILE* pipe = popen(("client/decode_example " + daemon.address()).c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  std::array<char, 256> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_EQ(output, "out[0] = 1\n");
}

TEST(Example, SaysWhyItFails) {
  EXPECT_NE(std::system("client/decode_example unix:/nope 2>/dev/null"), 0);
}

}  // namespace
}  // namespace sluice::client
