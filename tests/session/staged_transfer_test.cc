// Offloads and fetches on a device that cannot address a message's memory. What they share with
// those on one that can is tested by running the other tests of this folder on such a device.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;

constexpr int64_t kBlockBytes = 1024;  // K and V of a block of SmallSpec
constexpr int64_t kStagingBytes = 16 * kBlockBytes;

class StagedTransfer : public SessionFixture {
 protected:
  void SetUp() override {
    device_ = std::make_unique<TestDevice>(4, /*strict=*/true);
    MakeManager(SmallStaging());
  }
  static SessionManagerOptions SmallStaging() {
    return {.max_message_bytes = kStagingBytes, .transfer_staging_bytes = kStagingBytes};
  }

  // An offload that is under way.
  struct Flight {
    std::vector<OffloadBlock> blocks;
    Tokens wire;
    Waitable<OffloadCall> call;
  };
  std::unique_ptr<Flight> StartOffload(uint32_t layer, uint32_t first, uint32_t count,
                                       Session* session = nullptr) {
    auto flight = std::make_unique<Flight>();
    for (uint32_t i = 0; i < count; ++i) flight->blocks.push_back({layer, first + i, 0, ""});
    flight->wire = RandomTokens(count * session_->spec().block_tokens);
    flight->call.blocks = flight->blocks;
    flight->call.k = View(flight->wire.k);
    flight->call.v = View(flight->wire.v);
    flight->call.predict = predict_;
    (session == nullptr ? session_.get() : session)->Offload(&flight->call);
    return flight;
  }
  struct FetchFlight {
    std::vector<uint32_t> ids;
    Tokens wire;
    Waitable<FetchCall> call;
  };
  std::unique_ptr<FetchFlight> StartFetch(uint32_t layer, const std::vector<uint32_t>& ids) {
    auto flight = std::make_unique<FetchFlight>();
    flight->ids = ids;
    flight->wire = RandomTokens(std::ssize(ids) * session_->spec().block_tokens);
    flight->call.layer = layer;
    flight->call.block_ids = flight->ids;
    flight->call.k = reinterpret_cast<std::byte*>(flight->wire.k.data());
    flight->call.v = reinterpret_cast<std::byte*>(flight->wire.v.data());
    session_->Fetch(&flight->call);
    return flight;
  }
  template <typename C>
  static bool IsWaiting(Waitable<C>& call) {
    return !call.IsDoneWithin(absl::Milliseconds(20));
  }

  PredictMode predict_ = PredictMode::kRequired;  // of StartOffload

  // What is left over shows here.
  void ExpectNothingIsHeld() {
    std::vector<uint32_t> ids;
    for (const SequenceInfo& sequence : session_->ListSequences(0, 100)) {
      ids.push_back(sequence.sequence_id);
    }
    if (!ids.empty()) {
      ASSERT_TRUE(session_->ReleaseSequence(ids, true).ok());
    }
    ASSERT_TRUE(session_->DropBlocks({{}, Ids(0, 64)}, true).ok());
    WaitUntilQuiet();
    for (const char* name : {"a_g", "a_g_replacement", "blocks.host"}) {
      EXPECT_EQ(Item(name).used_bytes, 0) << name;
    }
    const auto whole = StartOffload(0, 0, kStagingBytes / kBlockBytes);
    ASSERT_TRUE(whole->call.Wait().ok()) << "all of the staging memory is there";
    EXPECT_EQ(*Fetch(0, Ids(0, kStagingBytes / kBlockBytes)), whole->wire);
    // Waits for every call that is counted.
    ASSERT_TRUE(CloseSession(session_->spec().name, epoch_, false).ok());
    EXPECT_EQ(HostBytes(), 0);
  }
};

TEST_F(StagedTransfer, ADeviceThatReadsAnyMemoryHasNoStaging) {
  manager_.reset();
  device_.reset();  // a GPU has one at a time
  device_ = std::make_unique<TestDevice>(4);
  if (!device_->info().reads_any_host_memory) GTEST_SKIP() << "this device has one";
  const int64_t reserves_left = device_->reserves_left;
  MakeManager({});
  EXPECT_EQ(device_->reserves_left.load(), reserves_left);
}

