#include "server/rpc/decode_stream.h"

#include <algorithm>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/decode_op.h"
#include "server/rpc/ordered_stream.h"
#include "server/rpc/status.h"
#include "server/rpc/submit_rpc.h"
#include "server/rpc/wire.h"
#include "sluice/v1/attention.pb.h"

namespace sluice {
namespace {

class DecodeStream final : public OrderedStream {
 public:
  DecodeStream(ServiceContext* context, grpc::CallbackServerContext* call)
      : OrderedStream(context), deadline_(DeadlineOf(*call)) {
    Begin();
  }

 private:
  class Step final : public Item, public DecodeOp {
   public:
    explicit Step(DecodeStream* stream) : stream_(*stream) {}

    void Start() override {
      message_.Clear();
      const absl::Status status = Prepare();
      if (status.ok()) {
        Run(*session_);
      } else {
        Refuse(status);
        End();
      }
    }

    void Refuse(const absl::Status& status) override {
      failure_.set_request_id(message_.request_id());
      ToRpcStatus(status, failure_.mutable_status());
      // A failure is small: its details are bounded.
      SerializeMessage(failure_, stream_.context().admission(), &reply).IgnoreError();
    }

    void Cancel() override { CancelRun(); }

    void Done() override {
      absl::Status status = DecodeOp::status();
      if (status.ok()) status = Reply(*session_, success_.mutable_step());
      if (status.ok()) {
        success_.set_request_id(message_.request_id());
        status = SerializeMessage(success_, stream_.context().admission(), &reply);
      }
      if (!status.ok()) Refuse(status);
      End();
    }

   private:
    absl::Status Prepare() {
      SLUICE_RETURN_IF_ERROR(ParseMessage(&request, &message_));
      SLUICE_ASSIGN_OR_RETURN(
          session_, stream_.SessionFor(message_.step().has_session(), message_.step().session(),
                                       "step.session"));
      absl::Time deadline = stream_.deadline_;
      if (message_.has_timeout()) {
        absl::Duration timeout;
        SLUICE_RETURN_IF_ERROR(FromProto(message_.timeout(), "timeout", &timeout));
        deadline = std::min(deadline, absl::Now() + timeout);
      }
      SetDeadline(deadline);
      return Parse(message_.step(), *session_, stream_.context().admission());
    }

    // The step may be used again, or be gone, when it returns.
    void End() { stream_.Complete(this); }

    DecodeStream& stream_;
    std::shared_ptr<Session> session_;  // of the newest message; the stream holds it too
    v1::DecodeStreamRequest message_;
    v1::DecodeStreamResponse success_;  // kept as it was, so that its memory is used again
    v1::DecodeStreamResponse failure_;
  };

  std::unique_ptr<Item> MakeItem() override { return std::make_unique<Step>(this); }

  const absl::Time deadline_;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewDecodeStream(
    ServiceContext* context, grpc::CallbackServerContext* call) {
  return new DecodeStream(context, call);
}

}  // namespace sluice
