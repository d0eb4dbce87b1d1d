#include "server/session/transfer_staging.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/base/test_device.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

TEST(FreeRanges, FirstFitAndNeighboursJoin) {
  FreeRanges ranges(100);
  EXPECT_EQ(ranges.Take(101), -1);
  EXPECT_EQ(ranges.Take(10), 0);
  EXPECT_EQ(ranges.Take(20), 10);
  EXPECT_EQ(ranges.Take(30), 30);
  EXPECT_EQ(ranges.Take(40), 60);
  EXPECT_EQ(ranges.Take(1), -1);
  EXPECT_EQ(ranges.num_ranges(), 0u);
  ranges.Give(30, 30);
  ranges.Give(0, 10);
  EXPECT_EQ(ranges.num_ranges(), 2u);
  EXPECT_EQ(ranges.Take(11), 30) << "the first that is long enough";
  ranges.Give(30, 11);
  ranges.Give(10, 20);
  EXPECT_EQ(ranges.num_ranges(), 1u) << "joined on both sides";
  EXPECT_EQ(ranges.Take(60), 0);
  ranges.Give(0, 60);
  ranges.Give(60, 40);
  EXPECT_EQ(ranges.num_ranges(), 1u);
  EXPECT_EQ(ranges.Take(100), 0);
}

TEST(FreeRanges, RandomOnesAgreeWithAMapOfBytes) {
  std::mt19937 random(1);
  std::vector<bool> taken(200);
  std::vector<std::pair<int64_t, int64_t>> live;
  FreeRanges ranges(std::ssize(taken));
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0 && !live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      ranges.Give(live.back().first, live.back().second);
      std::fill_n(taken.begin() + live.back().first, live.back().second, false);
      live.pop_back();
      continue;
    }
    const int64_t bytes = 1 + random() % 30;
    int64_t expected = -1;
    for (int64_t at = 0, run = 0; at < std::ssize(taken) && expected < 0; ++at) {
      run = taken[at] ? 0 : run + 1;
      if (run == bytes) expected = at + 1 - bytes;
    }
    ASSERT_EQ(ranges.Take(bytes), expected);
    if (expected < 0) continue;
    std::fill_n(taken.begin() + expected, bytes, true);
    live.emplace_back(expected, bytes);
  }
}

// A transfer that writes down what it is told, in order, with the others.
struct Log {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> events;

  void Add(std::string event) {
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(event));
    changed.notify_all();
  }
  std::vector<std::string> WaitFor(size_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(20), [&] { return events.size() >= count; });
    return events;
  }
};

class Logged final : public TransferStaging::Transfer {
 public:
  Logged(Log* log, std::string name) : log_(log), name_(std::move(name)) {}

 private:
  void OnMemory() override { log_->Add(name_ + " memory"); }
  void OnCopied() override { log_->Add(name_ + " copied"); }

  Log* const log_;
  const std::string name_;
};

class TransferStagingTest : public ::testing::Test {
 protected:
  std::unique_ptr<TransferStaging> Make(int64_t capacity_bytes, int num_threads) {
    auto staging = TransferStaging::Create(
        {.capacity_bytes = capacity_bytes, .num_threads = num_threads}, &device_);
    EXPECT_TRUE(staging.ok()) << staging.status();
    return *std::move(staging);
  }

  TestDevice device_{1, /*strict=*/true};
  Log log_;
};

TEST_F(TransferStagingTest, WhoAskedFirstGetsMemoryFirstHoweverMuchItIs) {
  const auto staging = Make(10 * kPage, 1);
  EXPECT_EQ(staging->capacity_bytes(), 10 * kPage);
  Logged a(&log_, "a"), b(&log_, "b"), c(&log_, "c"), d(&log_, "d"), none(&log_, "none");
  ASSERT_TRUE(staging->Take(&a, 6 * kPage));
  ASSERT_TRUE(staging->Take(&b, 2 * kPage));
  EXPECT_FALSE(staging->Take(&c, 10 * kPage));
  EXPECT_FALSE(staging->Take(&d, 1)) << "a byte is free, and c comes first";
  EXPECT_TRUE(staging->Take(&none, 0)) << "nothing is always there";
  staging->Release(&none);
  staging->Release(&a);
  staging->Release(&a);  // has none any more
  EXPECT_TRUE(log_.events.empty());
  staging->Release(&b);
  EXPECT_THAT(log_.WaitFor(1), ElementsAre("c memory"));
  staging->Release(&c);
  EXPECT_THAT(log_.WaitFor(2), ElementsAre("c memory", "d memory"));
  staging->Release(&d);
  ASSERT_TRUE(staging->Take(&a, 10 * kPage)) << "all came back";
  staging->Release(&a);
}

