// Calls of a session that a test can wait for.

#ifndef TESTS_SESSION_WAITABLE_H_
#define TESTS_SESSION_WAITABLE_H_

#include <condition_variable>
#include <mutex>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/session/calls.h"

namespace sluice {

// A call of type C that a test can wait for.
template <typename C>
class Waitable : public C {
 public:
  void Done() override {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    wake_.notify_all();
  }
  const absl::Status& Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return done_; });
    done_ = false;
    return this->status();
  }
  bool IsDoneWithin(absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return wake_.wait_for(lock, absl::ToChronoMilliseconds(timeout), [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
};

}  // namespace sluice

#endif  // TESTS_SESSION_WAITABLE_H_
