// Blocks in HBM and in host memory: who lands where, and that nothing but the counts can tell.

#include <string>
#include <utility>
#include <vector>

#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using ::absl::StatusCode;

constexpr int64_t kStride = 4096;  // of the small session's slots

class TierTest : public SessionFixture {
 protected:
  void OpenWithHbm(int64_t num_slots) {
    SessionManagerOptions options;
    options.hbm_block_budget_bytes = num_slots * kStride;
    MakeManager(options);
    Open(SmallSpec());
  }
  int64_t HbmBlockBytes() const {
    const auto usage = manager_->MemoryUsage();
    return usage.size() > 2 ? usage[2].used_bytes : 0;
  }
};

TEST_F(TierTest, ANewBlockLandsInHbmWhileThereIsRoom) {
  OpenWithHbm(3);
  const Tokens tokens = RandomTokens(5 * 4);
  ASSERT_TRUE(OffloadTokens(0, 10, tokens).ok());
  for (uint32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(Describe(0, 10 + i).tier, i < 3 ? Tier::kHbm : Tier::kHost) << i;
  }
  EXPECT_EQ(Item("blocks.hbm").used_bytes, 3 * kStride);
  EXPECT_EQ(Item("blocks.hbm").reserved_bytes, 3 * kStride);
  EXPECT_EQ(Item("blocks.host").used_bytes, 2 * kStride);
  EXPECT_EQ(HbmBlockBytes(), 3 * kStride);
  EXPECT_EQ(HostBytes(), 2 * kStride);
  const auto hbm = session_->ListBlocks({}, Tier::kHbm, {}, 100);
  ASSERT_TRUE(hbm.ok());
  EXPECT_EQ(hbm->blocks.size(), 3u);
  EXPECT_EQ(session_->ListBlocks({}, Tier::kHost, {}, 100)->blocks.size(), 2u);

  EXPECT_EQ(*Fetch(0, Ids(10, 5)), tokens) << "bit for bit from either tier";
  const auto keys = ReadProjected(0, Ids(10, 5));
  ASSERT_TRUE(keys.ok());
  for (int64_t i = 0; i < 5; ++i) {
    const int64_t row = i * 4 * session_->spec().num_kv_heads * session_->spec().head_dim;
    ExpectProjected(*keys, i, &tokens.k[row], 4);
  }

  // What is dropped makes room, in its own tier.
  const std::vector<uint32_t> dropped = {11, 14};
  ASSERT_TRUE(session_->DropBlocks({{}, dropped}, true).ok());
  WaitUntilQuiet();
  ASSERT_TRUE(OffloadTokens(1, 20, RandomTokens(2 * 4)).ok());
  EXPECT_EQ(Describe(1, 20).tier, Tier::kHbm);
  EXPECT_EQ(Describe(1, 21).tier, Tier::kHost);
  const auto freed = CloseSession("test", epoch_, false);
  ASSERT_TRUE(freed.ok());
  EXPECT_EQ(*freed, 5 * kStride);
  EXPECT_EQ(HbmBlockBytes(), 0);
  EXPECT_EQ(HostBytes(), 0);
}

TEST_F(TierTest, OutputsAndScoresDoNotDependOnTheTier) {
  const int64_t num_tokens = 40 * 4 - 1;
  std::string out[3];
  std::vector<float> scores[3];
  Bits q, query;
  Tokens tokens, last;
  const int64_t hbm_slots[] = {0, 17, 128};
  for (int run = 0; run < 3; ++run) {
    OpenWithHbm(hbm_slots[run]);
    if (run == 0) {
      tokens = RandomTokens(num_tokens - 5);
      last = RandomTokens(5);
      q = RandomQ(5);
      query = RandomQ(1);
    }
    ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
    ASSERT_TRUE(Put(0, 1, 0, Ids(0, 40)).ok());
    ASSERT_TRUE(Step(0, Seq(0, 5, num_tokens), q, &last).ok());
    ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
    out[run] = Out();
    Waitable<ScoreCall> score;
    score.by_sequence = true;
    score.q = View(query);
    session_->Submit(&score);
    ASSERT_TRUE(score.Wait().ok()) << score.status();
    scores[run].assign(score.scores.begin(), score.scores.end());
    if (run > 0) {
      EXPECT_EQ(out[run], out[0]) << hbm_slots[run];
      EXPECT_EQ(scores[run], scores[0]) << hbm_slots[run];
    }
    // What was read, by tier; the last block holds one token less.
    const StepStats& stats = call_.stats;
    const int64_t slot_bytes = session_->slot_bytes();
    const int64_t in_hbm = std::min<int64_t>(hbm_slots[run], 40);
    EXPECT_EQ(stats.hbm_blocks, in_hbm);
    EXPECT_EQ(stats.host_blocks, 40 - in_hbm);
    EXPECT_EQ(stats.hbm_bytes + stats.host_bytes, num_tokens * slot_bytes / 4);
    EXPECT_EQ(stats.hbm_bytes, in_hbm * slot_bytes - (in_hbm == 40 ? slot_bytes / 4 : 0));
  }
}

