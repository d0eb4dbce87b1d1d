#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;

class Decode : public SessionFixture {};

TEST_F(Decode, MatchesTheReferenceOverOffloadedBlocks) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(22);
  ASSERT_TRUE(OffloadTokens(1, 10, tokens).ok());
  ASSERT_TRUE(Put(3, 1, 0, Ids(10, 6)).ok());
  const Bits q = RandomQ(1);
  for (int64_t context : {1, 3, 4, 5, 21, 22}) {
    ASSERT_TRUE(Step(1, Seq(3, 1, context), q, nullptr).ok());
    ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
    ExpectNear(call_.out, 0, Reference(q, 0, tokens, context));
    EXPECT_EQ(call_.stats.host_blocks, (context + 3) / 4);
  }
}

TEST_F(Decode, WritesTokensBeforeAttentionAndARepeatGivesTheSameBytes) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(11);
  ASSERT_TRUE(Put(0, 1, 0, Ids(5, 3)).ok());
  for (int64_t t = 0; t < 11; ++t) {
    const Bits q = RandomQ(1);
    const Tokens one = Slice(tokens, t, t + 1);
    ASSERT_TRUE(Step(0, Seq(0, 1, t + 1), q, &one).ok());
    ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
    ExpectNear(call_.out, 0, Reference(q, 0, tokens, t + 1));
    const std::string first = Out();
    ASSERT_TRUE(Step(0, Seq(0, 1, t + 1), q, &one).ok());
    EXPECT_EQ(Out(), first);
  }
  const auto info = session_->DescribeBlocks({{}, Ids(5, 3)});
  ASSERT_TRUE(info.ok());
  EXPECT_EQ((*info)[2].valid_tokens, 3u);
  EXPECT_TRUE((*info)[2].predicted);
  EXPECT_EQ((*info)[3].state, BlockState::kReserved) << "layer 1 has got nothing yet";
}

TEST_F(Decode, NaNThatIsSeenReachesTheResult) {
  Open(SmallSpec());
  Tokens tokens = RandomTokens(10);
  std::fill(tokens.k.begin(), tokens.k.end(), uint16_t{0x7fc0});
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 3)).ok());
  call_.return_lse = true;
  for (int64_t context : {1, 4, 10}) {
    ASSERT_TRUE(Step(0, Seq(0, 1, context), RandomQ(1), nullptr).ok());
    const auto* bits = reinterpret_cast<const uint16_t*>(call_.out.data());
    for (size_t i = 0; i < call_.out.size() / 2; ++i) {
      ASSERT_TRUE(std::isnan(FloatFromBf16(bits[i]))) << "context " << context << " element " << i;
    }
    for (const float lse : call_.lse) EXPECT_TRUE(std::isnan(lse)) << "context " << context;
  }
}

TEST_F(Decode, SeveralQueryTokensAreCausalAmongThemselvesAndEqualSingleSteps) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(17);
  const Bits q = RandomQ(5);
  ASSERT_TRUE(OffloadTokens(0, 0, Slice(tokens, 0, 12)).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 5)).ok());
  const Tokens draft = Slice(tokens, 12, 17);
  ASSERT_TRUE(Step(0, Seq(0, 5, 17), q, &draft).ok());
  ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
  const std::string together = Out();
  for (int64_t i = 0; i < 5; ++i) ExpectNear(call_.out, i, Reference(q, i, tokens, 13 + i));
  const int64_t row = session_->spec().num_query_heads * session_->spec().head_dim;
  for (int64_t i = 0; i < 5; ++i) {
    const Bits one(q.begin() + i * row, q.begin() + (i + 1) * row);
    ASSERT_TRUE(Step(0, Seq(0, 1, 13 + i), one, nullptr).ok());
    EXPECT_EQ(Out(), together.substr(i * row * 2, row * 2)) << "query token " << i;
  }
}

TEST_F(Decode, ATruncatedDraftIsGoneInEveryLayer) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(8);
  const Bits q = RandomQ(6);
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 2)).ok());
  const Tokens first = Slice(tokens, 0, 6);
  ASSERT_TRUE(Step(0, Seq(0, 6, 6), q, &first).ok());
  ASSERT_TRUE(session_->TruncateSequence(0, 2, 5).ok());
  ASSERT_TRUE(session_->TruncateSequence(0, 2, 5).ok()) << "the same request again";
  EXPECT_REASON(session_->TruncateSequence(0, 1, 5).status(), StatusCode::kAborted,
                "STALE_GENERATION");
  const Bits one = RandomQ(1);
  ASSERT_TRUE(Step(0, Seq(0, 1, 6), one, nullptr).ok());
  EXPECT_REASON(call_.sequence_status[0], StatusCode::kFailedPrecondition, "TOKENS_MISSING");
  EXPECT_EQ(MetaOf(call_.sequence_status[0], "position"), "5");
  EXPECT_EQ(MetaOf(call_.sequence_status[0], "block_id"), "1");
  EXPECT_EQ(MetaOf(call_.sequence_status[0], "layer"), "0");
  EXPECT_EQ(Out(), std::string(Out().size(), '\0')) << "rows of a failed sequence are zero";
}

