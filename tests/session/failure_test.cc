// A device that fails, and memory that is out while calls run.

#include <string>
#include <vector>

#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;

class Failure : public SessionFixture {
 protected:
  void SetUp() override {
    SessionFixture::SetUp();
    Open(SmallSpec());
    ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(8)).ok());
    ASSERT_TRUE(Put(1, 1, 0, {0, 1}).ok());
  }
  static void ExpectFailed(const absl::Status& status) {
    EXPECT_REASON(status, StatusCode::kUnavailable, "DEVICE_FAILED");
    EXPECT_NE(status.message().find("somewhere.cu:7"), std::string::npos) << status;
    EXPECT_FALSE(status.GetPayload("sluice/retry_ms").has_value()) << "nobody knows how long";
  }
  void Fail() { device_->Fail("somewhere.cu:7: a kernel: cudaErrorIllegalAddress"); }
};

TEST_F(Failure, WhatIsInFlightOrQueuedEndsWithIt) {
  const Bits q = RandomQ(1);
  const std::vector<uint32_t> ids = {0, 1};
  const DecodeSequence sequence = Seq(1, 1, 8);
  Tokens wire = RandomTokens(4), back = RandomTokens(4);
  {
    StreamGate attention(*attention_stream_);
    StreamGate ingest(*ingest_stream_);
    Waitable<DecodeCall> steps[4];
    for (Waitable<DecodeCall>& step : steps) {
      Fill(step, 0, q, nullptr);
      step.sequences = {&sequence, 1};
      session_->Submit(&step);
    }
    Waitable<ScoreCall> score;
    score.block_ids = ids;
    score.q = View(q);
    score.top_k = 2;
    session_->Submit(&score);
    Waitable<OffloadCall> offload;
    const std::vector<OffloadBlock> blocks = {{1, 5, 0, ""}};
    offload.blocks = blocks;
    offload.k = View(wire.k);
    offload.v = View(wire.v);
    session_->Offload(&offload);
    Fail();
    attention.Open();
    ingest.Open();
    for (Waitable<DecodeCall>& step : steps) ExpectFailed(step.Wait());
    ExpectFailed(score.Wait());
    ExpectFailed(offload.Wait());
  }
  EXPECT_EQ(Describe(1, 5).state, BlockState::kAbsent) << "nothing of it was stored";
}

TEST_F(Failure, AFetchInFlightEndsWithIt) {
  Tokens back = RandomTokens(4);
  const std::vector<uint32_t> ids = {0};
  StreamGate gate(*fetch_stream_);
  Waitable<FetchCall> fetch;
  fetch.block_ids = ids;
  fetch.k = reinterpret_cast<std::byte*>(back.k.data());
  fetch.v = reinterpret_cast<std::byte*>(back.v.data());
  session_->Fetch(&fetch);
  Fail();
  gate.Open();
  ExpectFailed(fetch.Wait());
}

TEST_F(Failure, NewCallsAndSessionsAreRefused) {
  ASSERT_TRUE(Step(0, Seq(1, 1, 8), RandomQ(1), nullptr).ok()) << "what is complete is sound";
  Fail();
  const std::vector<uint32_t> ids = {0};
  ExpectFailed(Step(0, Seq(1, 1, 8), RandomQ(1), nullptr));
  ExpectFailed(OffloadTokens(0, 5, RandomTokens(4)));
  ExpectFailed(Fetch(0, ids).status());
  ExpectFailed(ReadProjected(0, ids).status());
  ExpectFailed(Put(2, 1, 0, {3}));
  ExpectFailed(session_->DropBlocks({{}, ids}, true).status());
  ExpectFailed(manager_->Find("test", epoch_).status());
  ExpectFailed(manager_->Open(SmallSpec()).status());
  SessionSpec other = SmallSpec();
  other.name = "other";
  ExpectFailed(manager_->Open(other).status());
  EXPECT_FALSE(manager_->DeviceStatus().ok());
}

