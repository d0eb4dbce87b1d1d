// Calls on a session that is warm make no CUDA allocation, free or registration and wait for no
// stream: DecodeStep with new tokens, ScoreBlocks, Offload, fetches and tiles.
//
// Warm: the session has stored as many blocks as it will (A_g pages are committed as blocks arrive,
// with cuMemCreate and cuMemMap), has replaced a batch (rows of its own), and each kind of call has
// run once in its largest size, as many at a time as later.

#include <cuda_runtime_api.h>

#include <memory>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/ops/float16.h"
#include "server/session/session_manager.h"
#include "tests/cuda/cuda_calls.h"
#include "tests/session/waitable.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kSequences = 4;
constexpr uint32_t kBlocksEach = 64;
constexpr int kAtOnce = 6;
constexpr int kRounds = 100;

class NoCudaCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = CreateCudaDevice({});
    if (absl::IsUnavailable(device.status())) GTEST_SKIP() << device.status();
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    manager_ = *SessionManager::Create(
        {.hbm_budget_bytes = int64_t{4} << 30, .host_budget_bytes = int64_t{1} << 30},
        device_.get());
    SessionSpec spec;
    spec.name = "quiet";
    spec.num_layers = 2;
    spec.num_query_heads = 32;
    spec.num_kv_heads = 8;
    spec.head_dim = 128;
    spec.block_tokens = 16;
    spec.rank = 32;
    spec.max_blocks = 2 * kSequences * kBlocksEach;
    spec.max_sequences = 8;
    spec.lease = absl::Hours(1);
    auto opened = manager_->Open(spec);
    ASSERT_TRUE(opened.ok()) << opened.status();
    session_ = *manager_->Find("quiet", opened->info.epoch);
    // Wire data in memory that the device reaches.
    const int64_t bytes = kBlocksEach * session_->slot_bytes();
    wire_ = *device_->Reserve(MemoryKind::kHost, bytes);
    ASSERT_TRUE(device_->Commit(wire_, 0, bytes).ok());
    fetched_ = *device_->Reserve(MemoryKind::kHost, 3 * session_->slot_bytes());
    ASSERT_TRUE(device_->Commit(fetched_, 0, 3 * session_->slot_bytes()).ok());
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    auto* bits = reinterpret_cast<uint16_t*>(wire_.data());
    for (int64_t i = 0; i < bytes / 2; ++i) bits[i] = Bf16FromFloat(normal(random));
  }
  void TearDown() override {
    session_.reset();
    manager_.reset();
  }

  TensorView Wire(int64_t offset_bytes, int64_t bytes) const {
    return {wire_.data() + offset_bytes, bytes, true, DType::kBf16, {}};
  }
  void StoreBlocks(uint32_t layer, uint32_t first_id) {
    Waitable<OffloadCall>& call = offload_;
    blocks_.clear();
    for (uint32_t i = 0; i < kBlocksEach; ++i) blocks_.push_back({layer, first_id + i, 0, ""});
    call.blocks = blocks_;
    const int64_t half_bytes = kBlocksEach * session_->slot_bytes() / 2;
    call.k = Wire(0, half_bytes);
    call.v = Wire(half_bytes, half_bytes);
    session_->Offload(&call);
    ASSERT_TRUE(call.Wait().ok()) << call.status();
  }
  // Each kind of call, steps several at a time; a step writes the last token of each sequence
  // again.
  void Round(int64_t round) {
    const int64_t row_bytes = 32 * 128 * 2;
    for (int i = 0; i < kAtOnce; ++i) {
      Waitable<DecodeCall>& step = steps_[i];
      sequences_[i].assign(kSequences, DecodeSequence());
      for (uint32_t s = 0; s < kSequences; ++s) {
        sequences_[i][s].sequence_id = s;
        sequences_[i][s].query_tokens = 1;
        sequences_[i][s].context_tokens = kBlocksEach * 16 - (round + i) % 40;
      }
      step.layer = static_cast<uint32_t>(i % 2);
      step.sequences = sequences_[i];
      step.q = Wire(round * 256, kSequences * row_bytes);
      step.k = Wire(round * 512, kSequences * row_bytes / 4);
      step.v = Wire(round * 1024, kSequences * row_bytes / 4);
      step.return_lse = true;
      session_->Submit(&step);
    }
    score_.layer = static_cast<uint32_t>(round % 2);
    score_.by_sequence = true;
    score_.sequence_id = static_cast<uint32_t>(round % kSequences);
    score_.q = Wire(round * 64, row_bytes);
    score_.kind = round % 2 == 0 ? ScoreKind::kMass : ScoreKind::kMaxDot;
    score_.top_k = kBlocksEach / 2;
    session_->Submit(&score_);
    StoreBlocks(static_cast<uint32_t>(round % 2), kSequences * kBlocksEach);
    fetched_ids_ = {0, 1, 2};
    fetch_.block_ids = fetched_ids_;
    fetch_.k = fetched_.data();
    fetch_.v = fetched_.data() + 3 * session_->slot_bytes() / 2;
    session_->Fetch(&fetch_);
    ASSERT_TRUE(fetch_.Wait().ok()) << fetch_.status();
    for (Waitable<DecodeCall>& step : steps_) {
      ASSERT_TRUE(step.Wait().ok()) << step.status();
      for (const absl::Status& status : step.sequence_status) ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(score_.Wait().ok()) << score_.status();
  }
  void WarmUp() {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t s = 0; s < kSequences; ++s) StoreBlocks(layer, s * kBlocksEach);
      // Stored and replaced, twice, so that slots and rows of what is replaced are there.
      for (int i = 0; i < 3; ++i) StoreBlocks(layer, kSequences * kBlocksEach);
    }
    for (uint32_t s = 0; s < kSequences; ++s) {
      std::vector<uint32_t> ids;
      for (uint32_t i = 0; i < kBlocksEach; ++i) ids.push_back(s * kBlocksEach + i);
      ASSERT_TRUE(session_->PutSequence({s, 1, 0, ids}).ok());
    }
    // The largest context first.
    for (int round = 0; round < 3; ++round) Round(round);
  }

  // First, so that it outlives what lies in its memory.
  std::unique_ptr<Device> device_;
  std::unique_ptr<SessionManager> manager_;
  std::shared_ptr<Session> session_;
  Buffer wire_;
  Buffer fetched_;
  std::vector<OffloadBlock> blocks_;
  std::vector<uint32_t> fetched_ids_;
  std::vector<DecodeSequence> sequences_[kAtOnce];
  Waitable<OffloadCall> offload_;
  Waitable<FetchCall> fetch_;
  Waitable<ScoreCall> score_;
  Waitable<DecodeCall> steps_[kAtOnce];
};