TEST_F(Decode, OneBadSequenceDoesNotFailTheOthersOrChangeTheirBits) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(8);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(1, 1, 0, Ids(0, 2)).ok());
  const Bits q = RandomQ(3);
  sequences_ = {Seq(0, 1, 4), Seq(1, 1, 7), Seq(2, 1, 1)};
  ASSERT_TRUE(Step(0, q, nullptr).ok());
  EXPECT_REASON(call_.sequence_status[0], StatusCode::kNotFound, "SEQUENCE_NOT_FOUND");
  EXPECT_TRUE(call_.sequence_status[1].ok());
  EXPECT_REASON(call_.sequence_status[2], StatusCode::kNotFound, "SEQUENCE_NOT_FOUND");
  ExpectNear(call_.out, 1, Reference(q, 1, tokens, 7));
}

TEST_F(Decode, CarriesUpdatesAndARepeatedUpdateChangesNothing) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(5);
  const Bits q = RandomQ(1);
  const std::vector<uint32_t> first_id = {9}, second_id = {4};
  for (int64_t t = 0; t < 5; ++t) {
    DecodeSequence sequence = Seq(2, 1, t + 1);
    if (t % 4 == 0) {
      sequence.has_update = true;
      sequence.update = {2, 1, static_cast<uint32_t>(t / 4), t == 0 ? first_id : second_id};
    }
    const Tokens one = Slice(tokens, t, t + 1);
    std::string bytes;
    for (int repeat = 0; repeat < 2; ++repeat) {
      ASSERT_TRUE(Step(0, sequence, q, &one).ok());
      ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
      if (repeat == 0) bytes = Out();
      EXPECT_EQ(Out(), bytes);
    }
    ExpectNear(call_.out, 0, Reference(q, 0, tokens, t + 1));
  }
  const auto sequences = session_->ListSequences(0, 10);
  ASSERT_EQ(sequences.size(), 1u);
  EXPECT_THAT(sequences[0].block_ids, ::testing::ElementsAre(9, 4));
  EXPECT_EQ(sequences[0].tokens, 0) << "layer 1 has got nothing";
}

TEST_F(Decode, RefusesWhatIsMalformedWholeAndWritesNothing) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  ASSERT_TRUE(Put(1, 1, 0, {1}).ok());
  const Bits q = RandomQ(2);
  const Tokens tokens = RandomTokens(2);
  sequences_ = {Seq(0, 1, 1), Seq(0, 1, 1)};
  EXPECT_REASON(Step(0, q, &tokens), StatusCode::kInvalidArgument, "DUPLICATE_SEQUENCE");
  const std::vector<uint32_t> zero = {0};
  sequences_ = {Seq(0, 1, 1), Seq(1, 1, 1)};
  sequences_[1].has_update = true;
  sequences_[1].update = {1, 1, 0, zero};
  EXPECT_REASON(Step(0, q, &tokens), StatusCode::kInvalidArgument, "DUPLICATE_BLOCK");
  sequences_ = {Seq(0, 1, 1), Seq(1, 1, 1)};
  const auto refused = [&](const char* field) {
    const absl::Status status = Step(0, q, &tokens);
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    EXPECT_EQ(MetaOf(status, "field"), field) << status;
  };
  EXPECT_REASON(Step(2, q, &tokens), StatusCode::kInvalidArgument, "INVALID_FIELD");
  sequences_[1].query_tokens = 65;
  refused("sequences.query_tokens");
  sequences_[1].query_tokens = 2;
  refused("sequences.context_tokens");
  sequences_[1] = Seq(8, 1, 1);
  refused("sequences.sequence_id");
  sequences_[1] = Seq(1, 1, 257);
  refused("sequences.context_tokens");
  sequences_ = {Seq(0, 1, 1)};
  refused("q.data");
  sequences_ = {Seq(0, 1, 1), Seq(1, 1, 1)};
  call_.attention.logit_softcap = -1;
  refused("options.logit_softcap");
  call_.attention.logit_softcap = 0;
  call_.attention.has_scale = true;
  call_.attention.scale = std::numeric_limits<float>::quiet_NaN();
  refused("options.scale");
  call_.attention.has_scale = false;
  call_.attention.window_tokens = -1;
  refused("options.window_tokens");
  call_.attention.window_tokens = 0;
  const std::vector<float> sinks(3, 0.0f);
  call_.attention.sink_logits = sinks;
  refused("options.sink_logits");
  call_.attention.sink_logits = {};
  const auto info = session_->DescribeBlocks({{}, Ids(0, 2)});
  for (const BlockInfo& block : *info) EXPECT_EQ(block.state, BlockState::kReserved);
}

