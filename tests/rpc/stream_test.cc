// DecodeStream: order, failures of single messages, ends of all kinds.

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using Attention = v1::AttentionService::Stub;

class DecodeStreamTest : public ::testing::Test {
 protected:
  DecodeStreamTest() : model(SmallSpec("a"), daemon.Open("a")) {
    v1::OffloadBlocksResponse stored;
    EXPECT_TRUE(Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks,
                       model.Offload(0, {1, 2}), &stored)
                    .ok());
    v1::PutSequenceRequest put;
    *put.mutable_session() = model.handle;
    put.mutable_update()->set_generation(1);
    put.mutable_update()->add_block_ids(1);
    put.mutable_update()->add_block_ids(2);
    v1::PutSequenceResponse response;
    EXPECT_TRUE(
        Invoke(*daemon.sequence, &v1::SequenceService::Stub::PutSequence, put, &response).ok());
  }
  v1::DecodeStreamRequest Message(uint64_t request_id, bool with_session) {
    v1::DecodeStreamRequest message;
    message.set_request_id(request_id);
    *message.mutable_step() = model.Step(0, {{0, 20}});
    if (!with_session) message.mutable_step()->clear_session();
    return message;
  }
  int64_t InflightBytes() {
    v1::GetUsageResponse usage;
    EXPECT_TRUE(
        Invoke(*daemon.admin, &v1::AdminService::Stub::GetUsage, v1::GetUsageRequest(), &usage)
            .ok());
    return usage.inflight_bytes();
  }

  Daemon daemon;
  Model model;
};