TEST_F(StagedTransfer, OffloadsOfFarMoreThanTheStagingWaitAndAreStoredBitForBit) {
  Open(SmallSpec());
  predict_ = PredictMode::kBestEffort;  // more blocks are replaced at once than A_g has rows for
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<Flight>> flights;
    std::vector<std::unique_ptr<FetchFlight>> fetches;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t first = 0; first < 64;) {
        const uint32_t count = std::min<uint32_t>(1 + random_() % 16, 64 - first);
        flights.push_back(StartOffload(layer, first, count));
        first += count;
        if (round > 0)
          fetches.push_back(StartFetch(layer, Ids(random_() % 48, 1 + random_() % 16)));
      }
    }
    for (const auto& flight : flights) ASSERT_TRUE(flight->call.Wait().ok());
    for (const auto& fetch : fetches) ASSERT_TRUE(fetch->call.Wait().ok());
    for (const auto& flight : flights) {
      const auto back =
          Fetch(flight->blocks[0].layer,
                Ids(flight->blocks[0].block_id, static_cast<uint32_t>(flight->blocks.size())));
      ASSERT_EQ(*back, flight->wire);
    }
  }
  ExpectNothingIsHeld();
}

TEST_F(StagedTransfer, OffloadsEndInTheOrderInWhichTheyCame) {
  struct Ordered final : OffloadCall {
    void Done() override {
      std::lock_guard<std::mutex> lock(*mutex);
      order->push_back(number);
      changed->notify_all();
    }
    size_t number = 0;
    std::vector<size_t>* order;
    std::mutex* mutex;
    std::condition_variable* changed;
  };
  MakeManager({.max_message_bytes = 4 << 20, .transfer_staging_bytes = 16 << 20});
  SessionSpec spec = SmallSpec();
  spec.block_tokens = 256;
  Open(spec);
  // A batch that is copied in several pieces, and in turn with it one that is copied in no time;
  // block 0 is in all of them.
  constexpr size_t kCalls = 100;
  std::vector<OffloadBlock> many;
  for (uint32_t id = 0; id < 40; ++id) many.push_back({0, id, 0, ""});
  const std::vector<OffloadBlock> one = {{0, 0, 0, ""}};
  const Bits word(40 * 256 * 2 * 32, 0x3f80);
  const Tokens large{word, word};
  std::vector<Tokens> small;
  for (size_t i = 0; i < kCalls / 2; ++i) small.push_back(RandomTokens(256));
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<size_t> order;
  std::vector<std::unique_ptr<Ordered>> calls;
  for (size_t i = 0; i < kCalls; ++i) {
    const Tokens& wire = i % 2 == 0 ? large : small[i / 2];
    calls.push_back(std::make_unique<Ordered>());
    Ordered& call = *calls.back();
    call.number = i;
    call.order = &order;
    call.mutex = &mutex;
    call.changed = &changed;
    call.blocks = i % 2 == 0 ? many : one;
    call.k = View(wire.k);
    call.v = View(wire.v);
    call.predict = PredictMode::kOff;  // more blocks are replaced at once than A_g has rows for
    session_->Offload(&call);
  }
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return order.size() == kCalls; });
  for (size_t i = 0; i < kCalls; ++i) {
    EXPECT_EQ(order[i], i);
    EXPECT_TRUE(calls[i]->status().ok()) << calls[i]->status();
  }
  lock.unlock();
  EXPECT_EQ(*Fetch(0, {0}), small.back());
  ASSERT_TRUE(CloseSession(spec.name, epoch_, false).ok());
  EXPECT_EQ(HostBytes(), 0);
}

// From the moment that it is handed in an offload holds what it will fill, though its bytes still
// wait for memory.
TEST_F(StagedTransfer, AStepWaitsForAnOffloadThatWaitsForMemory) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {20}).ok());
  const Bits q = RandomQ(1);
  const Tokens third = RandomTokens(1);
  StreamGate gate(*ingest_stream_);
  const auto holder = StartOffload(1, 0, 16);
  Flight filler;
  filler.blocks = {{0, 20, 2, ""}};
  filler.wire = RandomTokens(4);
  filler.call.blocks = filler.blocks;
  filler.call.k = View(filler.wire.k);
  filler.call.v = View(filler.wire.v);
  session_->Offload(&filler.call);
  sequences_ = {Seq(0, 1, 3)};
  Fill(call_, 0, q, &third);
  session_->Submit(&call_);
  EXPECT_TRUE(IsWaiting(call_));
  EXPECT_TRUE(IsWaiting(filler.call));
  gate.Open();
  ASSERT_TRUE(holder->call.Wait().ok());
  ASSERT_TRUE(filler.call.Wait().ok());
  ASSERT_TRUE(call_.Wait().ok());
  ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
  const auto back = Fetch(0, {20});
  EXPECT_EQ(Slice(*back, 0, 2), Slice(filler.wire, 0, 2));
  EXPECT_EQ(Slice(*back, 2, 3), third);
  ExpectNothingIsHeld();
}

