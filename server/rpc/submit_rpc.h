// Handlers of calls that a session works on: parse, submit, and reply when the session is done.
//
//   SubmitRpc<DecodeOp> decode_step_(context);
//   ... return decode_step_.Start(call, request, reply);
//
// An Op is a call of server/session with the messages it travels in:
//
//   struct Op : DecodeCall {
//     using Request = ...; using Response = ...;
//     static constexpr bool kKept = true;          // used again for later calls
//     absl::Status Parse(const Request& request, const Session& session, const Admission&
//     admission); void Run(Session& session);                  // Submit; Done() follows void
//     SetDeadline(absl::Time deadline); void CancelRun(); absl::Status Reply(const Session&
//     session, Response* response);  // after Done with an OK status
//   };
//
// Where kKept is set, calls with their messages are kept and used again, so that a call no larger
// than one before allocates nothing here.

#ifndef SERVER_RPC_SUBMIT_RPC_H_
#define SERVER_RPC_SUBMIT_RPC_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/base/status_macros.h"
#include "server/rpc/free_list.h"
#include "server/rpc/service_context.h"
#include "server/rpc/status.h"
#include "server/rpc/unary.h"
#include "server/rpc/wire.h"
#include "server/session/session.h"

namespace sluice {

inline absl::Time DeadlineOf(const grpc::CallbackServerContext& call) {
  const std::chrono::system_clock::time_point deadline = call.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

template <typename Op>
class SubmitRpc {
 public:
  // The context must outlive every call.
  explicit SubmitRpc(ServiceContext* context) : context_(*context) {}

  grpc::ServerUnaryReactor* Start(grpc::CallbackServerContext* call,
                                  const grpc::ByteBuffer* request_bytes,
                                  grpc::ByteBuffer* reply_bytes) {
    std::unique_ptr<Flight> flight = flights_.Take();
    if (flight == nullptr) flight = std::make_unique<Flight>(this);
    // It belongs to gRPC until OnDone.
    return flight.release()->Begin(call, request_bytes, reply_bytes);
  }

 private:
  static constexpr size_t kMaxKeptFlights = 64;
  // A call with larger messages is not kept: what it holds would never be given back.
  static constexpr int64_t kMaxKeptBytes = int64_t{4} << 20;

  class Flight final : public Op {
   public:
    explicit Flight(SubmitRpc* owner) : owner_(*owner) {}

    grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext* call,
                                    const grpc::ByteBuffer* request_bytes,
                                    grpc::ByteBuffer* reply_bytes) {
      // gRPC binds a reactor to one call, so there is a new one each time, in the same place.
      reactor_.emplace(this);
      grpc::ServerUnaryReactor* const reactor = &*reactor_;
      reply_bytes_ = reply_bytes;
      request_size_bytes_ = static_cast<int64_t>(request_bytes->Length());
      const absl::Status status = Prepare(call, request_bytes);
      if (status.ok()) {
        this->Run(*session_);  // Done() may have run when it returns
      } else {
        reactor->Finish(ToGrpcStatus(status));
      }
      return reactor;
    }

    void Done() override {
      absl::Status status = this->status();
      if (status.ok()) status = this->Reply(*session_, &response_);
      if (status.ok()) {
        status = SerializeMessage(response_, owner_.context_.admission(), reply_bytes_);
      }
      ticket_.ReleaseBytes();
      reactor_->Finish(ToGrpcStatus(status));
    }

   private:
    class Reactor final : public grpc::ServerUnaryReactor {
     public:
      explicit Reactor(Flight* flight) : flight_(*flight) {}
      void OnCancel() override { flight_.CancelRun(); }
      void OnDone() override { flight_.Recycle(); }

     private:
      Flight& flight_;
    };

    absl::Status Prepare(grpc::CallbackServerContext* call, const grpc::ByteBuffer* request_bytes) {
      SLUICE_RETURN_IF_ERROR(owner_.context_.admission().Admit(request_size_bytes_, &ticket_));
      SLUICE_RETURN_IF_ERROR(ParseMessage(Consume(request_bytes), &request_));
      SLUICE_ASSIGN_OR_RETURN(session_, owner_.context_.FindSession(request_.session()));
      this->SetDeadline(DeadlineOf(*call));
      return this->Parse(request_, *session_, owner_.context_.admission());
    }

    // gRPC is through with the call. The reactor, whose method this is called from, is gone
    // afterwards.
    void Recycle() {
      ticket_.Release();
      session_.reset();
      request_.Clear();
      reactor_.reset();
      std::unique_ptr<Flight> self(this);
      const int64_t reply_size_bytes = response_.GetCachedSize();
      if (Op::kKept && request_size_bytes_ <= kMaxKeptBytes && reply_size_bytes <= kMaxKeptBytes) {
        owner_.flights_.Give(std::move(self));
      }
    }

    SubmitRpc& owner_;
    std::optional<Reactor> reactor_;
    Admission::Ticket ticket_;
    std::shared_ptr<Session> session_;
    typename Op::Request request_;
    typename Op::Response response_;  // kept as it was, so that its memory is used again
    grpc::ByteBuffer* reply_bytes_ = nullptr;
    int64_t request_size_bytes_ = 0;
  };

  ServiceContext& context_;
  FreeList<Flight> flights_{kMaxKeptFlights};
};

}  // namespace sluice

#endif  // SERVER_RPC_SUBMIT_RPC_H_
