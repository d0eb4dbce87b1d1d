// A device for tests: another one, the CPU's say, with its streams in reach, memory that can be
// refused, and failures that can be played.
//
//   TestDevice device(4);
//   auto session = ...;                       // creates its streams: attention, ingest, fetch
//   StreamGate gate(*device.streams()[1]);    // nothing enqueued on the ingest stream from here on
//   runs ... gate.Open();                              // ... before this
//
// `strict`: with the memory of a GPU; see strict_device.h.
//
// Threads: streams() is for the test's own thread; the rest as Device. A closed gate holds one
// worker of the device.

#ifndef TESTS_BASE_TEST_DEVICE_H_
#define TESTS_BASE_TEST_DEVICE_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/device/device.h"
#include "kernels/device/failure.h"
#include "tests/base/strict_device.h"

namespace sluice {

class TestDevice final : public Device {
 public:
  explicit TestDevice(int num_threads, bool strict = false)
      : TestDevice(*CreateCpuDevice({.num_threads = num_threads}), strict) {}
  // `strict`: one that reads any host memory becomes one that is as strict about memory as a GPU.
  explicit TestDevice(std::unique_ptr<Device> device, bool strict = false)
      : device_(strict && device->info().reads_any_host_memory
                    ? CreateStrictDevice(std::move(device))
                    : std::move(device)) {}

  // All streams ever created, in order.
  const std::vector<Stream*>& streams() const { return streams_; }
  // Reserve and Commit succeed this often, then fail.
  std::atomic<int64_t> reserves_left{1 << 30};
  std::atomic<int64_t> commits_left{1 << 30};

  // Plays a device that fails: what is enqueued runs on, and counts for nothing.
  void Fail(absl::string_view why) { failure_.Set(absl::UnavailableError(why)); }
  DeviceFailure& failure() { return failure_; }

  const DeviceInfo& info() const override { return device_->info(); }
  absl::Status status() const override {
    return failure_.set() ? failure_.status() : device_->status();
  }
  absl::StatusOr<Buffer> Reserve(MemoryKind kind, int64_t bytes) override {
    if (failure_.set()) return failure_.status();
    if (reserves_left-- <= 0) return absl::ResourceExhaustedError("no address space: injected");
    return device_->Reserve(kind, bytes);
  }
  absl::Status Commit(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) override {
    if (failure_.set()) return failure_.status();
    if (commits_left-- <= 0) return absl::ResourceExhaustedError("no memory: injected");
    return device_->Commit(buffer, offset_bytes, bytes);
  }
  absl::Status TakeDeviceMemory(int64_t bytes) override { return device_->TakeDeviceMemory(bytes); }
  std::unique_ptr<Stream> CreateStream(StreamPriority priority) override {
    auto stream = device_->CreateStream(priority);
    streams_.push_back(stream.get());
    return stream;
  }
  Ops& ops() override { return device_->ops(); }

 private:
  std::unique_ptr<Device> device_;
  DeviceFailure failure_;
  std::vector<Stream*> streams_;
};

// Holds a stream up until it is opened (at the latest when it is destroyed).
class StreamGate final : public HostTask {
 public:
  explicit StreamGate(Stream& stream) : stream_(stream), position_(stream.Enqueue(this)) {}
  ~StreamGate() override {
    Open();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
  }

  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void WaitUntilReached() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  // Until everything before the gate, and the gate, is complete.
  void WaitUntilPassed() {
    Open();
    while (stream_.completed() < position_) stream_.Synchronize();
  }

 private:
  void Run() override {
    std::unique_lock<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    passed_ = true;
    changed_.notify_all();
  }

  Stream& stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  bool reached_ = false;
  bool passed_ = false;
  const StreamPosition position_;
};

}  // namespace sluice

#endif  // TESTS_BASE_TEST_DEVICE_H_
