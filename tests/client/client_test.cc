// Unary calls of the client: details, deadlines, retries, pages.

#include "client/client.h"

#include "absl/time/clock.h"
#include "client/decode.h"
#include "client/status.h"
#include "gtest/gtest.h"
#include "tests/client/fake_daemon.h"

namespace sluice::client {
namespace {

class ClientTest : public ::testing::Test {
 protected:
  Client Connect(ClientOptions options = {}) {
    options.address = daemon_.address();
    absl::StatusOr<Client> client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  Session Open(const Client& client) {
    v1::SessionSpec spec;
    spec.set_name("test");
    spec.set_kv_dtype(v1::DTYPE_BF16);
    spec.set_num_query_heads(1);
    spec.set_num_kv_heads(1);
    spec.set_head_dim(2);
    spec.set_block_tokens(1);
    absl::StatusOr<Session> session = client.OpenSession(spec);
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  FakeDaemon daemon_;
};

TEST_F(ClientTest, ErrorsKeepTheirDetails) {
  daemon_.get_server.failures = 1;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::FAILED_PRECONDITION, "SESSION_CLOSING");
  const absl::Status status = Connect().GetServer().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "fake SESSION_CLOSING");
  EXPECT_EQ(ReasonOf(status), "SESSION_CLOSING");
  EXPECT_EQ(MetadataOf(status, "who"), "fake");
}

TEST_F(ClientTest, DetailsOfAnotherCodeAreIgnored) {
  daemon_.get_server.failures = 1;
  daemon_.get_server.error =
      grpc::Status(grpc::StatusCode::INTERNAL, "header",
                   RpcError(grpc::StatusCode::ABORTED, "FENCED").SerializeAsString());
  const absl::Status status = Connect().GetServer().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "header");
  EXPECT_EQ(ReasonOf(status), "");
}

TEST_F(ClientTest, RetriesWhereRetryInfoSaysSo) {
  daemon_.get_server.failures = 2;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 5);
  const absl::Time start = absl::Now();
  EXPECT_TRUE(Connect().GetServer().ok());
  EXPECT_EQ(daemon_.get_server.calls, 3);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(15));  // 5 and then, doubled, 10
}

TEST_F(ClientTest, DoesNotRetryWithoutRetryInfo) {
  daemon_.get_server.failures = 1;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::UNAVAILABLE, "SHUTTING_DOWN");
  EXPECT_EQ(Connect().GetServer().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(daemon_.get_server.calls, 1);
}

TEST_F(ClientTest, StopsAfterMaxAttempts) {
  daemon_.get_server.failures = 100;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 0);
  ClientOptions options;
  options.max_attempts = 3;
  EXPECT_EQ(ReasonOf(Connect(options).GetServer().status()), "QUEUE_FULL");
  EXPECT_EQ(daemon_.get_server.calls, 3);
}

TEST_F(ClientTest, RetryCanBeTurnedOff) {
  daemon_.get_server.failures = 1;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 0);
  CallOptions options;
  options.retry = false;
  EXPECT_FALSE(Connect().GetServer(options).ok());
  EXPECT_EQ(daemon_.get_server.calls, 1);
}

TEST_F(ClientTest, NoRetryThatTheDeadlineWouldCut) {
  daemon_.get_server.failures = 100;
  daemon_.get_server.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 500);
  CallOptions options;
  options.timeout = absl::Milliseconds(300);
  const absl::Time start = absl::Now();
  EXPECT_EQ(ReasonOf(Connect().GetServer(options).status()), "QUEUE_FULL");
  EXPECT_LT(absl::Now() - start, absl::Milliseconds(250));
}

TEST_F(ClientTest, DropBlocksRepeatsOnlyWithAllowMissing) {
  const Client client = Connect();
  const Session session = Open(client);
  daemon_.drop_blocks.failures = 1;
  daemon_.drop_blocks.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 0);
  v1::DropBlocksRequest request;
  EXPECT_FALSE(session.DropBlocks(request).ok());
  EXPECT_EQ(daemon_.drop_blocks.calls, 1);
  daemon_.drop_blocks.calls = 0;
  request.set_allow_missing(true);
  EXPECT_TRUE(session.DropBlocks(request).ok());
  EXPECT_EQ(daemon_.drop_blocks.calls, 2);
}