TEST_F(NoCudaCalls, OfAWarmSession) {
  WarmUp();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_THAT(CudaCalls::UnknownEntryPoints(), IsEmpty())
      << "say in tests/cuda/cuda_calls.cc whether they are to be counted";
  CudaCalls::Start();
  for (int round = 0; round < kRounds && !HasFatalFailure(); ++round) Round(round);
  EXPECT_THAT(CudaCalls::Stop(), IsEmpty());
}

// Counts are of calls, whatever comes of them: also on a machine without a GPU.
TEST(CudaCallsTest, CountsByName) {
  CudaCalls::Start();
  void* memory = nullptr;
  (void)cudaMalloc(&memory, 64);
  (void)cudaFree(memory);
  (void)cudaFree(nullptr);
  EXPECT_THAT(CudaCalls::Stop(), ElementsAre("cudaFree x 2", "cudaMalloc x 1"));
  CudaCalls::Start();
  EXPECT_THAT(CudaCalls::Stop(), IsEmpty());
}

// What is counted at all: the first test would fail if a call were made.
TEST_F(NoCudaCalls, AreSeenWhereThereAreSome) {
  CudaCalls::Start();
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 1 << 20), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_THAT(CudaCalls::Stop(),
              ElementsAre("cudaDeviceSynchronize x 1", "cudaFree x 1", "cudaMalloc x 1"));
  // The device's own calls, of the runtime and of the driver. (What is unpinned is kept.)
  CudaCalls::Start();
  absl::StatusOr<Buffer> host = device_->Reserve(MemoryKind::kHost, 64 << 20);
  ASSERT_TRUE(host.ok() && device_->Commit(*host, 0, 64 << 20).ok());
  host->Reset();
  EXPECT_THAT(CudaCalls::Stop(), ElementsAre("cudaHostRegister x 1"));
  CudaCalls::Start();
  absl::StatusOr<Buffer> hbm = device_->Reserve(MemoryKind::kDevice, 64 << 20);
  ASSERT_TRUE(hbm.ok() && device_->Commit(*hbm, 0, 2 << 20).ok());
  EXPECT_THAT(CudaCalls::Stop(),
              ::testing::IsSupersetOf({"cuMemAddressReserve x 1", "cuMemMap x 1"}));
  hbm->Reset();
  // A new session takes what a session takes.
  CudaCalls::Start();
  SessionSpec spec = session_->spec();
  spec.name = "another";
  ASSERT_TRUE(manager_->Open(spec).ok());
  EXPECT_THAT(CudaCalls::Stop(), ::testing::Contains("cudaStreamCreateWithPriority x 3"));
}

}  // namespace
}  // namespace sluice
