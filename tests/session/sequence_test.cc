#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/base/resident_bytes.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;

class Sequence : public SessionFixture {
 protected:
  absl::StatusOr<Session::PutResult> PutResult(uint32_t id, uint64_t generation, uint32_t base,
                                               const std::vector<uint32_t>& blocks) {
    return session_->PutSequence({id, generation, base, blocks});
  }
  std::vector<uint32_t> Table(uint32_t id) const {
    const auto found = session_->ListSequences(id, 1);
    return found.empty() || found[0].sequence_id != id ? std::vector<uint32_t>()
                                                       : found[0].block_ids;
  }
  uint64_t Generation(uint32_t id) const { return session_->ListSequences(id, 1)[0].generation; }
  absl::StatusOr<int64_t> Release(const std::vector<uint32_t>& ids, bool drop_blocks) {
    return session_->ReleaseSequence(ids, drop_blocks);
  }
  absl::StatusOr<Session::DropResult> Drop(const std::vector<uint32_t>& layers,
                                           const std::vector<uint32_t>& ids,
                                           bool allow_missing = false) {
    return session_->DropBlocks({layers, ids}, allow_missing);
  }
};

TEST_F(Sequence, APutReservesInEveryLayerAndARepeatChangesNothing) {
  Open(SmallSpec());
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto put = PutResult(3, 1, 0, {5, 9, 7});
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_blocks, 3u);
    EXPECT_EQ(put->reserved_blocks, repeat == 0 ? 6 : 0);
    EXPECT_THAT(Table(3), ElementsAre(5, 9, 7));
    EXPECT_EQ(HostBytes(), 6 * 4096);
    EXPECT_EQ(Item("a_g").used_bytes, 6 * 128);
    EXPECT_EQ(Describe(1, 9).state, BlockState::kReserved);
    EXPECT_EQ(Describe(1, 9).num_tables, 1u);
    EXPECT_FALSE(Describe(1, 9).predicted);
  }
  EXPECT_EQ(PutResult(3, 1, 3, {1})->num_blocks, 4u);
  EXPECT_EQ(PutResult(3, 1, 3, {1})->num_blocks, 4u);
  EXPECT_THAT(Table(3), ElementsAre(5, 9, 7, 1));
  EXPECT_EQ(session_->Info().num_sequences, 1);
}

TEST_F(Sequence, GenerationsMayOnlyGrow) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 5, 0, {1, 2}).ok());
  const absl::Status stale = Put(0, 4, 2, {3});
  EXPECT_REASON(stale, StatusCode::kAborted, "STALE_GENERATION");
  EXPECT_EQ(MetaOf(stale, "generation"), "4");
  EXPECT_EQ(MetaOf(stale, "current_generation"), "5");
  EXPECT_THAT(Table(0), ElementsAre(1, 2));
  EXPECT_EQ(Describe(0, 3).state, BlockState::kAbsent);
  ASSERT_TRUE(Put(0, 9, 1, {3}).ok());
  EXPECT_THAT(Table(0), ElementsAre(1, 3));
  EXPECT_EQ(Generation(0), 9u);
  const absl::Status beyond = Put(0, 9, 3, {4});
  EXPECT_REASON(beyond, StatusCode::kFailedPrecondition, "BASE_BEYOND_TABLE");
  EXPECT_EQ(MetaOf(beyond, "base_blocks"), "3");
  EXPECT_EQ(MetaOf(beyond, "table_blocks"), "2");
  EXPECT_REASON(Put(1, 1, 1, {4}), StatusCode::kFailedPrecondition, "BASE_BEYOND_TABLE");
  EXPECT_TRUE(Table(1).empty());
  // A step that names another generation.
  ASSERT_TRUE(OffloadTokens(0, 1, RandomTokens(4)).ok());
  DecodeSequence sequence = Seq(0, 1, 1);
  sequence.generation = 8;
  ASSERT_TRUE(Step(0, sequence, RandomQ(1), nullptr).ok());
  EXPECT_REASON(call_.sequence_status[0], StatusCode::kAborted, "STALE_GENERATION");
}

