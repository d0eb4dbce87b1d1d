// The first failure of a device, kept for good.
//
//   DeviceFailure failure;
//   failure.Set(absl::UnavailableError("stream.cc:12: cudaStreamQuery: cudaErrorIllegalAddress"));
//   if (failure.set()) return failure.status();
//
// Threads: every method may be called from any thread; Listen while no work runs.

#ifndef KERNELS_DEVICE_FAILURE_H_
#define KERNELS_DEVICE_FAILURE_H_

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "absl/status/status.h"

namespace sluice {

class DeviceFailure {
 public:
  using Listener = std::function<void(const absl::Status&)>;

  // Who is told of the failure: once, by the thread that saw it, with whatever locks it holds. So
  // it must be short, must not block and must not call the device.
  void Listen(Listener listener) {
    std::lock_guard<std::mutex> lock(mutex_);
    listener_ = std::move(listener);
  }

  // Keeps the first status, which is not OK, and tells the listener. Whatever comes later is a
  // consequence, and dropped.
  void Set(absl::Status status) {
    Listener listener;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (set_.load(std::memory_order_relaxed)) return;
      status_ = std::move(status);
      set_.store(true, std::memory_order_release);
      listener = listener_;
    }
    if (listener) listener(status_);
  }

  bool set() const { return set_.load(std::memory_order_acquire); }
  absl::Status status() const { return set() ? status_ : absl::OkStatus(); }

 private:
  std::mutex mutex_;
  Listener listener_;
  absl::Status status_;  // written once, before set_
  std::atomic<bool> set_{false};
};

}  // namespace sluice

#endif  // KERNELS_DEVICE_FAILURE_H_