TEST_F(Failure, AStepThatWaitsForAnOffloadEndsWithIt) {
  ASSERT_TRUE(Put(0, 1, 0, {10}).ok());
  const Tokens filled = RandomTokens(4), one = RandomTokens(1);
  const std::vector<OffloadBlock> blocks = {{0, 10, 2, ""}};
  Waitable<OffloadCall> offload;
  offload.blocks = blocks;
  offload.k = View(filled.k);
  offload.v = View(filled.v);
  StreamGate gate(*ingest_stream_);
  session_->Offload(&offload);
  const Bits q = RandomQ(1);
  sequences_ = {Seq(0, 1, 3)};
  Fill(call_, 0, q, &one);
  session_->Submit(&call_);
  EXPECT_FALSE(call_.IsDoneWithin(absl::Milliseconds(20)));
  Fail();
  gate.Open();
  ExpectFailed(offload.Wait());
  ExpectFailed(call_.Wait());
  EXPECT_EQ(Describe(0, 10).state, BlockState::kReserved) << "the table has its slot back";
}

TEST_F(Failure, SessionsCanStillBeClosed) {
  Fail();
  EXPECT_TRUE(CloseSession("test", epoch_, false).ok());
  session_.reset();
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(DeviceBytes(), 0);
}

TEST_F(Failure, MemoryThatIsOutIsAnAnswerAndTheCallCanBeMadeAgain) {
  const Bits q = RandomQ(1);
  const std::vector<uint32_t> ids = {0};
  const DecodeSequence sequence = Seq(1, 1, 8);
  Waitable<DecodeCall> step;
  Fill(step, 0, q, nullptr);
  step.sequences = {&sequence, 1};
  Waitable<ScoreCall> score;
  score.block_ids = ids;
  score.q = View(q);
  Waitable<BeginTilesCall> begin;
  begin.q = View(q);
  const auto twice = [&](auto& call) {
    device_->commits_left = 0;
    session_->Submit(&call);
    EXPECT_REASON(call.Wait(), StatusCode::kResourceExhausted, "HOST_MEMORY");
    device_->commits_left = 1 << 30;
    session_->Submit(&call);
    EXPECT_TRUE(call.Wait().ok()) << call.status();
  };
  twice(step);
  twice(score);
  twice(begin);
}

// Pages of A_g come as blocks do.
TEST_F(Failure, PagesOfProjectedKeysThatAreOutAreAnAnswerThatTakesNothing) {
  SessionSpec spec = SmallSpec();
  spec.name = "large-rows";
  spec.num_query_heads = spec.num_kv_heads = 8;
  spec.block_tokens = 256;
  spec.rank = 32;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(256)).ok());
  const auto retried = [](const absl::Status& status) {
    EXPECT_REASON(status, StatusCode::kResourceExhausted, "DEVICE_MEMORY");
    EXPECT_TRUE(status.GetPayload("sluice/retry_ms").has_value());
  };
  const Tokens tokens = RandomTokens(40 * 256);
  const int64_t used_bytes = HostBytes();
  const int64_t used_rows = Item("a_g").used_bytes;
  device_->commits_left = 0;
  retried(Put(3, 1, 0, Ids(10, 20)));
  EXPECT_EQ(HostBytes(), used_bytes);
  EXPECT_EQ(Item("a_g").used_bytes, used_rows);
  device_->commits_left = 1 << 30;
  ASSERT_TRUE(Put(3, 1, 0, Ids(10, 20)).ok());
  EXPECT_EQ(Item("a_g").used_bytes, used_rows + 40 * spec.num_kv_heads * 256 * 32 * 2);
  device_->commits_left = 0;
  retried(OffloadTokens(1, 20, tokens));
  device_->commits_left = 1 << 30;
  EXPECT_TRUE(OffloadTokens(1, 20, tokens).ok());
}

}  // namespace
}  // namespace sluice