TEST_F(Sequence, FieldsOutOfRangeAreNamed) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {1, 2}).ok());
  const auto field = [](const absl::Status& status) {
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    return MetaOf(status, "field");
  };
  EXPECT_EQ(field(Put(8, 1, 0, {1})), "update.sequence_id");
  EXPECT_EQ(field(Put(1, 0, 0, {1})), "update.generation");
  EXPECT_EQ(field(Put(1, 1, 0, {64})), "update.block_ids");
  EXPECT_EQ(field(Put(1, 1, 0, {3, 4, 3})), "update.block_ids");
  EXPECT_EQ(field(Put(0, 1, 2, {1})), "update.block_ids") << "an id that stays may not come again";
  EXPECT_THAT(Table(0), ElementsAre(1, 2));
  EXPECT_EQ(field(session_->ForkSequence(8, 1, 1, 1, 0).status()), "source_sequence_id");
  EXPECT_EQ(field(session_->ForkSequence(0, 1, 8, 1, 0).status()), "target_sequence_id");
  EXPECT_EQ(field(session_->ForkSequence(0, 1, 0, 1, 0).status()), "target_sequence_id");
  EXPECT_EQ(field(session_->ForkSequence(0, 1, 1, 0, 0).status()), "target_generation");
  EXPECT_EQ(field(session_->ForkSequence(0, 1, 1, 1, 9).status()), "context_tokens");
  EXPECT_EQ(field(session_->ForkSequence(0, 1, 1, 1, -1).status()), "context_tokens");
  EXPECT_EQ(field(session_->TruncateSequence(8, 2, 0).status()), "sequence_id");
  EXPECT_EQ(field(session_->TruncateSequence(0, 2, 9).status()), "context_tokens");
  EXPECT_EQ(field(session_->TruncateSequence(0, 2, -1).status()), "context_tokens");
  EXPECT_EQ(Generation(0), 1u);
  EXPECT_EQ(field(Release({8}, false).status()), "sequence_ids");
  EXPECT_EQ(field(Release({0, 0}, false).status()), "sequence_ids");
  EXPECT_REASON(Release({0, 1}, false).status(), StatusCode::kNotFound, "SEQUENCE_NOT_FOUND");
  EXPECT_THAT(Table(0), ElementsAre(1, 2)) << "all or none";
  EXPECT_REASON(session_->ForkSequence(5, 1, 1, 1, 0).status(), StatusCode::kNotFound,
                "SEQUENCE_NOT_FOUND");
  EXPECT_REASON(session_->ForkSequence(0, 2, 1, 1, 0).status(), StatusCode::kAborted,
                "STALE_GENERATION");
  EXPECT_REASON(session_->TruncateSequence(5, 1, 0).status(), StatusCode::kNotFound,
                "SEQUENCE_NOT_FOUND");
}

TEST_F(Sequence, ReservesAllOrNothing) {
  for (const bool daemon : {false, true}) {
    MakeManager({.host_budget_bytes = daemon ? 7 * 4096 : 1 << 30});
    SessionSpec spec = SmallSpec();
    if (!daemon) spec.host_budget_bytes = 7 * 4096;
    Open(spec);
    ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
    const absl::Status full = Put(0, 2, 1, {1, 2, 3});
    EXPECT_REASON(full, StatusCode::kResourceExhausted, "HOST_MEMORY") << "6 slots, room for 5";
    EXPECT_EQ(HostBytes(), 2 * 4096);
    EXPECT_EQ(Item("a_g").used_bytes, 2 * 128);
    EXPECT_THAT(Table(0), ElementsAre(0));
    EXPECT_EQ(Generation(0), 1u) << "nothing of it happened";
    for (uint32_t id : {1, 2, 3}) EXPECT_EQ(Describe(0, id).state, BlockState::kAbsent);
    // In a step: the sequence fails alone.
    ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
    DecodeSequence sequence = Seq(0, 1, 5);
    sequence.has_update = true;
    const std::vector<uint32_t> ids = {1, 2, 3};
    sequence.update = {0, 1, 1, ids};
    const Tokens one = RandomTokens(1);
    ASSERT_TRUE(Step(0, sequence, RandomQ(1), &one).ok());
    EXPECT_REASON(call_.sequence_status[0], StatusCode::kResourceExhausted, "HOST_MEMORY");
    EXPECT_EQ(Describe(0, 1).state, BlockState::kAbsent);
    EXPECT_TRUE(Put(0, 2, 1, {1, 2}).ok());
    EXPECT_EQ(HostBytes(), 6 * 4096);
  }
}

