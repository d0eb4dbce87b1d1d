#include "server/swap/block_table.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/store/memory_slot_store.h"
#include "tests/base/resident_bytes.h"
#include "tests/base/test_device.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;

class BlockTableTest : public ::testing::Test {
 protected:
  void Make(int64_t num_layers, int64_t max_blocks, int64_t slot_bytes = 64,
            int64_t budget_bytes = 0, int64_t row_bytes = 16, int64_t hbm_budget_bytes = 0) {
    auto rows = RowPool::Create(num_layers * max_blocks + 8, row_bytes, &device_);
    ASSERT_TRUE(rows.ok()) << rows.status();
    rows_ = std::make_unique<RowPool>(*std::move(rows));
    first_ = device_.CreateStream(StreamPriority::kAttention);
    second_ = device_.CreateStream(StreamPriority::kCopy);
    table_ = std::make_unique<BlockTable>(
        BlockTable::Options{num_layers, max_blocks, slot_bytes, budget_bytes, hbm_budget_bytes},
        BlockTable::Stores{hbm_.get(), &store_}, rows_.get(),
        std::vector<Stream*>{first_.get(), second_.get()});
    ASSERT_TRUE(table_->valid());
  }
  std::byte* TakeSlot() {
    std::byte* slot = nullptr;
    EXPECT_TRUE(table_->TakeSlots(absl::MakeSpan(&slot, 1)).ok());
    return slot;
  }
  void Store(int64_t layer, int64_t block_id, absl::string_view tag = "", int64_t tokens = 1) {
    table_->Store(layer, block_id, TakeSlot(), rows_->Take(), tokens, tag);
  }

  TestDevice device_{4};
  MemorySlotStore store_{{.budget_bytes = int64_t{1} << 30, .chunk_bytes = 1 << 20}, &device_};
  std::unique_ptr<MemorySlotStore> hbm_;  // null: none
  std::unique_ptr<RowPool> rows_;
  std::unique_ptr<Stream> first_, second_;
  std::unique_ptr<BlockTable> table_;
};

TEST_F(BlockTableTest, CountsFollowStoreReserveAndDrop) {
  Make(2, 8);
  Store(0, 3);
  table_->Reserve(table_->at(1, 3), TakeSlot(), rows_->Take());
  EXPECT_EQ(table_->num_stored(), 1);
  EXPECT_EQ(table_->num_predicted(), 1);
  EXPECT_EQ(table_->num_slots(), 2);
  EXPECT_TRUE(table_->at(1, 3).present());
  EXPECT_FALSE(table_->at(1, 3).stored());
  table_->SetValidTokens(table_->at(1, 3), 2);
  EXPECT_EQ(table_->num_stored(), 2);
  EXPECT_EQ(table_->num_predicted(), 2);
  table_->Store(0, 3, TakeSlot(), nullptr, 1, "");
  EXPECT_EQ(table_->num_stored(), 2);
  EXPECT_EQ(table_->num_predicted(), 1) << "replaced without a prediction";
  EXPECT_EQ(table_->num_slots(), 2) << "the old slot had no readers";
  EXPECT_EQ(table_->Drop(0, 3), 4096);
  EXPECT_EQ(table_->Drop(1, 3), 4096);
  EXPECT_EQ(table_->num_stored(), 0);
  EXPECT_EQ(table_->num_predicted(), 0);
  EXPECT_EQ(table_->num_slots(), 0);
  EXPECT_EQ(rows_->used_rows(), 0);
  EXPECT_EQ(store_.used_bytes(), 0);
}

TEST_F(BlockTableTest, EveryChangeHasAHigherVersion) {
  Make(1, 8);
  uint64_t newest = 0;
  const auto grew = [&](int64_t block_id) {
    const uint64_t version = table_->at(0, block_id).version;
    EXPECT_GT(version, newest);
    newest = version;
  };
  for (int round = 0; round < 3; ++round) {
    Store(0, 1);
    grew(1);
    Store(0, 2);
    grew(2);
    table_->SetValidTokens(table_->at(0, 1), 3);
    grew(1);
    table_->Drop(0, 1);
  }
}

TEST_F(BlockTableTest, ASlotIsNotReusedBeforeBothStreamsHavePassed) {
  Make(1, 8, 64, 3 * 4096);
  Store(0, 0);
  Store(0, 1);
  StreamGate first(*first_), second(*second_);
  table_->Drop(0, 0);
  EXPECT_EQ(table_->num_slots(), 2) << "in limbo";
  EXPECT_EQ(rows_->used_rows(), 2);
  std::vector<std::byte*> slots(2);
  EXPECT_EQ(ReasonOf(table_->TakeSlots(absl::MakeSpan(slots))), "HOST_MEMORY");
  first.WaitUntilPassed();
  table_->Reclaim();
  EXPECT_EQ(table_->num_slots(), 2) << "the second stream may still read";
  EXPECT_EQ(ReasonOf(table_->TakeSlots(absl::MakeSpan(slots))), "HOST_MEMORY");
  second.WaitUntilPassed();
  ASSERT_TRUE(table_->TakeSlots(absl::MakeSpan(slots)).ok()) << "TakeSlots reclaims by itself";
  EXPECT_EQ(rows_->used_rows(), 1);
  table_->GiveSlots(slots);
}

