// A daemon of a few lines that does as a test tells it: errors with details, odd streams, slow
// replies.
//
// Threads: gRPC calls the services from its own; what a test sets it sets before it calls.

#ifndef TESTS_CLIENT_FAKE_DAEMON_H_
#define TESTS_CLIENT_FAKE_DAEMON_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "sluice/v1/admin.grpc.pb.h"
#include "sluice/v1/attention.grpc.pb.h"
#include "sluice/v1/session.grpc.pb.h"
#include "sluice/v1/swap.grpc.pb.h"

namespace sluice::client {

inline google::rpc::Status RpcError(grpc::StatusCode code, const std::string& reason,
                                    int retry_ms = -1) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(absl::StrCat("fake ", reason));
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("sluice");
  (*info.mutable_metadata())["who"] = "fake";
  status.add_details()->PackFrom(info);
  if (retry_ms >= 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(retry_ms * 1000000);
    status.add_details()->PackFrom(retry);
  }
  return status;
}

inline grpc::Status GrpcError(grpc::StatusCode code, const std::string& reason, int retry_ms = -1) {
  const google::rpc::Status status = RpcError(code, reason, retry_ms);
  return grpc::Status(code, status.message(), status.SerializeAsString());
}

// Fails its first `failures` calls with `error`.
struct Script {
  std::atomic<int> calls{0};
  int failures = 0;
  grpc::Status error;

  grpc::Status Next() { return calls++ < failures ? error : grpc::Status::OK; }
};

