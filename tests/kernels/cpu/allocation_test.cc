// After warm-up no operation allocates, on any thread. Counts malloc itself, which operator new
// calls; skipped under a sanitizer, which has a malloc of its own.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/ops/ops.h"
#include "kernels/ops/projection.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* malloc(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(old, bytes);
}
}
#define COUNTS_ALLOCATIONS 1
#else
#define COUNTS_ALLOCATIONS 0
#endif

namespace sluice {
namespace {

struct Nothing : HostTask {
  void Run() override {}
};

TEST(Allocation, TheHookCounts) {
  if (COUNTS_ALLOCATIONS == 0) GTEST_SKIP() << "the sanitizer has malloc";
  const int64_t before = allocations;
  delete new std::vector<int>(100);
  EXPECT_GE(allocations - before, 1);
}

TEST(Allocation, NoneAfterWarmUp) {
  if (COUNTS_ALLOCATIONS == 0) GTEST_SKIP() << "the sanitizer has malloc";
  std::unique_ptr<Device> device = *CreateCpuDevice({.num_threads = 2});
  std::unique_ptr<Stream> stream = device->CreateStream(StreamPriority::kAttention);
  std::unique_ptr<Stream> other = device->CreateStream(StreamPriority::kCopy);
  constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kRank = 32, kBlocks = 200, kTokens = 16;
  const KvLayout layout = SlotLayout(DType::kBf16, kKvHeads, kDim, kTokens);
  const int64_t slot = SlotBytes(DType::kBf16, kKvHeads, kDim, kTokens);
  std::vector<std::byte> pool(kBlocks * slot), wire(2 * kTokens * kKvHeads * kDim * 2);
  std::vector<const std::byte*> table;
  std::vector<uint16_t> p(kDim * kRank), projected(kBlocks * kKvHeads * kTokens * kRank);
  FillGaussianProjection(1, kDim, kRank, p.data());
  std::vector<TokenCopy> copies;
  std::vector<ProjectBlock> project;
  std::vector<ScoreBlock> score;
  for (int b = 0; b < kBlocks; ++b) {
    std::byte* block = pool.data() + b * slot;
    auto* a = reinterpret_cast<std::byte*>(projected.data() + b * kKvHeads * kTokens * kRank);
    table.push_back(block);
    copies.push_back({block, wire.data(), wire.data() + wire.size() / 2, 0, kTokens, 0});
    project.push_back({block, a, 0, kTokens});
    score.push_back({a, kTokens});
  }
  const std::vector<AttendSequence> sequences = {{table.data(), kBlocks * kTokens, 0, 2, true},
                                                 {table.data(), 100, 2, 1, true}};
  std::vector<std::byte> q(3 * kHeads * kDim * 2), out(q.size());
  std::vector<float> m(3 * kHeads), l(m.size()), o(m.size() * kDim), scores(kBlocks);
  std::vector<int64_t> top(10);
  AttendParams attend;
  attend.layout = layout;
  attend.options.scale = 0.125f;
  attend.num_query_heads = kHeads;
  attend.sequences = sequences.data();
  attend.num_sequences = 2;
  attend.num_rows = 3;
  attend.q = q.data();
  attend.out = out.data();
  std::vector<std::byte> attend_workspace(device->ops().AttendWorkspaceBytes(attend));
  attend.workspace = attend_workspace.data();
  ScoreParams score_params;
  score_params.kind = ScoreKind::kMass;
  score_params.num_query_heads = kHeads;
  score_params.num_kv_heads = kKvHeads;
  score_params.head_dim = kDim;
  score_params.block_tokens = kTokens;
  score_params.rank = kRank;
  score_params.scale = 0.125f;
  score_params.projection = reinterpret_cast<std::byte*>(p.data());
  score_params.q = q.data();
  score_params.blocks = score.data();
  score_params.num_blocks = kBlocks;
  score_params.scores = scores.data();
  score_params.top = top.data();
  score_params.top_k = 10;
  std::vector<std::byte> score_workspace(device->ops().ScoreWorkspaceBytes(score_params));
  score_params.workspace = score_workspace.data();
  ProjectKeysParams project_params{layout, kRank,          reinterpret_cast<std::byte*>(p.data()),
                                   0,      project.data(), kBlocks};
  const RunningState state = {m.data(), l.data(), o.data()};
  Nothing nothing;
  const auto round = [&] {
    Ops& ops = device->ops();
    for (int i = 0; i < 3; ++i) {
      ops.StoreTokens({layout, copies.data(), kBlocks}, *stream);
      ops.GatherTokens({layout, copies.data(), 2}, *other);
      ops.ProjectKeys(project_params, *stream);
      stream->WaitFor(*other, other->enqueued());
      ops.ScoreBlocks(score_params, *stream);
      ops.Attend(attend, *stream);
      ops.BeginStates({3, kHeads, kDim, state}, *stream);
      ops.MergeStates({3, kHeads, kDim, state, &state, 1}, *stream);
      FinalizeParams finalize{3, kHeads, kDim, state, nullptr, out.data(), DType::kBf16, nullptr};
      ops.FinalizeStates(finalize, *stream);
      stream->Enqueue(&nothing);
      other->WaitFor(*stream, stream->enqueued());
    }
    stream->Synchronize();
    other->Synchronize();
  };
  // The streams' free lists grow to the most that was ever in flight: all of a round.
  struct Hold : HostTask {
    void Run() override {
      while (!open) sched_yield();
    }
    std::atomic<bool> open{false};
  };
  Hold hold;
  std::unique_ptr<Stream> gate = device->CreateStream(StreamPriority::kAttention);
  const StreamPosition position = gate->Enqueue(&hold);
  stream->WaitFor(*gate, position);
  other->WaitFor(*gate, position);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    hold.open = true;
  });
  round();
  opener.join();
  const int64_t before = allocations;
  for (int i = 0; i < 20; ++i) round();
  EXPECT_EQ(allocations - before, 0);
}

}  // namespace
}  // namespace sluice
