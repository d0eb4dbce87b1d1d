#include "server/rpc/ordered_stream.h"

#include <utility>

#include "server/base/error.h"
#include "server/rpc/status.h"

namespace sluice {

void OrderedStream::Begin() {
  context_.admission().AddStream(this);
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    actions = Decide();
  }
  Act(actions);
}

OrderedStream::Actions OrderedStream::Decide() {
  Actions actions;
  if (finished_) return actions;
  if (broken_ && !writing_) {
    while (num_written_ < num_read_ && ItemAt(num_written_).state_ == Item::State::kComplete) {
      Release(&ItemAt(num_written_++));
    }
  }
  if (!broken_ && !writing_ && num_written_ < num_read_ &&
      ItemAt(num_written_).state_ == Item::State::kComplete) {
    actions.write = &ItemAt(num_written_);
    writing_ = true;
  }
  const bool draining = context_.admission().draining();
  if (!reading_ && !starting_ && !reads_over_ && !broken_ && !draining &&
      num_read_ - num_written_ < kWindow &&
      held_bytes_ < context_.admission().max_message_bytes()) {
    actions.read = true;
    reading_ = true;
  }
  const bool no_more = draining || ((reads_over_ || broken_) && !reading_);
  if (no_more && !starting_ && !writing_ && num_written_ == num_read_) {
    actions.finish = true;
    finished_ = true;
  }
  return actions;
}

void OrderedStream::Act(const Actions& actions) {
  if (actions.finish) {
    absl::Status status;
    if (broken_) {
      status = Error(absl::StatusCode::kCancelled, Reason::kCancelled, "the client went away");
    } else if (!reads_over_) {
      status = Error(absl::StatusCode::kUnavailable, Reason::kShuttingDown,
                     "the daemon shuts down; every message that was read is answered")
                   .Retry(absl::Seconds(1));
    }
    Finish(ToGrpcStatus(status));
    return;
  }
  // The read goes first: while it is outstanding, the end of the write cannot end the stream.
  if (actions.read) StartRead(&incoming_);
  if (actions.write != nullptr) actions.write->ticket_.ReleaseBytes();
  if (actions.write != nullptr) StartWrite(&actions.write->reply);
}

void OrderedStream::OnReadDone(bool ok) {
  Item* item = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reading_ = false;
    if (finished_) return;
    if (ok && !broken_) {
      std::unique_ptr<Item>& place = items_[num_read_ % kWindow];
      if (place == nullptr) place = MakeItem();
      item = place.get();
      item->request.Swap(&incoming_);
      item->request_bytes_ = static_cast<int64_t>(item->request.Length());
      item->state_ = Item::State::kStarted;
      held_bytes_ += item->request_bytes_;
      starting_ = true;
      ++num_read_;
    } else {
      reads_over_ = true;
    }
  }
  if (item != nullptr) {
    const absl::Status admitted = context_.admission().Admit(item->request_bytes_, &item->ticket_);
    if (admitted.ok()) {
      item->Start();
    } else {
      item->request.Clear();
      item->Refuse(admitted);
      Complete(item);
    }
  }
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    starting_ = false;
    // A client that went away meanwhile could not be told to an item that had not begun.
    if (broken_) CancelStarted();
    actions = Decide();
  }
  Act(actions);
}

void OrderedStream::Complete(Item* item) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    item->state_ = Item::State::kComplete;
    actions = Decide();
  }
  Act(actions);
}

void OrderedStream::OnWriteDone(bool ok) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    Release(&ItemAt(num_written_++));
    if (!ok && !broken_) {
      broken_ = true;
      if (!starting_) CancelStarted();
    }
    actions = Decide();
  }
  Act(actions);
}

void OrderedStream::OnCancel() {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) return;
    broken_ = true;
    if (!starting_) CancelStarted();
    actions = Decide();
  }
  Act(actions);
}

void OrderedStream::Drain() {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    actions = Decide();
  }
  Act(actions);
}

void OrderedStream::OnDone() {
  LeaveSession();
  context_.admission().RemoveStream(this);
  delete this;
}

void OrderedStream::CancelStarted() {
  for (uint64_t number = num_written_; number < num_read_; ++number) {
    if (ItemAt(number).state_ == Item::State::kStarted) ItemAt(number).Cancel();
  }
}

void OrderedStream::Release(Item* item) {
  held_bytes_ -= item->request_bytes_;
  item->reply.Clear();
  item->state_ = Item::State::kFree;
  item->ticket_.Release();
}

absl::StatusOr<std::shared_ptr<Session>> OrderedStream::SessionFor(bool given,
                                                                   const v1::SessionHandle& handle,
                                                                   absl::string_view field) {
  if (!given && session_ != nullptr) {
    const absl::Status status = session_->CheckHandle(handle_.epoch());
    if (!status.ok()) return status;
    return session_;
  }
  absl::StatusOr<std::shared_ptr<Session>> found = context_.FindSession(handle, field);
  if (found.ok() && *found != session_) {
    LeaveSession();
    session_ = *found;
    session_->EnterStream();
  }
  if (found.ok()) handle_ = handle;
  return found;
}

void OrderedStream::LeaveSession() {
  if (session_ == nullptr) return;
  session_->LeaveStream();
  session_.reset();
}

}  // namespace sluice