// 2^24 ids in 1,024 layers ask for 2^34 slots; the refusal must not cost time or memory like them.
TEST_F(Sequence, ATableBeyondAllMemoryIsRefusedAtOnce) {
  if (device_->info().has_hbm) GTEST_SKIP() << "as much memory as this one wants, no GPU has";
  MakeManager({.hbm_budget_bytes = int64_t{1} << 42, .host_budget_bytes = 1 << 20});
  SessionSpec spec = SmallSpec();
  spec.num_layers = 1024;
  spec.max_blocks = 1 << 24;
  spec.num_query_heads = spec.num_kv_heads = 1;
  spec.head_dim = 16;
  spec.rank = 1;
  spec.block_tokens = 1;
  Open(spec);
  const absl::Time start = absl::Now();
  const std::vector<uint32_t> ids = Ids(0, 1 << 24);
  EXPECT_REASON(Put(0, 1, 0, ids), StatusCode::kResourceExhausted, "HOST_MEMORY");
  EXPECT_LT(absl::Now() - start, absl::Seconds(Sanitized() ? 60 : 5));
  EXPECT_EQ(session_->Info().num_sequences, 0);
  EXPECT_EQ(HostBytes(), 0);
  const absl::Time drop = absl::Now();
  EXPECT_EQ(MetaOf(session_->DropBlocks({{}, ids}, true).status(), "field"), "blocks");
  EXPECT_EQ(MetaOf(session_->DescribeBlocks({{}, ids}).status(), "field"), "blocks");
  EXPECT_TRUE(session_->ListBlocks({}, Tier::kNone, {}, 100)->blocks.empty());
  EXPECT_LT(absl::Now() - drop, absl::Seconds(Sanitized() ? 20 : 1));
}

TEST_F(Sequence, BlocksOnlyReservedAreFreedWithTheirLastTableAndStoredOnesStay) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 2, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {1, 2, 3}).ok());
  ASSERT_TRUE(Put(1, 1, 0, {3, 4}).ok());
  EXPECT_EQ(Describe(0, 3).num_tables, 2u);
  ASSERT_TRUE(Put(0, 1, 0, {2}).ok());
  EXPECT_EQ(Describe(0, 1).state, BlockState::kAbsent);
  EXPECT_EQ(Describe(0, 2).state, BlockState::kStored);
  EXPECT_EQ(Describe(1, 2).state, BlockState::kReserved);
  EXPECT_EQ(Describe(0, 3).state, BlockState::kReserved) << "still in the other table";
  EXPECT_EQ(*Release({0}, false), 0);
  EXPECT_EQ(Describe(0, 2).state, BlockState::kStored);
  EXPECT_EQ(Describe(1, 2).state, BlockState::kAbsent);
  EXPECT_EQ(*Release({1}, true), 0) << "reserved blocks do not count as dropped";
  EXPECT_EQ(Item("blocks.host").used_bytes, 4096);
  EXPECT_EQ(session_->Info().num_sequences, 0);
}

TEST_F(Sequence, AnIdMayChangeItsPlaceAndKeepsItsSlot) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(4);
  ASSERT_TRUE(OffloadTokens(0, 2, tokens).ok());
  ASSERT_TRUE(Put(0, 1, 0, {1, 2, 3}).ok());
  const auto moved = PutResult(0, 2, 0, {3, 2, 5});
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->reserved_blocks, 2);
  EXPECT_THAT(Table(0), ElementsAre(3, 2, 5));
  EXPECT_EQ(Describe(0, 1).state, BlockState::kAbsent);
  EXPECT_EQ(Describe(0, 3).num_tables, 1u);
  EXPECT_EQ(*Fetch(0, {2}), tokens);
  EXPECT_EQ(HostBytes(), 6 * 4096);
}

TEST_F(Sequence, AForkSharesAndARepeatFindsIt) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(10)).ok());
  ASSERT_TRUE(Put(0, 3, 0, Ids(0, 3)).ok());
  EXPECT_EQ(*session_->ForkSequence(0, 3, 1, 7, 0), 3u);
  EXPECT_EQ(*session_->ForkSequence(0, 3, 1, 7, 0), 3u);
  EXPECT_EQ(*session_->ForkSequence(0, 3, 2, 1, 5), 2u);
  EXPECT_THAT(Table(1), ElementsAre(0, 1, 2));
  EXPECT_EQ(Generation(1), 7u);
  EXPECT_THAT(Table(2), ElementsAre(0, 1));
  EXPECT_REASON(session_->ForkSequence(0, 3, 1, 8, 0).status(), StatusCode::kAlreadyExists,
                "SEQUENCE_EXISTS");
  EXPECT_REASON(session_->ForkSequence(0, 3, 1, 7, 4).status(), StatusCode::kAlreadyExists,
                "SEQUENCE_EXISTS");
  EXPECT_EQ(Describe(0, 0).num_tables, 3u);
  EXPECT_EQ(*Release({0, 1}, true), 1) << "block 2 alone; the fork holds the others";
  EXPECT_EQ(Describe(0, 1).state, BlockState::kStored);
  EXPECT_EQ(Describe(0, 2).state, BlockState::kAbsent);
  EXPECT_EQ(*Release({2}, true), 2);
  EXPECT_EQ(Item("blocks.host").used_bytes, 0);
  EXPECT_EQ(Item("a_g").used_bytes, 0);
}