TEST_F(BlockTableTest, WorkEnqueuedAfterRetiringHoldsNothingBack) {
  Make(1, 8);
  Store(0, 0);
  table_->Drop(0, 0);
  StreamGate later(*first_);
  table_->Reclaim();
  EXPECT_EQ(table_->num_slots(), 0);
}

TEST_F(BlockTableTest, LimboKeepsTheOrderOverManyRounds) {
  Make(1, 64);
  for (int round = 0; round < 200; ++round) {
    StreamGate gate(round % 2 == 0 ? *first_ : *second_);
    for (int64_t id = 0; id < 8; ++id) Store(0, id);
    EXPECT_GE(table_->num_slots(), 8);
  }
  first_->Synchronize();
  second_->Synchronize();
  table_->Reclaim();
  EXPECT_EQ(table_->num_slots(), 8);
  EXPECT_EQ(rows_->used_rows(), 8);
}

TEST_F(BlockTableTest, TagsFollowReplacementAndDrop) {
  Make(2, 16);
  Store(1, 5, "prefix");
  Store(0, 7, "prefix");
  Store(0, 9, "other");
  EXPECT_THAT(table_->KeysWithTag("prefix"), ElementsAre(7, 16 + 5));
  EXPECT_EQ(table_->TagOf(1, 5), "prefix");
  EXPECT_EQ(table_->TagOf(1, 6), "");
  Store(1, 5, "other");
  EXPECT_THAT(table_->KeysWithTag("prefix"), ElementsAre(7));
  EXPECT_THAT(table_->KeysWithTag("other"), ElementsAre(9, 16 + 5));
  Store(0, 9);
  EXPECT_THAT(table_->KeysWithTag("other"), ElementsAre(16 + 5));
  table_->Drop(1, 5);
  table_->Drop(0, 7);
  EXPECT_TRUE(table_->KeysWithTag("other").empty());
  EXPECT_TRUE(table_->KeysWithTag("prefix").empty());
  EXPECT_TRUE(table_->KeysWithTag("never").empty());
}

TEST_F(BlockTableTest, OneTagOnManyBlocksCostsNoQuadraticTime) {
  Make(1, 200'000);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t id = 0; id < 200'000; ++id) Store(0, id, "the same for all");
  EXPECT_EQ(table_->KeysWithTag("the same for all").size(), 200'000u);
  for (int64_t id = 199'999; id >= 0; --id) table_->Drop(0, id);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(Sanitized() ? 100 : 10));
}

TEST_F(BlockTableTest, NextPresentFindsWhatAPlainWalkFinds) {
  Make(3, 5000);
  std::mt19937 random(1);
  std::vector<int64_t> present;
  for (int i = 0; i < 30; ++i) {
    const auto key = static_cast<int64_t>(random() % 15000);
    if (table_->at(key / 5000, key % 5000).present()) continue;
    if (i % 2 == 0) {
      Store(key / 5000, key % 5000);
    } else {
      table_->Reserve(table_->at(key / 5000, key % 5000), TakeSlot(), nullptr);
    }
    present.push_back(key);
  }
  Store(0, 0);
  Store(2, 4999);
  present.insert(present.end(), {0, 14999});
  std::sort(present.begin(), present.end());
  for (int64_t key = 0; key < 15000; ++key) {
    const auto next = std::lower_bound(present.begin(), present.end(), key);
    ASSERT_EQ(table_->NextPresent(key), next == present.end() ? -1 : *next) << key;
  }
  EXPECT_EQ(table_->NextPresent(15000), -1);
  EXPECT_EQ(table_->NextPresent(INT64_MAX / 2), -1);
}

// 16,777,216 blocks in 1,024 layers.
TEST_F(BlockTableTest, TheLargestTableOpensWalksAndClosesAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t before = ResidentBytes();
  Make(1024, int64_t{1} << 24);
  EXPECT_EQ(table_->NextPresent(0), -1);
  Store(1023, (int64_t{1} << 24) - 1);
  Store(512, 77);
  const int64_t last = (int64_t{1} << 34) - 1;
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(table_->NextPresent(0), (int64_t{512} << 24) + 77);
    EXPECT_EQ(table_->NextPresent((int64_t{512} << 24) + 78), last);
    EXPECT_EQ(table_->NextPresent(last + 1), -1);
  }
  if (!Sanitized()) {
    EXPECT_LT(ResidentBytes() - before, 16 << 20);
  }
  table_.reset();
  rows_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(Sanitized() ? 50 : 5));
  EXPECT_EQ(store_.used_bytes(), 0);
}

