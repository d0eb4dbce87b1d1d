// Many sessions at once: none is starved.

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

constexpr int kSessions = 64;
constexpr int kConnections = 8;
constexpr absl::Duration kDuration = absl::Seconds(10);

TEST(Fairness, TheSlowestOf64SessionsHasHalfOfTheMean) {
  Daemon daemon;
  std::vector<std::unique_ptr<v1::AttentionService::Stub>> stubs;
  for (int i = 0; i < kConnections; ++i) {
    stubs.push_back(v1::AttentionService::NewStub(daemon.NewChannel()));
  }
  std::vector<v1::DecodeStepRequest> requests;
  for (int i = 0; i < kSessions; ++i) {
    Model model(SmallSpec(absl::StrCat("s", i)), daemon.Open(absl::StrCat("s", i)));
    v1::OffloadBlocksResponse stored;
    ASSERT_TRUE(Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks,
                       model.Offload(0, {1, 2, 3, 4}), &stored)
                    .ok());
    v1::DecodeStepRequest request = model.Step(0, {{0, 60}});
    v1::SequenceUpdate& update = *request.mutable_sequences(0)->mutable_update();
    update.set_generation(1);
    for (const uint32_t id : {1, 2, 3, 4}) update.add_block_ids(id);
    requests.push_back(request);
  }
  std::vector<int64_t> num_steps(kSessions);
  std::atomic<bool> stop{false};
  std::vector<std::thread> clients;
  for (int i = 0; i < kSessions; ++i) {
    clients.emplace_back([&, i] {
      v1::DecodeStepResponse response;
      while (!stop) {
        ASSERT_TRUE(Invoke(*stubs[i % kConnections], &v1::AttentionService::Stub::DecodeStep,
                           requests[i], &response)
                        .ok());
        ASSERT_FALSE(response.sequences(0).has_status());
        ++num_steps[i];
      }
    });
  }
  absl::SleepFor(kDuration);
  stop = true;
  for (std::thread& client : clients) client.join();
  const double mean =
      static_cast<double>(std::accumulate(num_steps.begin(), num_steps.end(), int64_t{0})) /
      kSessions;
  const auto slowest = static_cast<double>(*std::min_element(num_steps.begin(), num_steps.end()));
  RecordProperty("steps_per_second",
                 static_cast<int>(mean * kSessions / absl::ToDoubleSeconds(kDuration)));
  RecordProperty("slowest_percent_of_mean", static_cast<int>(100 * slowest / mean));
  EXPECT_GE(slowest, 0.5 * mean);
}

}  // namespace
}  // namespace sluice