TEST_F(DecodeStreamTest, ManyInFlightAnsweredInOrder) {
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  constexpr uint64_t kMessages = 100;
  std::vector<v1::DecodeStreamRequest> messages;
  for (uint64_t i = 0; i < kMessages; ++i) messages.push_back(Message(i * i, i == 0));
  // Some that fail: one whole, one in its sequence.
  messages[10].mutable_step()->set_layer(2);
  messages[20].mutable_step()->mutable_sequences(0)->set_sequence_id(5);
  std::thread writer([&] {
    for (const v1::DecodeStreamRequest& message : messages) ASSERT_TRUE(stream->Write(message));
    stream->WritesDone();
  });
  v1::DecodeStreamResponse reply;
  for (uint64_t i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.request_id(), i * i);
    if (i == 10) {
      ExpectRefused(reply.status(), grpc::StatusCode::INVALID_ARGUMENT, Reason::kInvalidField,
                    "layer");
      EXPECT_FALSE(reply.has_step());
      continue;
    }
    EXPECT_EQ(reply.status().code(), 0);
    ASSERT_EQ(reply.step().sequences_size(), 1);
    if (i == 20) {
      ExpectRefused(reply.step().sequences(0).status(), grpc::StatusCode::NOT_FOUND,
                    Reason::kSequenceNotFound);
      continue;
    }
    EXPECT_FALSE(reply.step().sequences(0).has_status());
    ExpectClose(Numbers(reply.step().out()),
                model.Attend(messages[i].step().q(), 0, 0, {1, 2}, 20, {}, nullptr));
  }
  writer.join();
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, HalfCloseFinishesAfterTheLastReply) {
  DeviceStall stall(daemon.device());
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  for (uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(stream->Write(Message(i, i == 0)));
  stream->WritesDone();
  absl::SleepFor(absl::Milliseconds(50));
  stall.Release();
  v1::DecodeStreamResponse reply;
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.request_id(), i);
    EXPECT_EQ(reply.status().code(), 0);
  }
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, AMessageThatIsLateIsDroppedAndTheNextGoesOn) {
  DeviceStall stall(daemon.device());
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  for (uint64_t i = 0; i < 5; ++i) {
    v1::DecodeStreamRequest message = Message(i, i == 0);
    if (i == 3) message.mutable_timeout()->set_nanos(1'000'000);
    ASSERT_TRUE(stream->Write(message));
  }
  absl::SleepFor(absl::Milliseconds(100));
  stall.Release();
  v1::DecodeStreamResponse reply;
  for (uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.request_id(), i);
    if (i == 3) {
      ExpectRefused(reply.status(), grpc::StatusCode::DEADLINE_EXCEEDED, Reason::kDeadlineExceeded);
    } else {
      EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    }
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, AMessageThatIsNoneIsRefusedAndTheNextGoesOn) {
  // A stub that sends bytes as they are.
  const std::shared_ptr<grpc::Channel> channel = daemon.NewChannel();
  const grpc::internal::RpcMethod method("/sluice.v1.AttentionService/DecodeStream",
                                         grpc::internal::RpcMethod::BIDI_STREAMING, channel);
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel.get(), method, &context));
  const auto send = [&](const std::string& bytes) {
    const grpc::Slice slice(bytes);
    ASSERT_TRUE(stream->Write(grpc::ByteBuffer(&slice, 1)));
  };
  const auto receive = [&] {
    grpc::ByteBuffer bytes;
    v1::DecodeStreamResponse reply;
    EXPECT_TRUE(stream->Read(&bytes));
    EXPECT_TRUE(
        grpc::SerializationTraits<v1::DecodeStreamResponse>::Deserialize(&bytes, &reply).ok());
    return reply;
  };
  send("\xff\xff\xff");
  ExpectRefused(receive().status(), grpc::StatusCode::INVALID_ARGUMENT, Reason::kInvalidField,
                "request");
  send(Message(7, true).SerializeAsString());
  const v1::DecodeStreamResponse reply = receive();
  EXPECT_EQ(reply.request_id(), 7u);
  EXPECT_EQ(reply.status().code(), 0);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, AFencedHandleFailsMessagesNotTheStream) {
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  v1::DecodeStreamResponse reply;
  ASSERT_TRUE(stream->Write(Message(1, true)));
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0);
  const v1::SessionHandle newer = daemon.Open("a");
  ASSERT_TRUE(stream->Write(Message(2, false)));
  ASSERT_TRUE(stream->Read(&reply));
  ExpectRefused(reply.status(), grpc::StatusCode::ABORTED, Reason::kFenced);
  model.handle = newer;
  for (const bool with_session : {true, false}) {
    ASSERT_TRUE(stream->Write(Message(3, with_session)));
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, AVanishedClientLeavesNothingBehind) {
  for (int round = 0; round < 20; ++round) {
    auto stall = round % 2 == 0 ? std::make_unique<DeviceStall>(daemon.device()) : nullptr;
    grpc::ClientContext context;
    const auto stream = daemon.attention->DecodeStream(&context);
    for (uint64_t i = 0; i < 6; ++i) ASSERT_TRUE(stream->Write(Message(i, i == 0)));
    if (stall != nullptr) {
      ASSERT_TRUE(Eventually([&] { return InflightBytes() > 0; }));
    }
    context.TryCancel();
    if (stall != nullptr) absl::SleepFor(absl::Milliseconds(10));
    stall.reset();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_TRUE(Eventually([&] { return InflightBytes() == 0; }));
  // And the session works on.
  v1::DecodeStepResponse response;
  EXPECT_TRUE(
      Invoke(*daemon.attention, &Attention::DecodeStep, model.Step(0, {{0, 20}}), &response).ok());
}

TEST_F(DecodeStreamTest, AClientThatDoesNotReadIsNotReadFrom) {
  DeviceStall stall(daemon.device());
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  for (uint64_t i = 0; i < 50; ++i) ASSERT_TRUE(stream->Write(Message(i, i == 0)));
  absl::SleepFor(absl::Milliseconds(100));
  // Eight messages in hand, the rest waits in the connection.
  EXPECT_LE(InflightBytes(), 8 * static_cast<int64_t>(Message(0, true).ByteSizeLong()));
  EXPECT_GT(InflightBytes(), 0);
  stall.Release();
  stream->WritesDone();
  v1::DecodeStreamResponse reply;
  uint64_t num_replies = 0;
  while (stream->Read(&reply)) ++num_replies;
  EXPECT_EQ(num_replies, 50u);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(DecodeStreamTest, ShutdownAnswersWhatWasReadAndEndsTheStream) {
  grpc::ClientContext idle_context;
  const auto idle = daemon.attention->DecodeStream(&idle_context);
  grpc::ClientContext context;
  const auto stream = daemon.attention->DecodeStream(&context);
  v1::DecodeStreamResponse reply;
  std::thread shutdown;
  {
    DeviceStall stall(daemon.device());
    ASSERT_TRUE(stream->Write(Message(1, true)));
    ASSERT_TRUE(Eventually([&] { return InflightBytes() > 0; }));
    shutdown = std::thread([&] { daemon.server().Shutdown(absl::Seconds(10)); });
    const grpc::Status status = idle->Finish();
    ExpectRefused(status, grpc::StatusCode::UNAVAILABLE, Reason::kShuttingDown);
    EXPECT_TRUE(HasRetryInfo(DetailsOf(status)));
    v1::DecodeStepResponse response;
    const grpc::Status refused =
        Invoke(*daemon.attention, &Attention::DecodeStep, model.Step(0, {{0, 20}}), &response);
    ExpectRefused(refused, grpc::StatusCode::UNAVAILABLE, Reason::kShuttingDown);
  }
  ASSERT_TRUE(stream->Read(&reply));
  EXPECT_EQ(reply.request_id(), 1u);
  EXPECT_EQ(reply.status().code(), 0);
  EXPECT_FALSE(stream->Read(&reply));
  ExpectRefused(stream->Finish(), grpc::StatusCode::UNAVAILABLE, Reason::kShuttingDown);
  shutdown.join();
}

}  // namespace
}  // namespace sluice
