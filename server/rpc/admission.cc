#include "server/rpc/admission.h"

#include <algorithm>
#include <chrono>

#include "server/base/error.h"

namespace sluice {
namespace {

// Bytes in hand are given back within a few round trips to the device.
constexpr absl::Duration kInflightRetryDelay = absl::Milliseconds(50);
// How long WaitIdle may miss that the last ticket came back.
constexpr absl::Duration kIdlePollPeriod = absl::Milliseconds(20);
// By then an orchestrator has started the next daemon, or a client has found another.
constexpr absl::Duration kShutdownRetryDelay = absl::Seconds(1);

absl::Status TooLarge(absl::string_view what, int64_t size_bytes, int64_t limit_bytes) {
  return Error(absl::StatusCode::kResourceExhausted, Reason::kMessageTooLarge,
               absl::StrCat("the ", what, " has ", size_bytes, " bytes; at most ", limit_bytes,
                            " are allowed (--max_message_bytes)"))
      .Meta("message", what)
      .Meta("size_bytes", size_bytes)
      .Meta("limit_bytes", limit_bytes);
}

}  // namespace

absl::Status Admission::Admit(int64_t request_bytes, Ticket* ticket) {
  ticket->Release();
  if (request_bytes > max_message_bytes_) {
    return TooLarge("request", request_bytes, max_message_bytes_);
  }
  // Counted before draining_ is read, so that WaitIdle sees every call that was let in.
  tickets_.fetch_add(1);
  const int64_t inflight_bytes = inflight_bytes_.fetch_add(request_bytes) + request_bytes;
  if (draining_.load()) {
    Leave(request_bytes);
    return Error(absl::StatusCode::kUnavailable, Reason::kShuttingDown, "the daemon shuts down")
        .Retry(kShutdownRetryDelay);
  }
  if (inflight_bytes > max_inflight_bytes_) {
    Leave(request_bytes);
    return Error(absl::StatusCode::kResourceExhausted, Reason::kInflightBytes,
                 absl::StrCat("requests of ", inflight_bytes,
                              " bytes would be held at once; at most ", max_inflight_bytes_,
                              " are allowed (--max_inflight_bytes)"))
        .Meta("request_bytes", request_bytes)
        .Meta("inflight_bytes", inflight_bytes - request_bytes)
        .Meta("limit_bytes", max_inflight_bytes_)
        .Retry(kInflightRetryDelay);
  }
  ticket->owner_ = this;
  ticket->bytes_ = request_bytes;
  return absl::OkStatus();
}

absl::Status Admission::CheckReply(int64_t reply_bytes) const {
  if (reply_bytes <= max_message_bytes_) return absl::OkStatus();
  return TooLarge("reply", reply_bytes, max_message_bytes_);
}

void Admission::Leave(int64_t bytes) {
  inflight_bytes_.fetch_sub(bytes);
  // Not under the lock, which Drain holds while it calls streams that may be in here: WaitIdle
  // looks again by itself.
  if (tickets_.fetch_sub(1) == 1 && draining_.load()) changed_.notify_all();
}

void Admission::AddStream(OpenStream* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.insert(stream);
  if (draining_.load()) stream->Drain();
}

void Admission::RemoveStream(OpenStream* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
  changed_.notify_all();
}

void Admission::Drain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (draining_.exchange(true)) return;
  for (OpenStream* stream : streams_) stream->Drain();
}

bool Admission::WaitIdle(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (tickets_.load() != 0 || !streams_.empty()) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.wait_for(lock, absl::ToChronoMicroseconds(std::min(left, kIdlePollPeriod)));
  }
  return true;
}

}  // namespace sluice