TEST_F(ClientTest, BeginTilesGivesTheRowsAndIsNotRepeated) {
  const Session session = Open(Connect());
  auto response = session.BeginTiles({}, std::vector<uint16_t>(3 * 2));
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->run_id(), 3u);
  daemon_.begin_tiles.calls = 0;
  daemon_.begin_tiles.failures = 1;
  daemon_.begin_tiles.error = GrpcError(grpc::StatusCode::RESOURCE_EXHAUSTED, "TOO_MANY_RUNS", 0);
  EXPECT_FALSE(session.BeginTiles({}, std::vector<uint16_t>(2)).ok());
  EXPECT_EQ(daemon_.begin_tiles.calls, 1);
}

TEST_F(ClientTest, DeadlinePerCallAndByDefault) {
  daemon_.delay = absl::Milliseconds(400);
  ClientOptions options;
  options.timeout = absl::Milliseconds(100);
  const Client client = Connect(options);
  EXPECT_EQ(client.GetUsage().status().code(), absl::StatusCode::kDeadlineExceeded);
  CallOptions longer;
  longer.timeout = absl::Seconds(10);
  EXPECT_TRUE(client.GetUsage("", longer).ok());
  longer.timeout = absl::InfiniteDuration();
  EXPECT_TRUE(client.GetUsage("", longer).ok());
}

TEST_F(ClientTest, ListAllSessionsReadsEveryPage) {
  auto sessions = Connect().ListAllSessions();
  ASSERT_TRUE(sessions.ok()) << sessions.status();
  ASSERT_EQ(sessions->size(), 3u);
  EXPECT_EQ((*sessions)[2].handle().name(), "session-2");
}

TEST_F(ClientTest, HealthAndWaitReady) {
  const Client client = Connect();
  EXPECT_TRUE(*client.CheckHealth());
  EXPECT_TRUE(client.WaitReady(absl::Seconds(5)).ok());
  EXPECT_EQ(client.CheckHealth("nope").status().code(), absl::StatusCode::kNotFound);
  daemon_.serving = false;
  EXPECT_FALSE(*client.CheckHealth());
  const absl::Status status = client.WaitReady(absl::Milliseconds(250));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("NOT_SERVING"), absl::string_view::npos) << status;
}

TEST_F(ClientTest, UnreachableIsUnavailableWithoutReason) {
  const Client client = Connect();
  daemon_.Stop();
  const absl::Status status = client.GetServer().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "");
}

TEST_F(ClientTest, DecodeStepReusesItsMessages) {
  const Session session = Open(Connect());
  DecodeBatch batch(session);
  batch.AddSequence(0, /*context_tokens=*/1);
  batch.SetQ({1, 2});
  ASSERT_TRUE(session.DecodeStep(&batch).ok());
  EXPECT_EQ(batch.out(), absl::MakeConstSpan(std::vector<uint16_t>{1, 2}));
  EXPECT_TRUE(batch.out_f32().empty());
  EXPECT_TRUE(batch.lse().empty());
  EXPECT_TRUE(batch.SequenceStatus(0).ok());
  EXPECT_EQ(batch.SequenceStatus(1).code(), absl::StatusCode::kInternal);
  batch.mutable_sequence(0)->set_context_tokens(0);
  batch.SetQ({3, 4});
  ASSERT_TRUE(session.DecodeStep(&batch).ok());
  EXPECT_EQ(batch.out(), absl::MakeConstSpan(std::vector<uint16_t>{3, 4}));
  EXPECT_EQ(ReasonOf(batch.FirstSequenceError()), "TOKENS_MISSING");
}

TEST(ClientOptions, RefusesWhatMakesNoSense) {
  ClientOptions options;
  options.address = "";
  EXPECT_EQ(Client::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = {};
  options.max_attempts = 0;
  EXPECT_EQ(Client::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = {};
  options.timeout = absl::ZeroDuration();
  EXPECT_EQ(Client::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice::client
