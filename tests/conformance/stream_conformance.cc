// Devices, buffers and streams: order, waits, host tasks, many threads at once.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/ops.h"
#include "tests/conformance/device_factory.h"

namespace sluice {
namespace {

class StreamConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override { device_ = GetParam().create(2); }

  std::unique_ptr<Device> device_;
};

class AppendTask : public HostTask {
 public:
  AppendTask(std::vector<int>* log, int value) : log_(log), value_(value) {}
  void Run() override { log_->push_back(value_); }

 private:
  std::vector<int>* log_;
  int value_;
};

// Holds its stream up until it is opened. (A host task must not block; a test may, where the device
// has another thread.)
class Gate : public HostTask {
 public:
  void Run() override {
    std::unique_lock<std::mutex> lock(mutex_);
    entered_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void WaitUntilEntered() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return entered_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool entered_ = false;
  bool open_ = false;
};

class CountTask : public HostTask {
 public:
  explicit CountTask(std::atomic<int>* count) : count_(count) {}
  void Run() override { count_->fetch_add(1); }

 private:
  std::atomic<int>* count_;
};

TEST_P(StreamConformance, InfoIsFilledIn) {
  const DeviceInfo& info = device_->info();
  EXPECT_FALSE(info.kind.empty());
  EXPECT_FALSE(info.name.empty());
  EXPECT_FALSE(info.instruction_set.empty());
  EXPECT_GT(info.num_workers, 0);
  EXPECT_GT(info.total_memory_bytes, 0);
}

TEST_P(StreamConformance, HostTasksRunInOrderAndPositionsCount) {
  std::vector<int> log;
  std::vector<AppendTask> tasks;
  for (int i = 0; i < 1000; ++i) tasks.emplace_back(&log, i);
  std::unique_ptr<Stream> stream = device_->CreateStream(StreamPriority::kAttention);
  EXPECT_EQ(stream->enqueued(), 0u);
  EXPECT_EQ(stream->completed(), 0u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(stream->Enqueue(&tasks[i]), i + 1u);
  EXPECT_EQ(stream->enqueued(), 1000u);
  stream->Synchronize();
  EXPECT_EQ(stream->completed(), 1000u);
  ASSERT_EQ(log.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(log[i], i);
}

TEST_P(StreamConformance, OperationsAndHostTasksKeepTheirOrder) {
  std::unique_ptr<Stream> stream = device_->CreateStream(StreamPriority::kAttention);
  constexpr int kRows = 200;
  SharedArray<float> m(*device_, kRows * 8), l(*device_, kRows * 8), o(*device_, kRows * 8 * 64);
  struct Check : HostTask {
    void Run() override {
      // Sees what the operation before it wrote, and undoes it for the next round.
      good = o[0] == 0.0f && o[kRows * 8 * 64 - 1] == 0.0f;
      o[0] = o[kRows * 8 * 64 - 1] = 1.0f;
    }
    float* o = nullptr;
    bool good = false;
  };
  std::vector<Check> checks(50);
  for (Check& check : checks) {
    check.o = o.data();
    device_->ops().BeginStates({kRows, 8, 64, {m.data(), l.data(), o.data()}}, *stream);
    stream->Enqueue(&check);
  }
  stream->Synchronize();
  for (const Check& check : checks) EXPECT_TRUE(check.good);
}

TEST_P(StreamConformance, AHostTaskMayEnqueueItselfAgain) {
  std::unique_ptr<Stream> stream = device_->CreateStream(StreamPriority::kAttention);
  struct Again : HostTask {
    void Run() override {
      if (++runs < 100) {
        stream->Enqueue(this);
      } else {
        done = true;
      }
    }
    Stream* stream = nullptr;
    int runs = 0;
    std::atomic<bool> done{false};
  };
  Again again;
  again.stream = stream.get();
  stream->Enqueue(&again);
  while (!again.done) std::this_thread::yield();
  stream->Synchronize();
  EXPECT_EQ(again.runs, 100);
}

TEST_P(StreamConformance, WaitForHoldsLaterWorkOnly) {
  std::unique_ptr<Stream> first = device_->CreateStream(StreamPriority::kAttention);
  std::unique_ptr<Stream> second = device_->CreateStream(StreamPriority::kAttention);
  Gate gate;
  std::atomic<int> before{0}, after{0};
  CountTask before_task(&before), after_task(&after);
  const StreamPosition position = first->Enqueue(&gate);
  const StreamPosition free_position = second->Enqueue(&before_task);
  second->WaitFor(*first, position);
  const StreamPosition held = second->Enqueue(&after_task);
  EXPECT_EQ(held, free_position + 1);
  gate.WaitUntilEntered();
  while (second->completed() < free_position) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 0);
  EXPECT_EQ(second->completed(), free_position);
  gate.Open();
  second->Synchronize();
  EXPECT_EQ(after, 1);
  EXPECT_GE(first->completed(), position);
}

TEST_P(StreamConformance, WaitForCompletedWorkOrOneselfIsNothing) {
  std::unique_ptr<Stream> first = device_->CreateStream(StreamPriority::kAttention);
  std::unique_ptr<Stream> second = device_->CreateStream(StreamPriority::kCopy);
  std::atomic<int> count{0};
  CountTask task(&count);
  const StreamPosition position = first->Enqueue(&task);
  first->Synchronize();
  second->WaitFor(*first, position);
  second->WaitFor(*first, 0);
  CountTask other(&count);
  const StreamPosition own = second->Enqueue(&other);
  second->WaitFor(*second, own);
  CountTask last(&count);
  second->Enqueue(&last);
  second->Synchronize();
  EXPECT_EQ(count, 3);
}

TEST_P(StreamConformance, ChainsOfWaitsAcrossStreams) {
  // Each round goes once around all streams; the log is right only if every wait holds.
  constexpr int kStreams = 5;
  constexpr int kRounds = 200;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(
        device_->CreateStream(i % 2 == 0 ? StreamPriority::kAttention : StreamPriority::kCopy));
  }
  std::vector<int> log;
  std::vector<AppendTask> tasks;
  tasks.reserve(kStreams * kRounds);
  Stream* previous = nullptr;
  StreamPosition position = 0;
  for (int i = 0; i < kStreams * kRounds; ++i) {
    Stream* stream = streams[i % kStreams].get();
    if (previous != nullptr) stream->WaitFor(*previous, position);
    tasks.emplace_back(&log, i);
    position = stream->Enqueue(&tasks.back());
    previous = stream;
  }
  for (auto& stream : streams) stream->Synchronize();
  ASSERT_EQ(log.size(), tasks.size());
  for (size_t i = 0; i < log.size(); ++i) ASSERT_EQ(log[i], static_cast<int>(i));
}

TEST_P(StreamConformance, AStreamMayGoBeforeTheOneThatWaitedForIt) {
  std::unique_ptr<Stream> second = device_->CreateStream(StreamPriority::kAttention);
  std::atomic<int> count{0};
  CountTask first_task(&count), second_task(&count);
  for (int i = 0; i < 200; ++i) {
    std::unique_ptr<Stream> first = device_->CreateStream(StreamPriority::kAttention);
    const StreamPosition position = first->Enqueue(&first_task);
    second->WaitFor(*first, position);
    second->Enqueue(&second_task);
    first.reset();
  }
  second->Synchronize();
  EXPECT_EQ(count, 400);
}

TEST_P(StreamConformance, DestructorWaitsForWorkAndWaits) {
  std::atomic<int> count{0};
  std::vector<CountTask> tasks(100, CountTask(&count));
  std::unique_ptr<Stream> other = device_->CreateStream(StreamPriority::kAttention);
  Gate gate;
  const StreamPosition position = other->Enqueue(&gate);
  std::unique_ptr<Stream> stream = device_->CreateStream(StreamPriority::kAttention);
  stream->WaitFor(*other, position);
  for (CountTask& task : tasks) stream->Enqueue(&task);
  stream->WaitFor(*other, position);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(count, 0);
    gate.Open();
  });
  stream.reset();
  EXPECT_EQ(count, 100);
  opener.join();
}

