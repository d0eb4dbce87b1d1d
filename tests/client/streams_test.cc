// Streams of the client: OffloadWriter, FetchReader, DecodeStream.

#include <optional>
#include <thread>

#include "client/client.h"
#include "client/decode.h"
#include "client/fetch.h"
#include "client/offload.h"
#include "client/status.h"
#include "gtest/gtest.h"
#include "tests/client/fake_daemon.h"

namespace sluice::client {
namespace {

class StreamsTest : public ::testing::Test {
 protected:
  StreamsTest() {
    ClientOptions options;
    options.address = daemon_.address();
    v1::SessionSpec spec;
    spec.set_name("test");
    spec.set_kv_dtype(v1::DTYPE_BF16);
    spec.set_num_query_heads(1);
    spec.set_num_kv_heads(1);
    spec.set_head_dim(FakeDaemon::kBlockElements);
    spec.set_block_tokens(1);
    session_.emplace(*Client::Create(options)->OpenSession(spec));
  }

  OffloadBatch Batch(uint32_t block_id) {
    OffloadBatch batch(*session_);
    batch.AddBlock(0, block_id, 0, "tag");
    batch.SetKv({1, 2}, {3, 4});
    return batch;
  }
  DecodeBatch Step(uint16_t value) {
    DecodeBatch batch(*session_);
    batch.AddSequence(0, 1);
    batch.SetQ({value, value});
    return batch;
  }

