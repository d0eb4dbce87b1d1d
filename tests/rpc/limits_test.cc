// Bounds: message sizes, request bytes in hand, deadlines, cancellation; and the edges of
// listening.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/impl/client_unary_call.h"
#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using grpc::StatusCode;
using Attention = v1::AttentionService::Stub;
using Swap = v1::SwapService::Stub;

constexpr int64_t kMaxMessageBytes = 64 << 10;

int64_t InflightBytes(Daemon& daemon) {
  v1::GetUsageResponse usage;
  EXPECT_TRUE(
      Invoke(*daemon.admin, &v1::AdminService::Stub::GetUsage, v1::GetUsageRequest(), &usage).ok());
  return usage.inflight_bytes();
}

// An offload whose message has exactly this many bytes; what is too much is a tag that no block may
// have.
v1::OffloadBlocksRequest Sized(Model& model, int64_t message_bytes) {
  v1::OffloadBlocksRequest request = model.Offload(0, {1});
  request.mutable_k()->mutable_data()->resize(static_cast<size_t>(message_bytes));
  while (static_cast<int64_t>(request.ByteSizeLong()) > message_bytes) {
    request.mutable_k()->mutable_data()->resize(
        request.k().data().size() - (request.ByteSizeLong() - static_cast<size_t>(message_bytes)));
  }
  EXPECT_EQ(static_cast<int64_t>(request.ByteSizeLong()), message_bytes);
  return request;
}

TEST(MessageLimit, JustUnderIsReadAndJustOverIsRefusedWithDetails) {
  Daemon daemon(DaemonOptions().MaxMessageBytes(kMaxMessageBytes));
  Model model(SmallSpec("a"), daemon.Open("a"));
  v1::OffloadBlocksResponse response;
  // Read, and found to be of the wrong length.
  grpc::Status status =
      Invoke(*daemon.swap, &Swap::OffloadBlocks, Sized(model, kMaxMessageBytes), &response);
  ExpectRefused(status, StatusCode::INVALID_ARGUMENT, Reason::kInvalidField, "k.data");
  for (const int64_t bytes : {kMaxMessageBytes + 1, kMaxMessageBytes + (512 << 10)}) {
    status = Invoke(*daemon.swap, &Swap::OffloadBlocks, Sized(model, bytes), &response);
    ExpectRefused(status, StatusCode::RESOURCE_EXHAUSTED, Reason::kMessageTooLarge);
    EXPECT_EQ(Metadata(DetailsOf(status), "size_bytes"), absl::StrCat(bytes));
    EXPECT_EQ(Metadata(DetailsOf(status), "limit_bytes"), absl::StrCat(kMaxMessageBytes));
  }
  // Far over, gRPC answers by itself.
  status = Invoke(*daemon.swap, &Swap::OffloadBlocks, Sized(model, 4 << 20), &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1}), &response).ok());
}

TEST(MessageLimit, AStreamGoesOnAfterAMessageThatIsTooLarge) {
  Daemon daemon(DaemonOptions().MaxMessageBytes(kMaxMessageBytes));
  Model model(SmallSpec("a"), daemon.Open("a"));
  grpc::ClientContext context;
  const auto stream = daemon.swap->OffloadStream(&context);
  v1::OffloadStreamResponse ack;
  for (int round = 0; round < 3; ++round) {
    v1::OffloadStreamRequest request;
    request.set_batch_id(1);
    *request.mutable_batch() = Sized(model, kMaxMessageBytes + 1);
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&ack));
    ExpectRefused(ack.status(), StatusCode::RESOURCE_EXHAUSTED, Reason::kMessageTooLarge);
    request.set_batch_id(2);
    *request.mutable_batch() = model.Offload(0, {1});
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&ack));
    EXPECT_EQ(ack.batch_id(), 2u);
    EXPECT_EQ(ack.status().code(), 0);
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&ack));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(MessageLimit, RepliesThatWouldBeTooLargeAreRefusedBeforeTheyAreComputed) {
  Daemon daemon(DaemonOptions().MaxMessageBytes(kMaxMessageBytes));
  v1::SessionSpec spec = SmallSpec("a");
  spec.set_max_blocks(4096);
  Model model(spec, daemon.Open(spec));
  // 4 MiB of A_g for a request of 8 KiB; the blocks are not even there.
  v1::ReadProjectedKeysRequest read;
  *read.mutable_session() = model.handle;
  for (uint32_t id = 0; id < 4096; ++id) read.add_block_ids(id);
  v1::ReadProjectedKeysResponse keys;
  grpc::Status status = Invoke(*daemon.attention, &Attention::ReadProjectedKeys, read, &keys);
  ExpectRefused(status, StatusCode::RESOURCE_EXHAUSTED, Reason::kMessageTooLarge);
  EXPECT_EQ(Metadata(DetailsOf(status), "message"), "reply");

  // 400 rows of F32 need 200 KiB, whatever the sequence.
  v1::DecodeStepRequest step = model.Step(0, {});
  for (int i = 0; i < 8; ++i) {
    step.add_sequences()->set_sequence_id(static_cast<uint32_t>(i));
    step.mutable_sequences(i)->set_query_tokens(50);
  }
  step.mutable_output()->set_dtype(v1::DTYPE_F32);
  v1::DecodeStepResponse response;
  status = Invoke(*daemon.attention, &Attention::DecodeStep, step, &response);
  ExpectRefused(status, StatusCode::RESOURCE_EXHAUSTED, Reason::kMessageTooLarge);
}