class FakeDaemon final : public v1::AdminService::Service,
                         public v1::SessionService::Service,
                         public v1::SwapService::Service,
                         public v1::AttentionService::Service,
                         public grpc::health::v1::Health::Service {
 public:
  static constexpr int kBlockElements = 2;
  static constexpr uint32_t kBadBlock = 99;
  static constexpr uint32_t kBadLayer = 9;

  FakeDaemon() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(static_cast<v1::AdminService::Service*>(this));
    builder.RegisterService(static_cast<v1::SessionService::Service*>(this));
    builder.RegisterService(static_cast<v1::SwapService::Service*>(this));
    builder.RegisterService(static_cast<v1::AttentionService::Service*>(this));
    builder.RegisterService(static_cast<grpc::health::v1::Health::Service*>(this));
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~FakeDaemon() override { Stop(); }

  void Stop() { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

  Script get_server;
  Script drop_blocks;
  Script begin_tiles;
  absl::Duration delay = absl::ZeroDuration();  // of GetUsage
  std::atomic<bool> serving{true};
  bool cut_fetch_short = false;  // elements are missing
  bool fail_fetch = false;       // after the first message
  int fail_offload_at = -1;      // ends the stream with an error at this batch
  std::atomic<int> num_sessions{0};

 private:
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    if (request->service() == "nope") return grpc::Status(grpc::StatusCode::NOT_FOUND, "unknown");
    response->set_status(serving ? grpc::health::v1::HealthCheckResponse::SERVING
                                 : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }
  grpc::Status GetServer(grpc::ServerContext*, const v1::GetServerRequest*,
                         v1::GetServerResponse* response) override {
    response->set_version("fake");
    return get_server.Next();
  }
  grpc::Status GetUsage(grpc::ServerContext*, const v1::GetUsageRequest*,
                        v1::GetUsageResponse*) override {
    absl::SleepFor(delay);
    return grpc::Status::OK;
  }
  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    *response->mutable_session()->mutable_spec() = request->spec();
    response->mutable_session()->mutable_handle()->set_name(request->spec().name());
    response->mutable_session()->mutable_handle()->set_epoch(++num_sessions);
    return grpc::Status::OK;
  }
  // Three pages of one session each.
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest* request,
                            v1::ListSessionsResponse* response) override {
    const std::string page = request->page_token().empty() ? "0" : request->page_token();
    response->add_sessions()->mutable_handle()->set_name("session-" + page);
    if (page != "2") response->set_next_page_token(page == "0" ? "1" : "2");
    return grpc::Status::OK;
  }
  grpc::Status DropBlocks(grpc::ServerContext*, const v1::DropBlocksRequest*,
                          v1::DropBlocksResponse*) override {
    return drop_blocks.Next();
  }
  grpc::Status OffloadStream(grpc::ServerContext*,
                             grpc::ServerReaderWriter<v1::OffloadStreamResponse,
                                                      v1::OffloadStreamRequest>* stream) override {
    v1::OffloadStreamRequest request;
    for (int number = 0; stream->Read(&request); ++number) {
      if (number == fail_offload_at) return GrpcError(grpc::StatusCode::ABORTED, "FENCED");
      v1::OffloadStreamResponse response;
      response.set_batch_id(request.batch_id());
      if (request.batch().blocks(0).block_id() == kBadBlock) {
        *response.mutable_status() = RpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY");
      } else {
        response.mutable_result()->set_stored_blocks(request.batch().blocks_size());
        response.mutable_result()->set_stored_bytes(request.batch().k().data().size() * 2);
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
  // Two blocks a message; the elements of K are the block's id, those of V its layer.
  grpc::Status FetchBlocks(grpc::ServerContext*, const v1::FetchBlocksRequest* request,
                           grpc::ServerWriter<v1::FetchBlocksResponse>* writer) override {
    v1::FetchBlocksResponse response;
    const auto flush = [&] {
      if (cut_fetch_short) response.mutable_v()->mutable_data()->pop_back();
      writer->Write(response);
      response.Clear();
    };
    for (uint32_t layer : request->blocks().layers()) {
      for (uint32_t id : request->blocks().block_ids()) {
        v1::BlockInfo* info = response.add_blocks();
        info->set_layer(layer);
        info->set_block_id(id);
        for (int i = 0; i < kBlockElements; ++i) {
          response.mutable_k()->mutable_data()->append({static_cast<char>(id), '\0'});
          response.mutable_v()->mutable_data()->append({static_cast<char>(layer), '\0'});
        }
        if (response.blocks_size() == 2) flush();
        if (fail_fetch) return GrpcError(grpc::StatusCode::NOT_FOUND, "BLOCK_NOT_FOUND");
      }
    }
    if (response.blocks_size() > 0) flush();
    return grpc::Status::OK;
  }
  // out is q.
  grpc::Status DecodeStep(grpc::ServerContext*, const v1::DecodeStepRequest* request,
                          v1::DecodeStepResponse* response) override {
    if (request->layer() == kBadLayer) {
      return GrpcError(grpc::StatusCode::INVALID_ARGUMENT, "INVALID_FIELD");
    }
    *response->mutable_out() = request->q();
    for (const v1::DecodeSequence& sequence : request->sequences()) {
      v1::SequenceResult* result = response->add_sequences();
      if (sequence.context_tokens() == 0) {
        *result->mutable_status() =
            RpcError(grpc::StatusCode::FAILED_PRECONDITION, "TOKENS_MISSING");
      }
    }
    return grpc::Status::OK;
  }
  grpc::Status DecodeStream(grpc::ServerContext* context,
                            grpc::ServerReaderWriter<v1::DecodeStreamResponse,
                                                     v1::DecodeStreamRequest>* stream) override {
    v1::DecodeStreamRequest request;
    while (stream->Read(&request)) {
      v1::DecodeStreamResponse response;
      response.set_request_id(request.request_id());
      const grpc::Status status = DecodeStep(context, &request.step(), response.mutable_step());
      if (!status.ok()) {
        response.mutable_status()->ParseFromString(status.error_details());
        response.clear_step();
      }
      if (request.timeout().seconds() != 0)
        response.mutable_step()->mutable_stats()->set_total_us(
            request.timeout().seconds() * 1000000 + request.timeout().nanos() / 1000);
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
  grpc::Status BeginTiles(grpc::ServerContext*, const v1::BeginTilesRequest* request,
                          v1::BeginTilesResponse* response) override {
    response->set_run_id(static_cast<uint64_t>(request->q().shape(0)));
    return begin_tiles.Next();
  }

  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace sluice::client

#endif  // TESTS_CLIENT_FAKE_DAEMON_H_
