#include "server/store/memory_slot_store.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/store/budget.h"
#include "tests/base/resident_bytes.h"
#include "tests/base/test_device.h"
#include "tests/store/slot_store_conformance.h"

namespace sluice {
namespace {

TestDevice& SharedDevice() {
  static TestDevice device(1);
  return device;
}

INSTANTIATE_TEST_SUITE_P(
    MemorySlotStore, SlotStoreConformance,
    ::testing::Values(SlotStoreMaker{[](int64_t budget_bytes) {
                                       return std::make_unique<MemorySlotStore>(
                                           MemorySlotStoreOptions{budget_bytes, 64 << 10},
                                           &SharedDevice());
                                     },
                                     "HOST_MEMORY"},
                      SlotStoreMaker{[](int64_t budget_bytes) {
                                       return std::make_unique<MemorySlotStore>(
                                           MemorySlotStoreOptions{budget_bytes}, &SharedDevice());
                                     },
                                     "HOST_MEMORY"}));

std::unique_ptr<SlotStore> TakenStore(int64_t budget_bytes, int64_t slab_bytes) {
  auto store =
      std::make_unique<MemorySlotStore>(MemorySlotStoreOptions{.budget_bytes = budget_bytes,
                                                               .chunk_bytes = 64 << 10,
                                                               .kind = MemoryKind::kDevice,
                                                               .slab_bytes = slab_bytes},
                                        &SharedDevice());
  EXPECT_TRUE(store->TakeAll().ok());
  return store;
}

INSTANTIATE_TEST_SUITE_P(TakenAtStart, SlotStoreConformance,
                         ::testing::Values(SlotStoreMaker{[](int64_t budget_bytes) {
                                                            return TakenStore(budget_bytes,
                                                                              budget_bytes);
                                                          },
                                                          "HOST_MEMORY"}));

TEST(MemorySlotStore, TakesAsManyAsThereIsRoomFor) {
  const auto store = TakenStore(10 * 4096, 10 * 4096);
  std::vector<std::byte*> some(4), many(20), others(3);
  EXPECT_EQ(store->AllocateUpTo(4096, absl::MakeSpan(some)), 4);
  EXPECT_EQ(store->AllocateUpTo(8192, absl::MakeSpan(many)), 3);
  EXPECT_EQ(store->used_bytes(), 10 * 4096);
  EXPECT_EQ(store->AllocateUpTo(4096, absl::MakeSpan(others)), 0);
  const absl::Span<const std::byte> range = store->range();
  EXPECT_EQ(range.size(), 10 * 4096u);
  for (std::byte* slot : some) EXPECT_GE(slot, range.data());
  for (int i = 0; i < 3; ++i) EXPECT_LE(many[i] + 8192, range.data() + range.size());
  store->Free(4096, some);
  store->Free(8192, absl::MakeConstSpan(many).subspan(0, 3));
  EXPECT_EQ(store->used_bytes(), 0);
  // Two strides had cut it up; it is whole again.
  std::vector<std::byte*> whole(1);
  EXPECT_EQ(store->AllocateUpTo(10 * 4096, absl::MakeSpan(whole)), 1);
  store->Free(10 * 4096, whole);
}

TEST(MemorySlotStore, NothingIsAskedOfTheDeviceAfterTakeAll) {
  TestDevice device(1);
  MemorySlotStore store({.budget_bytes = 64 << 10, .slab_bytes = 16 << 10}, &device);
  ASSERT_TRUE(store.TakeAll().ok());
  device.reserves_left = 0;
  device.commits_left = 0;
  std::vector<std::byte*> slots(16);
  EXPECT_TRUE(store.Allocate(4096, absl::MakeSpan(slots)).ok());
  std::sort(slots.begin(), slots.end());
  EXPECT_EQ(std::unique(slots.begin(), slots.end()), slots.end());
  store.Free(4096, slots);
  // Nothing is larger than a slab.
  EXPECT_EQ(ReasonOf(store.Allocate(20'000, absl::MakeSpan(slots).subspan(0, 1))), "HOST_MEMORY");
  EXPECT_EQ(store.used_bytes(), 0);
}

TEST(Budget, TakesWhatFitsAndNothingMore) {
  Budget budget(100);
  EXPECT_TRUE(budget.TryTake(60));
  EXPECT_FALSE(budget.TryTake(41));
  EXPECT_TRUE(budget.TryTake(40));
  EXPECT_EQ(budget.used_bytes(), 100);
  EXPECT_FALSE(budget.TryTake(INT64_MAX)) << "no overflow";
  budget.Give(100);
  EXPECT_EQ(budget.used_bytes(), 0);
}

TEST(MemorySlotStore, AChunkGoesBackWithItsLastSlot) {
  if (Sanitized()) GTEST_SKIP() << "resident memory is the sanitizer's";
  constexpr int64_t kBytes = int64_t{64} << 20;
  MemorySlotStore store({.budget_bytes = kBytes, .chunk_bytes = 4 << 20}, &SharedDevice());
  const int64_t before = ResidentBytes();
  std::vector<std::byte*> slots(kBytes / 4096);
  ASSERT_TRUE(store.Allocate(4096, absl::MakeSpan(slots)).ok());
  for (std::byte* slot : slots) std::memset(slot, 1, 4096);
  EXPECT_GE(ResidentBytes() - before, kBytes);
  // All but one slot of the first chunk: that chunk stays, the others go.
  store.Free(4096, absl::MakeConstSpan(slots).subspan(1));
  EXPECT_LE(ResidentBytes() - before, 6 << 20);
  std::vector<std::byte*> again(1023);
  ASSERT_TRUE(store.Allocate(4096, absl::MakeSpan(again)).ok());
  EXPECT_LE(ResidentBytes() - before, 6 << 20) << "what is free in a chunk is used first";
  store.Free(4096, again);
  store.Free(4096, absl::MakeConstSpan(slots).subspan(0, 1));
  EXPECT_LE(ResidentBytes() - before, 2 << 20);
}

TEST(MemorySlotStore, WhatTheMachineRefusesIsAnErrorAndTakesNothing) {
  TestDevice device(1);
  MemorySlotStore store({.budget_bytes = 1 << 20, .chunk_bytes = 16 << 10}, &device);
  std::vector<std::byte*> slots(9);
  device.reserves_left = 2;
  const absl::Status no_address = store.Allocate(4096, absl::MakeSpan(slots));
  EXPECT_EQ(no_address.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(no_address), "HOST_MEMORY");
  EXPECT_EQ(store.used_bytes(), 0);
  device.reserves_left = 100;
  device.commits_left = 1;
  EXPECT_EQ(ReasonOf(store.Allocate(4096, absl::MakeSpan(slots))), "HOST_MEMORY");
  EXPECT_EQ(store.used_bytes(), 0);
  device.commits_left = 100;
  EXPECT_TRUE(store.Allocate(4096, absl::MakeSpan(slots)).ok());
  store.Free(4096, slots);
  EXPECT_EQ(store.used_bytes(), 0);
}

}  // namespace
}  // namespace sluice