TEST(MessageLimit, OutputsOfATileRunThatAreTooLargeLeaveTheRun) {
  Daemon daemon(DaemonOptions().MaxMessageBytes(kMaxMessageBytes));
  Model model(SmallSpec("a"), daemon.Open("a"));
  v1::BeginTilesRequest begin;
  *begin.mutable_session() = model.handle;
  *begin.mutable_q() = model.RandomTensor({16, 4, 32});
  v1::BeginTilesResponse run;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run).ok());
  v1::FinalizeTilesRequest finalize;
  *finalize.mutable_session() = model.handle;
  finalize.set_run_id(run.run_id());
  v1::FinalizeTilesResponse result;
  EXPECT_TRUE(Invoke(*daemon.attention, &Attention::FinalizeTiles, finalize, &result).ok());

  *begin.mutable_q() = model.RandomTensor({200, 4, 32});
  v1::SessionSpec spec = SmallSpec("b");
  spec.set_max_sequences(512);
  *begin.mutable_session() = daemon.Open(spec);
  *finalize.mutable_session() = begin.session();
  const grpc::Status begun = Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run);
  ASSERT_TRUE(begun.ok()) << begun.error_message();
  finalize.set_run_id(run.run_id());
  finalize.set_return_state(true);
  ExpectRefused(Invoke(*daemon.attention, &Attention::FinalizeTiles, finalize, &result),
                StatusCode::RESOURCE_EXHAUSTED, Reason::kMessageTooLarge);
  finalize.set_return_state(false);
  EXPECT_TRUE(Invoke(*daemon.attention, &Attention::FinalizeTiles, finalize, &result).ok());
}

TEST(MessageLimit, ARequestThatIsNoneIsAnInvalidArgument) {
  Daemon daemon;
  const std::shared_ptr<grpc::Channel> channel = daemon.NewChannel();
  const grpc::internal::RpcMethod method("/sluice.v1.SessionService/OpenSession",
                                         grpc::internal::RpcMethod::NORMAL_RPC, channel);
  grpc::ClientContext context;
  const grpc::Slice slice("\xff\xff\xff");
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::internal::BlockingUnaryCallImpl<grpc::ByteBuffer, grpc::ByteBuffer> call(
      channel.get(), method, &context, request, &response);
  ExpectRefused(call.status(), StatusCode::INVALID_ARGUMENT, Reason::kInvalidField, "request");
}

TEST(InflightLimit, IsOverAllCallsAndGivenBack) {
  DaemonOptions options = DaemonOptions().MaxMessageBytes(kMaxMessageBytes);
  options.rpc.max_inflight_bytes = kMaxMessageBytes;
  Daemon daemon(options);
  Model model(SmallSpec("a"), daemon.Open("a"));
  Model other(SmallSpec("b"), daemon.Open("b"));
  const std::vector<uint32_t> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  std::thread first;
  {
    DeviceStall stall(daemon.device());
    first = std::thread([&] {
      v1::OffloadBlocksResponse response;
      EXPECT_TRUE(
          Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, ids), &response).ok());
    });
    ASSERT_TRUE(Eventually([&] { return InflightBytes(daemon) > 40'000; }));
    v1::OffloadBlocksResponse response;
    const grpc::Status status =
        Invoke(*daemon.swap, &Swap::OffloadBlocks, other.Offload(0, ids), &response);
    ExpectRefused(status, StatusCode::RESOURCE_EXHAUSTED, Reason::kInflightBytes);
    EXPECT_TRUE(HasRetryInfo(DetailsOf(status)));
    // A stream's message too, and the stream goes on.
    grpc::ClientContext context;
    const auto stream = daemon.swap->OffloadStream(&context);
    v1::OffloadStreamRequest message;
    *message.mutable_batch() = other.Offload(0, ids);
    v1::OffloadStreamResponse ack;
    ASSERT_TRUE(stream->Write(message));
    ASSERT_TRUE(stream->Read(&ack));
    ExpectRefused(ack.status(), StatusCode::RESOURCE_EXHAUSTED, Reason::kInflightBytes);
    stall.Release();
    first.join();
    ASSERT_TRUE(stream->Write(message));
    ASSERT_TRUE(stream->Read(&ack));
    EXPECT_EQ(ack.status().code(), 0) << ack.status().message();
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_TRUE(Eventually([&] { return InflightBytes(daemon) == 0; }));
}

class BusyDevice : public ::testing::Test {
 protected:
  BusyDevice() : model(SmallSpec("a"), daemon.Open("a")) {
    v1::OffloadBlocksResponse stored;
    EXPECT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1}), &stored).ok());
    score.mutable_session()->CopyFrom(model.handle);
    score.mutable_blocks()->add_block_ids(1);
    *score.mutable_q() = model.RandomTensor({4, 32});
  }
  Daemon daemon;
  Model model;
  v1::ScoreBlocksRequest score;
};