TEST_F(Decode, AWriteIntoASharedBlockIsRefused) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(6);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 2)).ok());
  ASSERT_TRUE(session_->ForkSequence(0, 1, 1, 1, 6).ok());
  const Bits q = RandomQ(1);
  const Tokens one = RandomTokens(1);
  ASSERT_TRUE(Step(0, Seq(1, 1, 7), q, &one).ok());
  EXPECT_REASON(call_.sequence_status[0], StatusCode::kFailedPrecondition, "BLOCK_SHARED");
  ASSERT_TRUE(Step(0, Seq(1, 1, 6), q, nullptr).ok());
  EXPECT_TRUE(call_.sequence_status[0].ok()) << "reading is allowed";
  EXPECT_REASON(OffloadTokens(0, 0, tokens), StatusCode::kFailedPrecondition, "BLOCK_SHARED");
  ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{0}, false).ok());
  ASSERT_TRUE(Step(0, Seq(1, 1, 7), q, &one).ok());
  EXPECT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
}

TEST_F(Decode, AStepTooLargeForTheWorkspaceHasTheBitsOfSmallOnes) {
  SessionSpec spec = SmallSpec();
  spec.num_query_heads = 64;
  spec.head_dim = 256;
  spec.rank = 1;
  spec.num_layers = 1;
  spec.block_tokens = 256;
  spec.max_blocks = 17;
  spec.max_sequences = 4;
  Open(spec);
  const Tokens tokens = RandomTokens(17 * 256);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens, PredictMode::kOff).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 17)).ok());
  for (uint32_t id = 1; id < 4; ++id) ASSERT_TRUE(session_->ForkSequence(0, 1, id, 1, 0).ok());
  const Bits q = RandomQ(4 * 64);
  sequences_ = {Seq(0, 64, 4352), Seq(1, 64, 4351), Seq(2, 64, 4200), Seq(3, 64, 64)};
  ASSERT_TRUE(Step(0, q, nullptr).ok());
  for (const absl::Status& status : call_.sequence_status) ASSERT_TRUE(status.ok()) << status;
  const std::string together = Out();
  const int64_t row = 64 * 256;
  for (const int64_t i : {0, 63, 64, 200, 255}) {
    const int64_t s = i / 64;
    const Bits one(q.begin() + i * row, q.begin() + (i + 1) * row);
    const DecodeSequence whole[] = {Seq(0, 64, 4352), Seq(1, 64, 4351), Seq(2, 64, 4200),
                                    Seq(3, 64, 64)};
    ASSERT_TRUE(Step(0, Seq(static_cast<uint32_t>(s), 1, whole[s].context_tokens - 63 + i % 64),
                     one, nullptr)
                    .ok());
    EXPECT_EQ(Out(), together.substr(i * row * 2, row * 2)) << "row " << i;
  }
}

TEST_F(Decode, ACancelledOrExpiredCallThatHasNotStartedIsDropped) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  const Bits q = RandomQ(1);
  const Tokens one = RandomTokens(1);
  call_.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_REASON(Step(0, Seq(0, 1, 1), q, &one), StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED");
  call_.deadline = absl::InfiniteFuture();
  {
    // Two calls are started and wait on the device; the third is in the queue.
    StreamGate gate(*attention_stream_);
    Waitable<DecodeCall> started[2];
    const DecodeSequence nobody[] = {Seq(7, 1, 1)};
    for (Waitable<DecodeCall>& call : started) {
      call.sequences = nobody;
      call.q = View(q);
      session_->Submit(&call);
    }
    sequences_ = {Seq(0, 1, 1)};
    call_.sequences = sequences_;
    call_.q = View(q);
    call_.k = View(one.k);
    call_.v = View(one.v);
    session_->Submit(&call_);
    call_.Cancel();
    gate.Open();
    for (Waitable<DecodeCall>& call : started) EXPECT_TRUE(call.Wait().ok());
    EXPECT_REASON(call_.Wait(), StatusCode::kCancelled, "CANCELLED");
  }
  EXPECT_EQ((*session_->DescribeBlocks({{}, Ids(0, 1)}))[0].state, BlockState::kReserved);
  ASSERT_TRUE(Step(0, Seq(0, 1, 1), q, &one).ok()) << "the call can be used again";
}

}  // namespace
}  // namespace sluice
