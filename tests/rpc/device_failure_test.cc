// A daemon whose device fails: what clients see until the process ends. That it ends is for
// tests/faults.

#include <string>
#include <thread>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using grpc::StatusCode;
using Attention = v1::AttentionService::Stub;
using Swap = v1::SwapService::Stub;

class DeviceFailureTest : public ::testing::Test {
 protected:
  void SetUp() override {
    v1::OffloadBlocksResponse stored;
    ASSERT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1, 2}), &stored).ok());
    v1::PutSequenceRequest put;
    *put.mutable_session() = model.handle;
    put.mutable_update()->set_generation(1);
    for (const uint32_t id : {1, 2}) put.mutable_update()->add_block_ids(id);
    v1::PutSequenceResponse done;
    ASSERT_TRUE(Invoke(*daemon.sequence, &v1::SequenceService::Stub::PutSequence, put, &done).ok());
  }
  static void ExpectFailed(const google::rpc::Status& status) {
    ExpectRefused(status, StatusCode::UNAVAILABLE, Reason::kDeviceFailed);
    EXPECT_FALSE(HasRetryInfo(status));
    EXPECT_NE(status.message().find("somewhere.cu:7"), std::string::npos) << status.message();
  }
  static void ExpectFailed(const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
    ExpectFailed(DetailsOf(status));
  }
  void Fail() { daemon.device().Fail("somewhere.cu:7: a kernel: cudaErrorIllegalAddress"); }
  v1::FetchBlocksRequest FetchRequest() const {
    v1::FetchBlocksRequest request;
    *request.mutable_session() = model.handle;
    request.mutable_blocks()->add_layers(0);
    request.mutable_blocks()->add_block_ids(1);
    return request;
  }

  Daemon daemon;
  Model model{SmallSpec("a"), daemon.Open("a")};
};

TEST_F(DeviceFailureTest, CallsAndMessagesInHandAreAnswered) {
  DeviceStall stall(daemon.device());
  grpc::Status step_status, offload_status;
  std::thread step([&] {
    v1::DecodeStepResponse response;
    step_status =
        Invoke(*daemon.attention, &Attention::DecodeStep, model.Step(0, {{0, 32}}), &response);
  });
  const v1::OffloadBlocksRequest batch = Model(model.spec, model.handle, 2).Offload(1, {5});
  std::thread offload([&] {
    v1::OffloadBlocksResponse response;
    offload_status = Invoke(*daemon.swap, &Swap::OffloadBlocks, batch, &response);
  });
  grpc::ClientContext decode_context;
  const auto decode = daemon.attention->DecodeStream(&decode_context);
  for (uint64_t id = 0; id < 5; ++id) {
    v1::DecodeStreamRequest message;
    message.set_request_id(id);
    *message.mutable_step() = Model(model.spec, model.handle, 3).Step(0, {{0, 32}});
    ASSERT_TRUE(decode->Write(message));
  }
  grpc::ClientContext fetch_context;
  const auto fetch = daemon.swap->FetchBlocks(&fetch_context, FetchRequest());
  absl::SleepFor(absl::Milliseconds(100));
  Fail();
  stall.Release();
  step.join();
  offload.join();
  ExpectFailed(step_status);
  ExpectFailed(offload_status);
  v1::DecodeStreamResponse reply;
  for (uint64_t id = 0; id < 5; ++id) {
    ASSERT_TRUE(decode->Read(&reply));
    EXPECT_EQ(reply.request_id(), id);
    EXPECT_FALSE(reply.has_step());
    ExpectFailed(reply.status());
  }
  decode->WritesDone();
  EXPECT_FALSE(decode->Read(&reply));
  EXPECT_TRUE(decode->Finish().ok());
  v1::FetchBlocksResponse piece;
  while (fetch->Read(&piece)) ADD_FAILURE() << "a piece from a failed device";
  ExpectFailed(fetch->Finish());
}

TEST_F(DeviceFailureTest, NewCallsAreRefusedAndTheServerSaysWhy) {
  v1::GetServerResponse server;
  ASSERT_TRUE(
      Invoke(*daemon.admin, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &server)
          .ok());
  EXPECT_EQ(server.device().failure(), "");
  Fail();
  v1::DecodeStepResponse step;
  ExpectFailed(Invoke(*daemon.attention, &Attention::DecodeStep, model.Step(0, {{0, 32}}), &step));
  v1::OffloadBlocksResponse stored;
  ExpectFailed(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {3}), &stored));
  v1::OpenSessionRequest open;
  *open.mutable_spec() = SmallSpec("b");
  v1::OpenSessionResponse opened;
  ExpectFailed(Invoke(*daemon.session, &v1::SessionService::Stub::OpenSession, open, &opened));
  grpc::ClientContext context;
  const auto fetch = daemon.swap->FetchBlocks(&context, FetchRequest());
  v1::FetchBlocksResponse piece;
  EXPECT_FALSE(fetch->Read(&piece));
  ExpectFailed(fetch->Finish());
  ASSERT_TRUE(
      Invoke(*daemon.admin, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &server)
          .ok());
  EXPECT_NE(server.device().failure().find("somewhere.cu:7"), std::string::npos);
}

TEST_F(DeviceFailureTest, HealthSaysNotServingForEveryService) {
  const auto stub = grpc::health::v1::Health::NewStub(daemon.NewChannel());
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  grpc::ClientContext watch_context;
  request.set_service("sluice.v1.SwapService");
  const auto watch = stub->Watch(&watch_context, request);
  ASSERT_TRUE(watch->Read(&response));
  daemon.server().ReportNotServing();
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  watch_context.TryCancel();
  for (const char* name : kHealthServices) {
    grpc::ClientContext context;
    request.set_service(name);
    ASSERT_TRUE(stub->Check(&context, request, &response).ok()) << name;
    EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING) << name;
  }
  // Calls are answered as before.
  v1::DecodeStepResponse step;
  EXPECT_TRUE(
      Invoke(*daemon.attention, &Attention::DecodeStep, model.Step(0, {{0, 32}}), &step).ok());
}

}  // namespace
}  // namespace sluice
