#include "server/rpc/offload_stream.h"

#include <memory>

#include "absl/status/status.h"
#include "server/base/status_macros.h"
#include "server/rpc/offload_op.h"
#include "server/rpc/ordered_stream.h"
#include "server/rpc/status.h"
#include "server/rpc/wire.h"
#include "sluice/v1/swap.pb.h"

namespace sluice {
namespace {

class OffloadStream final : public OrderedStream {
 public:
  explicit OffloadStream(ServiceContext* context) : OrderedStream(context) { Begin(); }

 private:
  class Batch final : public Item, public OffloadOp {
   public:
    explicit Batch(OffloadStream* stream) : stream_(*stream) {}

    void Start() override {
      message_.Clear();
      const absl::Status status = Prepare();
      if (status.ok()) {
        Run(*session_);
      } else {
        End(status);
      }
    }

    void Refuse(const absl::Status& status) override {
      ack_.Clear();
      ack_.set_batch_id(message_.batch_id());
      ToRpcStatus(status, ack_.mutable_status());
      SerializeAck();
    }

    void Cancel() override { CancelRun(); }

    void Done() override { End(status()); }

   private:
    absl::Status Prepare() {
      SLUICE_RETURN_IF_ERROR(ParseMessage(&request, &message_));
      SLUICE_ASSIGN_OR_RETURN(
          session_, stream_.SessionFor(message_.batch().has_session(), message_.batch().session(),
                                       "batch.session"));
      return Parse(message_.batch(), *session_, stream_.context().admission());
    }

    // The batch may be used again, or be gone, when it returns.
    void End(absl::Status status) {
      if (status.ok()) {
        ack_.Clear();
        ack_.set_batch_id(message_.batch_id());
        status = Reply(*session_, ack_.mutable_result());
        if (status.ok()) SerializeAck();
      }
      if (!status.ok()) Refuse(status);
      // K and V are stored, or refused: their bytes need not wait for the ack to be written.
      message_.mutable_batch()->clear_k();
      message_.mutable_batch()->clear_v();
      stream_.Complete(this);
    }

    // An ack is small: its details are bounded.
    void SerializeAck() {
      SerializeMessage(ack_, stream_.context().admission(), &reply).IgnoreError();
    }

    OffloadStream& stream_;
    std::shared_ptr<Session> session_;  // of the newest message; the stream holds it too
    v1::OffloadStreamRequest message_;
    v1::OffloadStreamResponse ack_;
  };

  std::unique_ptr<Item> MakeItem() override { return std::make_unique<Batch>(this); }
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewOffloadStream(
    ServiceContext* context) {
  return new OffloadStream(context);
}

}  // namespace sluice