TEST_F(StagedTransfer, WhatCannotBeStoredIsRefusedAtOnceThoughAllMemoryIsTaken) {
  SessionSpec spec = SmallSpec();
  spec.host_budget_bytes = 20 * 4096;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 30, RandomTokens(4)).ok());
  ASSERT_TRUE(OffloadTokens(1, 30, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {30}).ok());
  ASSERT_TRUE(Put(1, 1, 0, {30}).ok());
  EXPECT_REASON(StartFetch(0, {63})->call.Wait(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  StreamGate gate(*ingest_stream_);
  const auto holder = StartOffload(0, 0, 16);
  const auto waits = StartOffload(1, 0, 1);
  const auto shared = StartOffload(0, 30, 1);
  EXPECT_REASON(shared->call.Wait(), StatusCode::kFailedPrecondition, "BLOCK_SHARED");
  const auto full = StartOffload(1, 1, 2);
  EXPECT_REASON(full->call.Wait(), StatusCode::kResourceExhausted, "HOST_MEMORY");
  const auto large = StartOffload(1, 1, 17);
  EXPECT_REASON(large->call.Wait(), StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE");
  EXPECT_EQ(MetaOf(large->call.status(), "limit_bytes"), "16384");
  const auto large_fetch = StartFetch(0, Ids(0, 17));
  EXPECT_REASON(large_fetch->call.Wait(), StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE");
  EXPECT_EQ(MetaOf(large_fetch->call.status(), "message"), "reply");
  EXPECT_TRUE(IsWaiting(waits->call));
  gate.Open();
  ASSERT_TRUE(holder->call.Wait().ok());
  ASSERT_TRUE(waits->call.Wait().ok());
  ExpectNothingIsHeld();
}

// A fetch begins when its memory is there: until then it holds no block, and what it gives is what
// is stored then.
TEST_F(StagedTransfer, AFetchThatWaitsForMemoryHoldsNoBlock) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 40, RandomTokens(8)).ok());
  const auto gate = std::make_unique<StreamGate>(*ingest_stream_);
  const auto holder = StartOffload(0, 0, 16);
  const auto dropped = StartFetch(0, {40});
  const auto replaced = StartFetch(0, {41});
  const auto absent = StartFetch(0, {50});
  const auto none = StartFetch(0, {});
  EXPECT_TRUE(none->call.Wait().ok()) << "needs no memory";
  EXPECT_TRUE(IsWaiting(dropped->call));
  const std::vector<uint32_t> layer = {0}, id = {40};
  ASSERT_TRUE(session_->DropBlocks({layer, id}, false).ok());
  EXPECT_EQ(HostBytes(), (1 + 16) * 4096) << "the slot went back at once";
  ASSERT_TRUE(Put(0, 1, 0, {41}).ok());
  const Tokens first = RandomTokens(1);
  ASSERT_TRUE(Step(0, Seq(0, 1, 1), RandomQ(1), &first).ok()) << "and a step need not wait";
  EXPECT_TRUE(IsWaiting(replaced->call));
  gate->Open();
  ASSERT_TRUE(holder->call.Wait().ok());
  EXPECT_REASON(dropped->call.Wait(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_REASON(absent->call.Wait(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  ASSERT_TRUE(replaced->call.Wait().ok());
  EXPECT_EQ(Slice(replaced->wire, 0, 1), first);
  ExpectNothingIsHeld();
}

TEST_F(StagedTransfer, ACloseWaitsForWorkThatIsStagedOrWaitsForMemory) {
  for (const bool keep_data : {false, true}) {
    SessionSpec spec = SmallSpec();
    spec.retention = absl::Hours(1);
    Open(spec);
    ASSERT_TRUE(OffloadTokens(1, 40, RandomTokens(4)).ok());
    auto gate = std::make_unique<StreamGate>(*ingest_stream_);
    const auto holder = StartOffload(0, 0, 10);
    const auto behind = StartOffload(0, 20, 2);
    const auto waits = StartOffload(0, 30, 8);
    const auto fetch = StartFetch(1, {40});
    std::atomic<bool> closed = false;
    std::thread closer([&] {
      EXPECT_TRUE(CloseSession(spec.name, epoch_, keep_data).ok());
      closed = true;
    });
    const std::vector<uint32_t> nothing = {63};
    while (ReasonOf(session_->DropBlocks({{}, nothing}, true).status()) != "SESSION_CLOSING") {
      ASSERT_FALSE(closed);
    }
    EXPECT_REASON(StartOffload(0, 60, 1)->call.Wait(), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    EXPECT_REASON(StartFetch(1, {40})->call.Wait(), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    clock_offset_ += absl::Minutes(10);
    manager_->Sweep();
    EXPECT_TRUE(IsWaiting(waits->call));
    EXPECT_FALSE(closed);
    gate.reset();
    for (Flight* flight : {holder.get(), behind.get(), waits.get()}) {
      EXPECT_TRUE(flight->call.Wait().ok());
    }
    EXPECT_TRUE(fetch->call.Wait().ok());
    closer.join();
    const auto gone = StartOffload(0, 0, 1);
    EXPECT_EQ(ReasonOf(gone->call.Wait()), keep_data ? "" : "SESSION_NOT_FOUND");
    if (!keep_data) {
      EXPECT_EQ(HostBytes(), 0);
      continue;
    }
    Open(spec);
    EXPECT_EQ(*Fetch(0, Ids(30, 8)), waits->wire) << "what was admitted is stored";
    ExpectNothingIsHeld();
  }
}

// Small transfers of one session never stop; the large one of another has its turn.
TEST_F(StagedTransfer, ALargeOffloadIsNotStarvedBySmallOnesOfAnotherSession) {
  SessionSpec other = SmallSpec();
  other.name = "other";
  Open(other);
  const std::shared_ptr<Session> busy = session_;
  const uint64_t busy_epoch = epoch_;
  Open(SmallSpec());
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Tokens wire{Bits(3 * 256, 0x3f80), Bits(3 * 256, 0x3f80)};
      const std::vector<OffloadBlock> blocks = {
          {0, 3 * i, 0, ""}, {0, 3 * i + 1, 0, ""}, {0, 3 * i + 2, 0, ""}};
      Waitable<OffloadCall> calls[3];
      while (!stop) {
        for (auto& call : calls) {
          call.blocks = blocks;
          call.k = View(wire.k);
          call.v = View(wire.v);
          call.predict = PredictMode::kOff;
          busy->Offload(&call);
        }
        for (auto& call : calls) ASSERT_TRUE(call.Wait().ok());
        ++rounds;
      }
    });
  }
  for (int i = 0; i < 50; ++i) {
    const auto large = StartOffload(0, 0, 16);
    ASSERT_TRUE(large->call.IsDoneWithin(absl::Seconds(20)));
    ASSERT_TRUE(large->call.Wait().ok()) << large->call.status();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(rounds, 0);
  ASSERT_TRUE(CloseSession("other", busy_epoch, false).ok());
  ExpectNothingIsHeld();
}

TEST_F(StagedTransfer, AStagingThatIsNotToBeHadOrTooSmallIsRefusedAtStart) {
  const auto create = [&](const SessionManagerOptions& options) {
    return SessionManager::Create(options, device_.get()).status();
  };
  SessionManagerOptions options = SmallStaging();
  options.transfer_staging_bytes = kStagingBytes - 1;
  EXPECT_REASON(create(options), StatusCode::kInvalidArgument, "INVALID_FIELD");
  EXPECT_EQ(MetaOf(create(options), "field"), "transfer_staging_bytes");
  options = SmallStaging();
  options.transfer_staging_threads = -1;
  EXPECT_EQ(MetaOf(create(options), "field"), "transfer_staging_threads");
  device_->commits_left = 0;
  EXPECT_REASON(create(SmallStaging()), StatusCode::kResourceExhausted, "HOST_MEMORY");
  device_->commits_left = 100;
  const auto chosen = SessionManager::Create({.max_message_bytes = 1 << 20}, device_.get());
  EXPECT_EQ((*chosen)->options().transfer_staging_bytes, 512 << 20);
  EXPECT_GE((*chosen)->options().transfer_staging_threads, 1);
  EXPECT_LE((*chosen)->options().transfer_staging_threads, 4);
}

}  // namespace
}  // namespace sluice