TEST_F(TierTest, BothTiersFullIsAnAnswerThatTakesNothing) {
  SessionManagerOptions options;
  options.hbm_block_budget_bytes = 2 * kStride;
  options.host_budget_bytes = 3 * kStride;
  MakeManager(options);
  Open(SmallSpec());
  EXPECT_REASON(OffloadTokens(0, 0, RandomTokens(6 * 4)), StatusCode::kResourceExhausted,
                "HOST_MEMORY");
  EXPECT_EQ(HbmBlockBytes() + HostBytes(), 0);
  // A table's blocks take a slot in each of the two layers.
  EXPECT_REASON(Put(0, 1, 0, Ids(0, 3)), StatusCode::kResourceExhausted, "HOST_MEMORY");
  EXPECT_EQ(HbmBlockBytes() + HostBytes(), 0);
  EXPECT_TRUE(OffloadTokens(0, 0, RandomTokens(5 * 4)).ok());
  EXPECT_EQ(HbmBlockBytes(), 2 * kStride);
  EXPECT_EQ(HostBytes(), 3 * kStride);
}

TEST_F(TierTest, ASessionsHbmBudgetHoldsAndFollowsTheLatestOpening) {
  SessionManagerOptions options;
  options.hbm_block_budget_bytes = 16 * kStride;
  MakeManager(options);
  SessionSpec spec = SmallSpec();
  spec.hbm_budget_bytes = 2 * kStride;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4 * 4)).ok());
  EXPECT_EQ(HbmBlockBytes(), 2 * kStride);
  EXPECT_EQ(Item("blocks.hbm").reserved_bytes, 2 * kStride);
  spec.hbm_budget_bytes = 0;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 8, RandomTokens(4 * 4)).ok());
  EXPECT_EQ(HbmBlockBytes(), 6 * kStride);
  EXPECT_EQ(Item("blocks.hbm").reserved_bytes, 16 * kStride);
}

TEST_F(TierTest, ABlockKeepsItsTierWhileAnOffloadFillsIt) {
  OpenWithHbm(2);
  ASSERT_TRUE(Put(0, 1, 0, {5}).ok());  // a slot in each of the two layers
  ASSERT_EQ(Describe(0, 5).tier, Tier::kHbm);
  const Tokens tokens = RandomTokens(4);
  const std::vector<OffloadBlock> blocks = {{0, 5, 0, ""}};
  StreamGate gate(*ingest_stream_);
  Waitable<OffloadCall> call;
  call.blocks = blocks;
  call.k = View(tokens.k);
  call.v = View(tokens.v);
  session_->Offload(&call);
  EXPECT_EQ(Describe(0, 5).state, BlockState::kReserved);
  EXPECT_EQ(Describe(0, 5).tier, Tier::kHbm);
  gate.Open();
  ASSERT_TRUE(call.Wait().ok());
  EXPECT_EQ(Describe(0, 5).state, BlockState::kStored);
  EXPECT_EQ(Describe(0, 5).tier, Tier::kHbm);
}

// What a refusal says would fit does fit, where blocks have a part of the budget too.
TEST_F(TierTest, TheBudgetThatARefusalNamesFits) {
  SessionManagerOptions options;
  options.hbm_budget_bytes = 100'000;
  options.hbm_block_budget_bytes = 16 * kStride;
  MakeManager(options);
  SessionSpec spec = SmallSpec();
  spec.max_blocks = 2000;
  const absl::Status refused = manager_->Open(spec).status();
  EXPECT_REASON(refused, StatusCode::kResourceExhausted, "DEVICE_MEMORY");
  const int64_t fits = std::stoll(MetaOf(refused, "fits_hbm_budget_bytes"));
  options.hbm_budget_bytes = fits - 1;
  MakeManager(options);
  EXPECT_REASON(manager_->Open(spec).status(), StatusCode::kResourceExhausted, "DEVICE_MEMORY");
  options.hbm_budget_bytes = fits;
  MakeManager(options);
  EXPECT_TRUE(manager_->Open(spec).ok());
}

}  // namespace
}  // namespace sluice