TEST_F(Sequence, TruncateCutsTheTailInEveryLayerButNotASharedBlock) {
  Open(SmallSpec());
  for (uint32_t layer : {0, 1}) ASSERT_TRUE(OffloadTokens(layer, 0, RandomTokens(12)).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 4)).ok());
  EXPECT_EQ(session_->ListSequences(0, 1)[0].tokens, 12);
  EXPECT_EQ(*session_->TruncateSequence(0, 2, 6), 2u);
  EXPECT_EQ(Describe(0, 1).valid_tokens, 2u);
  EXPECT_EQ(Describe(1, 1).valid_tokens, 2u);
  EXPECT_EQ(Describe(0, 2).state, BlockState::kStored) << "out of the table, and kept";
  EXPECT_EQ(Describe(0, 2).num_tables, 0u);
  EXPECT_EQ(Describe(0, 3).state, BlockState::kAbsent);
  EXPECT_EQ(session_->ListSequences(0, 1)[0].tokens, 6);
  EXPECT_EQ(*session_->TruncateSequence(0, 2, 6), 2u) << "the same request again";
  EXPECT_REASON(session_->TruncateSequence(0, 2, 1).status(), StatusCode::kAborted,
                "STALE_GENERATION");
  ASSERT_TRUE(Put(1, 7, 0, {}).ok());
  EXPECT_REASON(session_->TruncateSequence(1, 7, 0).status(), StatusCode::kAborted,
                "STALE_GENERATION")
      << "the sequence's own generation, and no truncation made it";
  ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{1}, false).ok());
  ASSERT_TRUE(session_->ForkSequence(0, 2, 1, 1, 0).ok());
  EXPECT_EQ(*session_->TruncateSequence(1, 2, 5), 2u);
  EXPECT_EQ(Describe(0, 1).valid_tokens, 2u) << "shared: cut for one, not for the other";
  EXPECT_EQ(*session_->TruncateSequence(0, 3, 0), 0u);
  EXPECT_TRUE(Table(0).empty());
  EXPECT_EQ(*session_->TruncateSequence(1, 3, 1), 1u);
  EXPECT_EQ(Describe(0, 0).valid_tokens, 1u);
  EXPECT_EQ(session_->Info().num_sequences, 2);
}

TEST_F(Sequence, ListGivesThemInOrderInPages) {
  Open(SmallSpec());
  for (uint32_t id : {6, 2, 4}) ASSERT_TRUE(Put(id, id, 0, {id}).ok());
  const auto ids = [&](uint32_t first, int64_t limit) {
    std::vector<uint32_t> found;
    for (const SequenceInfo& info : session_->ListSequences(first, limit)) {
      found.push_back(info.sequence_id);
    }
    return found;
  };
  EXPECT_THAT(ids(0, 10), ElementsAre(2, 4, 6));
  EXPECT_THAT(ids(0, 2), ElementsAre(2, 4));
  EXPECT_THAT(ids(5, 2), ElementsAre(6));
  EXPECT_THAT(ids(UINT32_MAX, 2), ElementsAre());
}

TEST_F(Sequence, DropIsAllOrNothing) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(8)).ok());
  ASSERT_TRUE(OffloadTokens(1, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {1}).ok());
  const absl::Status in_table = Drop({0}, {0, 1}).status();
  EXPECT_REASON(in_table, StatusCode::kFailedPrecondition, "BLOCK_IN_TABLE");
  EXPECT_EQ(MetaOf(in_table, "block_id"), "1");
  EXPECT_REASON(Drop({0}, {0, 1}, true).status(), StatusCode::kFailedPrecondition,
                "BLOCK_IN_TABLE");
  const absl::Status missing = Drop({}, {0, 2}).status();
  EXPECT_REASON(missing, StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(missing, "block_id"), "2");
  EXPECT_EQ(session_->Info().num_blocks, 3);
  const auto field = [&](const absl::Status& status) { return MetaOf(status, "field"); };
  EXPECT_EQ(field(Drop({2}, {0}).status()), "blocks.layers");
  EXPECT_EQ(field(Drop({0, 0}, {0}).status()), "blocks.layers");
  EXPECT_EQ(field(Drop({}, {}).status()), "blocks.block_ids");
  EXPECT_EQ(field(Drop({}, {64}).status()), "blocks.block_ids");
  EXPECT_EQ(field(Drop({}, {3, 3}).status()), "blocks.block_ids");
  const auto dropped = Drop({}, {0, 2}, true);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->dropped_blocks, 2);
  EXPECT_EQ(dropped->freed_bytes, 2 * 4096);
  ASSERT_TRUE(Release({0}, false).ok());
  EXPECT_EQ(Drop({0}, {1})->dropped_blocks, 1);
  EXPECT_EQ(Item("blocks.host").used_bytes, 0);
  EXPECT_EQ(Item("a_g").used_bytes, 0);
}

}  // namespace
}  // namespace sluice