TEST_F(BusyDevice, CallsPastTheirDeadlineAreDroppedAndForgotten) {
  {
    DeviceStall stall(daemon.device());
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      threads.emplace_back([&] {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
        v1::ScoreBlocksResponse response;
        EXPECT_EQ(daemon.attention->ScoreBlocks(&context, score, &response).error_code(),
                  StatusCode::DEADLINE_EXCEEDED);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_TRUE(Eventually([&] { return InflightBytes(daemon) == 0; }));
  v1::ScoreBlocksResponse response;
  EXPECT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &response).ok());
}

TEST_F(BusyDevice, CancelledCallsAreDroppedAndTheNextUseOfTheirObjectsIsNot) {
  for (int round = 0; round < 30; ++round) {
    DeviceStall stall(daemon.device());
    std::vector<grpc::ClientContext> contexts(4);
    std::vector<std::thread> threads;
    for (grpc::ClientContext& context : contexts) {
      threads.emplace_back([&] {
        v1::ScoreBlocksResponse response;
        EXPECT_EQ(daemon.attention->ScoreBlocks(&context, score, &response).error_code(),
                  StatusCode::CANCELLED);
      });
    }
    absl::SleepFor(absl::Milliseconds(3));
    for (grpc::ClientContext& context : contexts) context.TryCancel();
    for (std::thread& thread : threads) thread.join();
    stall.Release();
    v1::ScoreBlocksResponse response;
    const grpc::Status status =
        Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_TRUE(Eventually([&] { return InflightBytes(daemon) == 0; }));
}

TEST_F(BusyDevice, ShutdownWaitsForWorkInHand) {
  DeviceStall stall(daemon.device());
  std::thread call([&] {
    v1::ScoreBlocksResponse response;
    EXPECT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &response).ok());
  });
  ASSERT_TRUE(Eventually([&] { return InflightBytes(daemon) > 0; }));
  // The bytes are counted just before the call is let in.
  absl::SleepFor(absl::Milliseconds(50));
  std::thread shutdown([&] { daemon.server().Shutdown(absl::Seconds(20)); });
  absl::SleepFor(absl::Milliseconds(100));
  stall.Release();
  call.join();
  shutdown.join();
}

TEST(Listening, UnixSocketServesWithItsModeAndReplacesAStaleOne) {
  // A short path: a socket's has at most 107 bytes.
  char folder[] = "/tmp/sluice-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = absl::StrCat(folder, "/s");
  // A dead server's socket.
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);

  DaemonOptions options;
  options.rpc.unix_socket = path;
  {
    Daemon daemon(options);
    struct stat info;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0660u);
    const auto stub = v1::AdminService::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", path), grpc::InsecureChannelCredentials()));
    v1::GetServerResponse response;
    EXPECT_TRUE(
        Invoke(*stub, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &response).ok());
    // A second server is refused, by socket and by port, and the first one goes on.
    RpcServerOptions second = options.rpc;
    EXPECT_EQ(RpcServer::Start(second, &daemon.manager()).status().code(),
              absl::StatusCode::kFailedPrecondition);
    second.unix_socket.clear();
    second.listen_address = absl::StrCat("127.0.0.1:", daemon.server().port());
    EXPECT_EQ(RpcServer::Start(second, &daemon.manager()).status().code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(
        Invoke(*stub, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &response).ok());
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  rmdir(folder);
}

TEST(Listening, OptionsThatCannotBeAreRefused) {
  Daemon daemon;
  const auto start = [&](void (*change)(RpcServerOptions&)) {
    RpcServerOptions options;
    options.listen_address = "127.0.0.1:0";
    change(options);
    return RpcServer::Start(options, &daemon.manager()).status().code();
  };
  EXPECT_EQ(start([](auto& o) { o.listen_address = ""; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start([](auto& o) { o.unix_socket = std::string(200, 'x'); }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start([](auto& o) { o.unix_socket = "/dev/null"; }),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(start([](auto& o) { o.unix_socket = "/no/such/folder/s"; }),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(start([](auto& o) { o.max_message_bytes = 0; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start([](auto& o) { o.max_message_bytes = int64_t{1} << 31; }),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start([](auto& o) { o.max_inflight_bytes = o.max_message_bytes - 1; }),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
