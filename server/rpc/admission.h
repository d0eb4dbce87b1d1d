// What the daemon takes on at once: message sizes, request bytes in hand, and nothing new while it
// shuts down.
//
//   Admission::Ticket ticket;
//   SLUICE_RETURN_IF_ERROR(admission.Admit(request.Length(), &ticket));
//   ... the ticket lives as long as the request's bytes do ...
//
// Threads: safe; a Ticket is its holder's.

#ifndef SERVER_RPC_ADMISSION_H_
#define SERVER_RPC_ADMISSION_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace sluice {

// A stream that stays open between messages, and so has to be told when the daemon wants to end.
class OpenStream {
 public:
  // Finishes with SHUTTING_DOWN as soon as its messages in hand are answered. Not blocking.
  virtual void Drain() = 0;

 protected:
  ~OpenStream() = default;
};

class Admission {
 public:
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)), bytes_(other.bytes_) {}
    Ticket& operator=(Ticket&& other) noexcept {
      if (this != &other) {
        Release();
        owner_ = std::exchange(other.owner_, nullptr);
        bytes_ = other.bytes_;
      }
      return *this;
    }
    ~Ticket() { Release(); }
    void Release() {
      if (owner_ != nullptr) std::exchange(owner_, nullptr)->Leave(bytes_);
    }
    // Gives the bytes back ahead of the reply, so that a client that has its reply is not refused
    // for its own earlier call; the call itself counts on until Release.
    void ReleaseBytes() {
      if (owner_ != nullptr) owner_->LeaveBytes(std::exchange(bytes_, 0));
    }

   private:
    friend class Admission;
    Admission* owner_ = nullptr;
    int64_t bytes_ = 0;
  };

  Admission(int64_t max_message_bytes, int64_t max_inflight_bytes)
      : max_message_bytes_(max_message_bytes), max_inflight_bytes_(max_inflight_bytes) {}

  // RESOURCE_EXHAUSTED MESSAGE_TOO_LARGE or INFLIGHT_BYTES; UNAVAILABLE SHUTTING_DOWN.
  [[nodiscard]] absl::Status Admit(int64_t request_bytes, Ticket* ticket);
  // RESOURCE_EXHAUSTED MESSAGE_TOO_LARGE for a reply of this size.
  [[nodiscard]] absl::Status CheckReply(int64_t reply_bytes) const;

  int64_t max_message_bytes() const { return max_message_bytes_; }
  int64_t max_inflight_bytes() const { return max_inflight_bytes_; }
  int64_t inflight_bytes() const { return inflight_bytes_.load(std::memory_order_relaxed); }

  // A stream added while shutting down is drained at once.
  void AddStream(OpenStream* stream);
  void RemoveStream(OpenStream* stream);

  bool draining() const { return draining_.load(); }
  // From now on Admit refuses; open streams are drained.
  void Drain();
  // After Drain: waits until no ticket is out and no stream open. False: `timeout` came first.
  bool WaitIdle(absl::Duration timeout);

 private:
  void Leave(int64_t bytes);
  void LeaveBytes(int64_t bytes) { inflight_bytes_.fetch_sub(bytes); }

  const int64_t max_message_bytes_;
  const int64_t max_inflight_bytes_;
  std::atomic<int64_t> inflight_bytes_{0};
  std::atomic<int64_t> tickets_{0};
  std::atomic<bool> draining_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_set<OpenStream*> streams_;
};

}  // namespace sluice

#endif  // SERVER_RPC_ADMISSION_H_