TEST_F(BlockTableTest, RoomIsTheSessionsBudgetOrTheStores) {
  Make(1, 64, 4097, 5 * 8192);
  EXPECT_EQ(table_->max_free_slots(), 5);
  Store(0, 0);
  EXPECT_EQ(table_->max_free_slots(), 4);
  std::vector<std::byte*> slots(5);
  const absl::Status full = table_->TakeSlots(absl::MakeSpan(slots));
  EXPECT_EQ(MetaOf(full, "need_bytes"), "40960");
  EXPECT_EQ(MetaOf(full, "free_bytes"), "32768");
  EXPECT_EQ(MetaOf(full, "budget_bytes"), "40960");
  table_->SetBudgets(4096, 0);
  EXPECT_EQ(table_->max_free_slots(), 0) << "less than is used already";
  EXPECT_EQ(MetaOf(table_->TakeSlots(absl::MakeSpan(slots)), "free_bytes"), "0");
  table_->SetBudgets(0, 0);
  EXPECT_EQ(table_->max_free_slots(), (int64_t{1} << 30) / 8192);
}

TEST_F(BlockTableTest, HbmIsUsedFirstAndHostMemoryThen) {
  hbm_ = std::make_unique<MemorySlotStore>(
      MemorySlotStoreOptions{.budget_bytes = 3 * 4096, .kind = MemoryKind::kDevice}, &device_);
  ASSERT_TRUE(hbm_->TakeAll().ok());
  Make(1, 64, 64, 4 * 4096);
  EXPECT_EQ(table_->max_free_slots(), 7);
  std::vector<std::byte*> slots(5), more(3), rest(2);
  ASSERT_TRUE(table_->TakeSlots(absl::MakeSpan(slots)).ok());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(table_->InHbm(slots[i]), i < 3) << i;
  EXPECT_EQ(table_->num_slots(), 5);
  EXPECT_EQ(table_->num_hbm_slots(), 3);
  // All or nothing, in both tiers.
  EXPECT_EQ(ReasonOf(table_->TakeSlots(absl::MakeSpan(more))), "HOST_MEMORY");
  EXPECT_EQ(table_->num_slots(), 5);
  EXPECT_EQ(hbm_->used_bytes(), 3 * 4096);
  table_->GiveSlots(absl::MakeConstSpan(slots).subspan(2));
  EXPECT_EQ(table_->num_hbm_slots(), 2);
  EXPECT_EQ(store_.used_bytes(), 0);
  ASSERT_TRUE(table_->TakeSlots(absl::MakeSpan(rest)).ok());
  EXPECT_TRUE(table_->InHbm(rest[0]));
  EXPECT_FALSE(table_->InHbm(rest[1]));
  table_->GiveSlots(rest);
  table_->GiveSlots(absl::MakeConstSpan(slots).subspan(0, 2));
  EXPECT_EQ(hbm_->used_bytes() + store_.used_bytes(), 0);
}

TEST_F(BlockTableTest, ASessionsOwnHbmBudgetHolds) {
  hbm_ = std::make_unique<MemorySlotStore>(
      MemorySlotStoreOptions{.budget_bytes = 64 * 4096, .kind = MemoryKind::kDevice}, &device_);
  ASSERT_TRUE(hbm_->TakeAll().ok());
  Make(1, 64, 64, 0, 16, 2 * 4096);
  for (int i = 0; i < 4; ++i) Store(0, i);
  EXPECT_EQ(table_->num_hbm_slots(), 2);
  table_->SetBudgets(0, 0);
  Store(0, 4);
  EXPECT_EQ(table_->num_hbm_slots(), 3);
  table_->SetBudgets(0, 4096);
  Store(0, 5);
  EXPECT_EQ(table_->num_hbm_slots(), 3) << "less than is used already";
  table_->Drop(0, 0);
  table_.reset();
  EXPECT_EQ(hbm_->used_bytes() + store_.used_bytes(), 0);
}

// Entries, the store's and the pool's own bookkeeping; slots and rows are never touched, so they
// cost nothing here.
TEST_F(BlockTableTest, BookkeepingIsAtMost96BytesABlock) {
  if (Sanitized()) GTEST_SKIP() << "resident memory is the sanitizer's";
  constexpr int64_t kBlocks = 100'000;
  for (const auto& [num_layers, max_blocks] :
       {std::pair<int64_t, int64_t>{1, kBlocks}, {32, 3125}, {100, 100'000}}) {
    Make(num_layers, max_blocks);
    const int64_t before = ResidentBytes();
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      for (int64_t id = 0; id < kBlocks / num_layers; ++id) Store(layer, id);
    }
    ASSERT_EQ(table_->num_stored(), kBlocks);
    const double stored = static_cast<double>(ResidentBytes() - before) / kBlocks;
    // Once more: what was replaced passes through limbo and the free lists.
    for (int64_t layer = 0; layer < num_layers; ++layer) {
      for (int64_t id = 0; id < kBlocks / num_layers; ++id) Store(layer, id);
    }
    const double replaced = static_cast<double>(ResidentBytes() - before) / kBlocks;
    std::printf("%ld layers x %ld of %ld ids: %.1f bytes a block; all replaced once: %.1f\n",
                num_layers, kBlocks / num_layers, max_blocks, stored, replaced);
    EXPECT_LE(stored, 96);
    EXPECT_LE(replaced, 96);
    table_.reset();
    rows_.reset();
  }
}

}  // namespace
}  // namespace sluice