TEST_F(TransferStagingTest, CopiesEveryByteOfBothParts) {
  const auto staging = Make(int64_t{8} << 20, 3);
  std::mt19937 random(2);
  size_t num_events = 0;
  // Around the size of a piece, and nothing at all.
  for (const auto& [first, second] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0},
                                                {1, 0},
                                                {0, 1},
                                                {77, 78},
                                                {512 << 10, 512 << 10},
                                                {(512 << 10) + 1, 1},
                                                {0, (1 << 20) - 1},
                                                {3'000'001, 2'999'999}}) {
    std::vector<char> from(first + second), to(first + second);
    for (char& byte : from) byte = static_cast<char>(random());
    auto* const in = reinterpret_cast<std::byte*>(from.data());
    auto* const out = reinterpret_cast<std::byte*>(to.data());
    Logged transfer(&log_, "t");
    ASSERT_TRUE(staging->Take(&transfer, first + second));
    staging->Copy(&transfer, {transfer.data(), in, first},
                  {transfer.data() + first, in + first, second});
    ASSERT_EQ(log_.WaitFor(++num_events).size(), num_events);
    staging->Copy(&transfer, {out, transfer.data(), first},
                  {out + first, transfer.data() + first, second});
    ASSERT_EQ(log_.WaitFor(++num_events).size(), num_events);
    EXPECT_EQ(from, to);
    staging->Release(&transfer);
  }
}

// In and out again, from several threads, each transfer going on from the callbacks of the last.
TEST_F(TransferStagingTest, ManyTransfersOverASmallRegionAllEndWithTheirOwnBytes) {
  constexpr int kTransfers = 24, kRounds = 50;
  const auto staging = Make(16 * kPage, 3);
  struct Looping final : TransferStaging::Transfer {
    void Begin() {
      const int64_t bytes = 1 + random() % (16 * kPage);
      from.assign(bytes, static_cast<char>(random()));
      to.assign(bytes, 0);
      in = true;
      if (staging->Take(this, bytes)) OnMemory();
    }
    void OnMemory() override {
      const int64_t half = std::ssize(from) / 2, rest = std::ssize(from) - half;
      auto* const begin = reinterpret_cast<std::byte*>(from.data());
      staging->Copy(this, {data(), begin, half}, {data() + half, begin + half, rest});
    }
    void OnCopied() override {
      if (std::exchange(in, false)) {
        const int64_t half = std::ssize(to) / 3, rest = std::ssize(to) - half;
        auto* const begin = reinterpret_cast<std::byte*>(to.data());
        staging->Copy(this, {begin, data(), half}, {begin + half, data() + half, rest});
        return;
      }
      if (from != to) ++*torn;
      staging->Release(this);
      if (++rounds < kRounds) return Begin();
      log->Add("over");
    }
    TransferStaging* staging;
    Log* log;
    std::atomic<int>* torn;
    std::mt19937 random;
    std::vector<char> from, to;
    bool in = false;
    int rounds = 0;
  };
  std::atomic<int> torn = 0;
  std::vector<std::unique_ptr<Looping>> transfers;
  std::vector<std::thread> threads;
  for (int i = 0; i < kTransfers; ++i) {
    transfers.push_back(std::make_unique<Looping>());
    Looping& transfer = *transfers.back();
    transfer.staging = staging.get();
    transfer.log = &log_;
    transfer.torn = &torn;
    transfer.random.seed(static_cast<uint32_t>(i));
    threads.emplace_back([&transfer] { transfer.Begin(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log_.WaitFor(kTransfers).size(), static_cast<size_t>(kTransfers));
  EXPECT_EQ(torn, 0);
  Logged all(&log_, "all");
  EXPECT_TRUE(staging->Take(&all, 16 * kPage)) << "all came back, in one piece";
  staging->Release(&all);
}

TEST_F(TransferStagingTest, AMachineWithoutTheMemoryIsToldAtStart) {
  for (auto* left : {&device_.reserves_left, &device_.commits_left}) {
    *left = 0;
    const auto staging = TransferStaging::Create({.capacity_bytes = 1, .num_threads = 1}, &device_);
    *left = 100;
    EXPECT_EQ(staging.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(staging.status().message(), HasSubstr("--transfer_staging_bytes"));
  }
}

}  // namespace
}  // namespace sluice
