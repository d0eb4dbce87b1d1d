// What every slot store must do. A store's test instantiates the suite:
//
//   INSTANTIATE_TEST_SUITE_P(MemorySlotStore, SlotStoreConformance,
//   ::testing::Values(SlotStoreMaker{...}));

#ifndef TESTS_STORE_SLOT_STORE_CONFORMANCE_H_
#define TESTS_STORE_SLOT_STORE_CONFORMANCE_H_

#include <functional>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "server/store/slot_store.h"

namespace sluice {

struct SlotStoreMaker {
  // A store with this budget; small inner pieces (chunks, segments) find more faults.
  std::function<std::unique_ptr<SlotStore>(int64_t budget_bytes)> make;
  // The reason of a store that is full.
  std::string full_reason;
};

class SlotStoreConformance : public ::testing::TestWithParam<SlotStoreMaker> {};

}  // namespace sluice

#endif  // TESTS_STORE_SLOT_STORE_CONFORMANCE_H_
