// A bidirectional stream of requests and replies, worked on several at a time and answered in
// order.
//
// Messages are read ahead while earlier ones are worked on: at most kWindow of them, and no further
// one once those in hand have max_message_bytes. Their work is begun in the order of arrival. A
// message that fails is answered with a status of its own; the next ones go on. When the client is
// done writing, the stream ends after the last reply. When the client is gone, work that has not
// begun is dropped, and the stream goes away once the rest has ended.
//
// Threads: reactions come on gRPC's threads, Complete on any. Decisions are made under one lock;
// gRPC and the session are called without it, since both may call back at once. Whoever holds no
// part of the stream (a read, a write, an item) may find it gone when the lock is let go.
// Ownership: a stream deletes itself when gRPC is through with it.

#ifndef SERVER_RPC_ORDERED_STREAM_H_
#define SERVER_RPC_ORDERED_STREAM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/admission.h"
#include "server/rpc/service_context.h"
#include "server/session/session.h"
#include "sluice/v1/session.pb.h"

namespace sluice {

class OrderedStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                      public OpenStream {
 public:
  // A message in hand; used again for later ones.
  class Item {
   public:
    virtual ~Item() = default;
    // Parses `request` and begins its work. Complete follows in any case, once, from any thread,
    // with `reply` made.
    virtual void Start() = 0;
    // The message was not admitted: makes `reply`. No Complete.
    virtual void Refuse(const absl::Status& status) = 0;
    // Drops the work if it has not begun; between Start's return and Complete.
    virtual void Cancel() = 0;

   protected:
    grpc::ByteBuffer request;
    grpc::ByteBuffer reply;

   private:
    friend class OrderedStream;
    enum class State { kFree, kStarted, kComplete };
    State state_ = State::kFree;
    int64_t request_bytes_ = 0;
    Admission::Ticket ticket_;
  };

  void OnReadDone(bool ok) final;
  void OnWriteDone(bool ok) final;
  void OnCancel() final;
  void OnDone() final;
  void Drain() final;

  // For items.

  void Complete(Item* item);
  // The session of a message, lease renewed; without a handle: that of the message before. Called
  // in order, from Start.
  [[nodiscard]] absl::StatusOr<std::shared_ptr<Session>> SessionFor(bool given,
                                                                    const v1::SessionHandle& handle,
                                                                    absl::string_view field);
  ServiceContext& context() { return context_; }

 protected:
  explicit OrderedStream(ServiceContext* context) : context_(*context) {}
  ~OrderedStream() override = default;
  // To be called once the object is whole; reads the first message.
  void Begin();

 private:
  static constexpr size_t kWindow = 8;

  struct Actions {
    Item* write = nullptr;
    bool read = false;
    bool finish = false;
  };

  virtual std::unique_ptr<Item> MakeItem() = 0;

  Item& ItemAt(uint64_t number) { return *items_[number % kWindow]; }
  // What can be done now, marked as begun; the lock is held.
  Actions Decide();
  // Does it; without the lock. The stream may be gone afterwards.
  void Act(const Actions& actions);
  void CancelStarted();
  void Release(Item* item);
  void LeaveSession();

  ServiceContext& context_;

  // Of the last message with a handle. Only used where messages begin, one at a time, and at the
  // end.
  std::shared_ptr<Session> session_;
  v1::SessionHandle handle_;

  std::mutex mutex_;
  std::array<std::unique_ptr<Item>, kWindow> items_;  // made when first needed
  uint64_t num_read_ = 0;     // messages read; the next one goes to item num_read_ % kWindow
  uint64_t num_written_ = 0;  // replies written
  int64_t held_bytes_ = 0;
  bool reading_ = false;
  bool starting_ = false;  // a message is between its read and the end of Start
  bool writing_ = false;
  bool reads_over_ = false;
  bool broken_ = false;  // the client is gone; nothing is written any more
  bool finished_ = false;
  grpc::ByteBuffer incoming_;
};

}  // namespace sluice

#endif  // SERVER_RPC_ORDERED_STREAM_H_