TEST_P(StreamConformance, ManyThreadsEnqueueOnManyStreams) {
  constexpr int kThreads = 8;
  constexpr int kStreams = 16;
  constexpr int kEach = 300;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    streams.push_back(
        device_->CreateStream(i % 3 == 0 ? StreamPriority::kCopy : StreamPriority::kAttention));
  }
  // One plain counter a stream: tasks of one stream never run at the same time.
  struct Counter : HostTask {
    void Run() override { ++*value; }
    int64_t* value = nullptr;
  };
  std::vector<int64_t> values(kStreams, 0);
  std::vector<Counter> counters(kStreams);
  for (int i = 0; i < kStreams; ++i) counters[i].value = &values[i];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        Stream& stream = *streams[(t + i) % kStreams];
        stream.Enqueue(&counters[(t + i) % kStreams]);
        if (i % 7 == 0) {
          Stream& other = *streams[(t + i + 5) % kStreams];
          stream.WaitFor(other, other.enqueued());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& stream : streams) stream->Synchronize();
  int64_t total = 0;
  for (const int64_t value : values) total += value;
  EXPECT_EQ(total, kThreads * kEach);
}

TEST_P(StreamConformance, ReserveIsAlignedZeroCostAndCommitChecksItsRange) {
  absl::StatusOr<Buffer> buffer = device_->Reserve(MemoryKind::kDevice, int64_t{1} << 36);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 4096, 0u);
  EXPECT_GE(buffer->bytes(), int64_t{1} << 36);
  EXPECT_TRUE(device_->Commit(*buffer, 0, 1 << 20).ok());
  EXPECT_TRUE(device_->Commit(*buffer, 0, 1 << 20).ok());
  EXPECT_TRUE(device_->Commit(*buffer, buffer->bytes(), 0).ok());
  EXPECT_EQ(device_->Commit(*buffer, buffer->bytes(), 1).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device_->Commit(*buffer, -1, 1).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(device_->Commit(*buffer, 0, buffer->bytes() + 1).code(), absl::StatusCode::kOutOfRange);
  Buffer moved = *std::move(buffer);
  EXPECT_NE(moved.data(), nullptr);
  moved.Reset();
  EXPECT_EQ(moved.data(), nullptr);
  EXPECT_EQ(device_->Reserve(MemoryKind::kHost, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Reserve(MemoryKind::kHost, INT64_MAX).status().code(),
            absl::StatusCode::kResourceExhausted);
}

INSTANTIATE_TEST_SUITE_P(Devices, StreamConformance,
                         testing::ValuesIn(std::vector<DeviceFactory>{DeviceFactories().front()}),
                         FactoryName);

}  // namespace
}  // namespace sluice
