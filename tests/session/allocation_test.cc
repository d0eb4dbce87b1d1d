// Decode steps and scores allocate nothing once they have been served: every operator new of every
// thread is counted.

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "tests/session/session_fixture.h"

// The compiler takes the pairs below for unequal ones where it sees into one half alone.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

void* Allocate(size_t bytes, size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  void* memory =
      alignment > 0 ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                    : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, 0); }
void* operator new[](size_t bytes) { return Allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 0); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 0); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace sluice {
namespace {

class Allocation : public SessionFixture {
 protected:
  // Allocations of all threads during `work`.
  template <typename Work>
  static int64_t Count(const Work& work) {
    allocations = 0;
    counting = true;
    work();
    counting = false;
    return allocations;
  }
};

TEST_F(Allocation, TheCounterCounts) {
  EXPECT_EQ(Count([] { ::operator delete(::operator new(16)); }), 1);
  EXPECT_EQ(Count([] { std::thread([] { ::operator delete(::operator new(16)); }).join(); }) > 1,
            true);
  EXPECT_EQ(Count([] {}), 0);
}

TEST_F(Allocation, NoneInDecodeStepsAndScoresAfterTheFirst) {
  SessionSpec spec = SmallSpec();
  spec.max_blocks = 2000;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4000)).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 1500)).ok());
  ASSERT_TRUE(Put(1, 1, 0, Ids(1600, 200)).ok());
  const Bits q = RandomQ(3);
  const Tokens tokens = RandomTokens(3);
  const std::vector<float> sinks(4, 0.5f);
  Waitable<ScoreCall> score;
  score.q = View(q);
  score.q.bytes = 4 * 32 * 2;
  score.by_sequence = true;
  Waitable<ReadProjectedKeysCall> read;
  const std::vector<uint32_t> some = Ids(5, 20);
  read.block_ids = some;
  sequences_ = {Seq(0, 2, 0), Seq(1, 1, 0)};
  sequences_[1].has_update = true;
  sequences_[1].update = {1, 1, 200, {}};
  Fill(call_, 0, q, &tokens);
  call_.return_lse = true;
  call_.attention.sink_logits = sinks;
  int64_t step = 0;
  // Both sequences grow into blocks that are set aside already.
  const auto serve = [&] {
    for (int i = 0; i < 100; ++i, ++step) {
      sequences_[0].context_tokens = 4002 + step;
      sequences_[1].context_tokens = 1 + step;
      session_->Submit(&call_);
      if (!call_.Wait().ok()) std::abort();
      for (const absl::Status& status : call_.sequence_status) {
        if (!status.ok()) std::abort();
      }
      score.kind = i % 2 == 0 ? ScoreKind::kMass : ScoreKind::kMaxDot;
      score.top_k = i % 2 == 0 ? 1000 : 0;
      session_->Submit(&score);
      if (!score.Wait().ok()) std::abort();
      session_->Submit(&read);
      if (!read.Wait().ok()) std::abort();
    }
  };
  serve();
  EXPECT_EQ(Count(serve), 0);
}

}  // namespace
}  // namespace sluice
