#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/error.h"
#include "server/base/logging.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/page_token.h"
#include "server/rpc/services.h"
#include "server/rpc/unary.h"
#include "sluice/v1/session.grpc.pb.h"

namespace sluice {
namespace {

constexpr int64_t kDefaultPageSize = 100;
constexpr int64_t kMaxPageSize = 1000;

using Base = v1::SessionService::WithRawCallbackMethod_OpenSession<
    v1::SessionService::WithRawCallbackMethod_GetSession<
        v1::SessionService::WithRawCallbackMethod_ListSessions<
            v1::SessionService::WithRawCallbackMethod_RenewSession<
                v1::SessionService::WithRawCallbackMethod_CloseSession<
                    v1::SessionService::Service>>>>>;

class SessionServiceImpl final : public Base {
 public:
  explicit SessionServiceImpl(ServiceContext* context) : context_(*context) {}

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* call,
                                        const grpc::ByteBuffer* request_bytes,
                                        grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::OpenSessionRequest, v1::OpenSessionResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::OpenSessionRequest& request,
               v1::OpenSessionResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const SessionSpec spec, FromProto(request.spec()));
          SLUICE_ASSIGN_OR_RETURN(const SessionManager::Opened opened,
                                  context_.sessions().Open(spec));
          LogInfo(opened.attached ? "session attached" : "session opened",
                  {{"session", opened.info.name}, {"epoch", opened.info.epoch}});
          ToProto(opened.info, response->mutable_session());
          response->set_attached(opened.attached);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::GetSessionRequest, v1::GetSessionResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::GetSessionRequest& request,
               v1::GetSessionResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          ToProto(session->Info(), response->mutable_session());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer* request_bytes,
                                         grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::ListSessionsRequest, v1::ListSessionsResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::ListSessionsRequest& request,
               v1::ListSessionsResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const int64_t page_size,
                                  PageSize(request.page_size(), kDefaultPageSize, kMaxPageSize));
          SLUICE_ASSIGN_OR_RETURN(const std::string first_name,
                                  DecodePageToken(PageKind::kSessions, "", request.page_token()));
          const std::vector<SessionInfo> infos =
              context_.sessions().List(first_name, page_size + 1);
          for (const SessionInfo& info : infos) {
            if (response->sessions_size() == page_size) {
              response->set_next_page_token(EncodePageToken(PageKind::kSessions, "", info.name));
              break;
            }
            ToProto(info, response->add_sessions());
          }
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* RenewSession(grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer* request_bytes,
                                         grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::RenewSessionRequest, v1::RenewSessionResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::RenewSessionRequest& request,
               v1::RenewSessionResponse* response) -> absl::Status {
          // Finding a session renews its lease.
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          ToProto(session->LeaseExpiry(), response->mutable_expire_time());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer* request_bytes,
                                         grpc::ByteBuffer* reply_bytes) override {
    grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
    const absl::Status status = StartClose(reactor, request_bytes, reply_bytes);
    if (!status.ok()) reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

 private:
  // An OK status: the reactor is finished when the session is closed.
  absl::Status StartClose(grpc::ServerUnaryReactor* reactor, const grpc::ByteBuffer* request_bytes,
                          grpc::ByteBuffer* reply_bytes) {
    // std::function wants what it holds to be copyable, which a ticket is not.
    auto ticket = std::make_shared<Admission::Ticket>();
    SLUICE_RETURN_IF_ERROR(
        context_.admission().Admit(static_cast<int64_t>(request_bytes->Length()), ticket.get()));
    v1::CloseSessionRequest request;
    SLUICE_RETURN_IF_ERROR(ParseMessage(Consume(request_bytes), &request));
    if (request.mode() != v1::CLOSE_MODE_KEEP_DATA &&
        request.mode() != v1::CLOSE_MODE_DELETE_DATA) {
      return InvalidField("mode", static_cast<int>(request.mode()),
                          "CLOSE_MODE_KEEP_DATA or CLOSE_MODE_DELETE_DATA");
    }
    if (request.session().name().empty()) {
      return InvalidField("session.name", "empty", "the handle that OpenSession gave");
    }
    const std::string name = request.session().name();
    const bool keep_data = request.mode() == v1::CLOSE_MODE_KEEP_DATA;
    context_.sessions().Close(
        name, request.session().epoch(), keep_data,
        [this, reactor, reply_bytes, ticket, name, keep_data](absl::StatusOr<int64_t> freed_bytes) {
          absl::Status status = freed_bytes.status();
          if (status.ok()) {
            LogInfo("session closed",
                    {{"session", name}, {"keep_data", keep_data}, {"freed_bytes", *freed_bytes}});
            v1::CloseSessionResponse response;
            response.set_freed_bytes(*freed_bytes);
            status = SerializeMessage(response, context_.admission(), reply_bytes);
          }
          ticket->Release();
          reactor->Finish(ToGrpcStatus(status));
        });
    return absl::OkStatus();
  }

  ServiceContext& context_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewSessionService(ServiceContext* context) {
  return std::make_unique<SessionServiceImpl>(context);
}

}  // namespace sluice