  FakeDaemon daemon_;
  std::optional<Session> session_;
};

TEST_F(StreamsTest, OffloadAcksComeInOrder) {
  std::vector<uint64_t> acked;
  OffloadWriterOptions options;
  options.max_unacked_batches = 2;
  options.on_ack = [&](const OffloadAck& ack) { acked.push_back(ack.batch_id); };
  OffloadWriter writer = session_->OffloadStream(options);
  OffloadBatch batch = Batch(7);
  for (uint64_t i = 0; i < 10; ++i) {
    absl::StatusOr<uint64_t> id = writer.Write(&batch);
    ASSERT_TRUE(id.ok()) << id.status();
    EXPECT_EQ(*id, i);
    EXPECT_LE(writer.unacked_batches(), 2);
    EXPECT_EQ(batch.num_blocks(), 1);  // given back
  }
  EXPECT_TRUE(writer.Finish().ok());
  EXPECT_TRUE(writer.Finish().ok());
  EXPECT_EQ(acked, (std::vector<uint64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(writer.total().stored_blocks(), 10);
  EXPECT_EQ(writer.Write(&batch).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(StreamsTest, OffloadBatchThatFailsDisturbsNoOther) {
  OffloadWriter writer = session_->OffloadStream({});
  for (uint32_t id : {1u, FakeDaemon::kBadBlock, 2u}) {
    OffloadBatch batch = Batch(id);
    ASSERT_TRUE(writer.Write(&batch).ok());
  }
  EXPECT_EQ(ReasonOf(writer.Finish()), "HOST_MEMORY");
  EXPECT_EQ(writer.total().stored_blocks(), 2);
}

TEST_F(StreamsTest, OffloadStreamErrorComesFromWriteOrFinish) {
  daemon_.fail_offload_at = 1;
  OffloadWriterOptions options;
  options.max_unacked_batches = 1;
  OffloadWriter writer = session_->OffloadStream(options);
  absl::Status status;
  OffloadBatch batch = Batch(1);
  for (int i = 0; i < 5 && status.ok(); ++i) status = writer.Write(&batch).status();
  EXPECT_EQ(ReasonOf(status), "FENCED") << status;
  EXPECT_EQ(ReasonOf(writer.Finish()), "FENCED");
}

TEST_F(StreamsTest, OffloadToNobody) {
  daemon_.Stop();
  OffloadWriter writer = session_->OffloadStream({});
  OffloadBatch batch = Batch(1);
  writer.Write(&batch).status().IgnoreError();
  EXPECT_EQ(writer.Finish().code(), absl::StatusCode::kUnavailable);
}

v1::BlockSet Blocks() {
  v1::BlockSet blocks;
  for (uint32_t layer : {4, 5}) blocks.add_layers(layer);
  for (uint32_t id : {3, 1, 2}) blocks.add_block_ids(id);
  return blocks;
}

TEST_F(StreamsTest, FetchGivesBlockByBlock) {
  FetchReader reader = session_->FetchBlocks(Blocks());
  for (uint16_t layer : {4, 5}) {
    for (uint16_t id : {3, 1, 2}) {
      const FetchedBlock* block = reader.Next();
      ASSERT_NE(block, nullptr);
      EXPECT_EQ(block->info.layer(), layer);
      EXPECT_EQ(block->info.block_id(), id);
      EXPECT_EQ(block->k, absl::MakeConstSpan(std::vector<uint16_t>{id, id}));
      EXPECT_EQ(block->v, absl::MakeConstSpan(std::vector<uint16_t>{layer, layer}));
    }
  }
  EXPECT_EQ(reader.Next(), nullptr);
  EXPECT_EQ(reader.Next(), nullptr);
  EXPECT_TRUE(reader.Finish().ok());
  EXPECT_EQ(reader.Next(), nullptr);
}

TEST_F(StreamsTest, FetchErrorAfterTheFirstBlocks) {
  daemon_.fail_fetch = true;
  FetchReader reader = session_->FetchBlocks(Blocks());
  while (reader.Next() != nullptr) {
  }
  EXPECT_EQ(ReasonOf(reader.Finish()), "BLOCK_NOT_FOUND");
}

TEST_F(StreamsTest, FetchThatIsCutShortIsAnError) {
  daemon_.cut_fetch_short = true;
  FetchReader reader = session_->FetchBlocks(Blocks());
  EXPECT_EQ(reader.Next(), nullptr);
  EXPECT_EQ(reader.Finish().code(), absl::StatusCode::kInternal);
}

TEST_F(StreamsTest, FetchFinishedEarlyIsCancelled) {
  FetchReader reader = session_->FetchBlocks(Blocks());
  ASSERT_NE(reader.Next(), nullptr);
  EXPECT_EQ(reader.Finish().code(), absl::StatusCode::kCancelled);
}

TEST_F(StreamsTest, DecodeRepliesInOrder) {
  DecodeStream stream = session_->OpenDecodeStream();
  for (uint16_t i = 0; i < 5; ++i) {
    DecodeBatch step = Step(i);
    ASSERT_TRUE(stream.Send(100 + i, &step).ok());
  }
  DecodeBatch result(*session_);
  for (uint16_t i = 0; i < 5; ++i) {
    absl::StatusOr<DecodeReply> reply = stream.Receive(&result);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->request_id, 100u + i);
    EXPECT_TRUE(reply->status.ok());
    EXPECT_EQ(result.out(), absl::MakeConstSpan(std::vector<uint16_t>{i, i}));
  }
  stream.SendsDone();
  EXPECT_EQ(stream.Receive(&result).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(StreamsTest, DecodeStepThatFailsLeavesTheStream) {
  DecodeStream stream = session_->OpenDecodeStream();
  DecodeBatch step = Step(1);
  step.set_layer(FakeDaemon::kBadLayer);
  ASSERT_TRUE(stream.Send(1, &step).ok());
  absl::StatusOr<DecodeReply> reply = stream.Receive(&step);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(ReasonOf(reply->status), "INVALID_FIELD");
  step.set_layer(0);
  ASSERT_TRUE(stream.Send(2, &step).ok());
  reply = stream.Receive(&step);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->status.ok());
  EXPECT_EQ(step.out().size(), 2u);
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(StreamsTest, DecodeTimeoutTravels) {
  DecodeStream stream = session_->OpenDecodeStream();
  DecodeBatch step = Step(1);
  ASSERT_TRUE(stream.Send(1, &step, absl::Milliseconds(1500)).ok());
  ASSERT_TRUE(stream.Receive(&step).ok());
  EXPECT_EQ(step.response().stats().total_us(), 1500000);
}

TEST_F(StreamsTest, DecodeFromTwoThreads) {
  constexpr int kSteps = 500;
  DecodeStream stream = session_->OpenDecodeStream();
  std::thread sender([&] {
    DecodeBatch step = Step(1);
    for (int i = 0; i < kSteps; ++i) EXPECT_TRUE(stream.Send(i, &step).ok());
    stream.SendsDone();
  });
  DecodeBatch result(*session_);
  int received = 0;
  while (true) {
    absl::StatusOr<DecodeReply> reply = stream.Receive(&result);
    if (!reply.ok()) break;
    EXPECT_EQ(reply->request_id, static_cast<uint64_t>(received));
    ++received;
  }
  sender.join();
  EXPECT_EQ(received, kSteps);
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(StreamsTest, DecodeCancelWakesReceive) {
  DecodeStream stream = session_->OpenDecodeStream();
  std::thread canceller([&] { stream.Cancel(); });
  DecodeBatch result(*session_);
  EXPECT_EQ(stream.Receive(&result).status().code(), absl::StatusCode::kCancelled);
  canceller.join();
  EXPECT_FALSE(stream.Send(1, &result).ok());
  EXPECT_EQ(stream.Finish().code(), absl::StatusCode::kCancelled);
}

TEST_F(StreamsTest, DestroyedStreamsAreCancelled) {
  DecodeBatch step = Step(1);
  OffloadBatch batch = Batch(1);
  {
    DecodeStream decode = session_->OpenDecodeStream();
    ASSERT_TRUE(decode.Send(1, &step).ok());
    OffloadWriter writer = session_->OffloadStream({});
    ASSERT_TRUE(writer.Write(&batch).ok());
    FetchReader reader = session_->FetchBlocks(Blocks());
    ASSERT_NE(reader.Next(), nullptr);
    DecodeStream moved = std::move(decode);
  }
  EXPECT_TRUE(session_->DecodeStep(&step).ok());
}

}  // namespace
}  // namespace sluice::client
