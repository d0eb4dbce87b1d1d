#include "tests/store/slot_store_conformance.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "server/base/error.h"

namespace sluice {
namespace {

using Slots = std::vector<std::byte*>;

absl::Status Allocate(SlotStore& store, int64_t slot_bytes, Slots* slots) {
  return store.Allocate(slot_bytes, absl::MakeSpan(*slots));
}

TEST_P(SlotStoreConformance, TheBudgetIsExactAndCountsStrides) {
  const auto store = GetParam().make(10 * 4096);
  EXPECT_EQ(store->budget_bytes(), 10 * 4096);
  EXPECT_EQ(store->used_bytes(), 0);
  Slots small(4), large(3), one(1);
  ASSERT_TRUE(Allocate(*store, 64, &small).ok());
  EXPECT_EQ(store->used_bytes(), 4 * 4096);
  ASSERT_TRUE(Allocate(*store, 4097, &large).ok());
  EXPECT_EQ(store->used_bytes(), 10 * 4096) << "full to the last byte";
  const absl::Status full = Allocate(*store, 1, &one);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), GetParam().full_reason);
  EXPECT_EQ(MetaOf(full, "need_bytes"), "4096");
  EXPECT_EQ(MetaOf(full, "free_bytes"), "0");
  EXPECT_EQ(MetaOf(full, "budget_bytes"), "40960");
  EXPECT_EQ(store->used_bytes(), 10 * 4096);
  store->Free(4097, large);
  EXPECT_EQ(store->used_bytes(), 4 * 4096);
  store->Free(64, small);
  EXPECT_EQ(store->used_bytes(), 0);
}

TEST_P(SlotStoreConformance, ABatchIsTakenWholeOrNotAtAll) {
  const auto store = GetParam().make(16 * 4096);
  Slots first(10), second(7), third(6);
  ASSERT_TRUE(Allocate(*store, 4096, &first).ok());
  EXPECT_FALSE(Allocate(*store, 4096, &second).ok());
  EXPECT_EQ(store->used_bytes(), 10 * 4096);
  ASSERT_TRUE(Allocate(*store, 4096, &third).ok()) << "what was refused took nothing";
  EXPECT_EQ(store->used_bytes(), 16 * 4096);
  store->Free(4096, first);
  store->Free(4096, third);
}

TEST_P(SlotStoreConformance, NothingIsNothing) {
  const auto store = GetParam().make(4096);
  Slots none;
  EXPECT_TRUE(Allocate(*store, 64, &none).ok());
  store->Free(64, none);
  EXPECT_EQ(store->used_bytes(), 0);
}

// Slots of many strides come and go; none overlaps another, and each keeps what was written into
// it.
TEST_P(SlotStoreConformance, SlotsAreDisjointAlignedAndKeepTheirBytes) {
  const auto store = GetParam().make(int64_t{8} << 20);
  const int64_t sizes[] = {64, 4096, 4160, 65536, 262144};
  struct Live {
    int64_t bytes;
    uint8_t fill;
  };
  std::map<std::byte*, Live> live;
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    if (random() % 2 == 0) {
      const int64_t bytes = sizes[random() % 5];
      Slots slots(1 + random() % 5);
      if (!Allocate(*store, bytes, &slots).ok()) continue;
      for (std::byte* slot : slots) {
        ASSERT_EQ(reinterpret_cast<uintptr_t>(slot) % 4096, 0u);
        const auto after = live.lower_bound(slot);
        if (after != live.end()) {
          ASSERT_LE(slot + SlotStore::StrideBytes(bytes), after->first);
        }
        if (after != live.begin()) {
          const auto before = std::prev(after);
          ASSERT_LE(before->first + SlotStore::StrideBytes(before->second.bytes), slot);
        }
        const auto fill = static_cast<uint8_t>(random());
        std::memset(slot, fill, bytes);
        live[slot] = {bytes, fill};
      }
    } else if (!live.empty()) {
      const auto it = std::next(live.begin(), static_cast<int64_t>(random() % live.size()));
      const auto fill = static_cast<std::byte>(it->second.fill);
      ASSERT_TRUE(std::all_of(it->first, it->first + it->second.bytes,
                              [&](std::byte b) { return b == fill; }));
      store->Free(it->second.bytes, absl::MakeConstSpan(&it->first, 1));
      live.erase(it);
    }
    int64_t used_bytes = 0;
    for (const auto& [slot, what] : live) used_bytes += SlotStore::StrideBytes(what.bytes);
    ASSERT_EQ(store->used_bytes(), used_bytes);
  }
  for (const auto& [slot, what] : live) store->Free(what.bytes, absl::MakeConstSpan(&slot, 1));
  EXPECT_EQ(store->used_bytes(), 0);
  Slots all((int64_t{8} << 20) / 4096);
  EXPECT_TRUE(Allocate(*store, 4096, &all).ok()) << "all of the budget can be had again";
  store->Free(4096, all);
}

TEST_P(SlotStoreConformance, ThreadsShareTheBudgetAndNoSlot) {
  const auto store = GetParam().make(64 * 4096);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto mine = static_cast<std::byte>(t + 1);
      for (int round = 0; round < 500; ++round) {
        Slots slots(1 + (round + t) % 24);
        const int64_t bytes = round % 3 == 0 ? 64 : 4096;
        if (!Allocate(*store, bytes, &slots).ok()) continue;
        for (std::byte* slot : slots) std::memset(slot, t + 1, bytes);
        for (std::byte* slot : slots) {
          if (slot[0] != mine || slot[bytes - 1] != mine) ADD_FAILURE() << "a slot of two owners";
        }
        store->Free(bytes, slots);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->used_bytes(), 0);
}

}  // namespace
}  // namespace sluice
