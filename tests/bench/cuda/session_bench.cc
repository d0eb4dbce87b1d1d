// Sessions on the GPU without gRPC: what a step takes from Submit to Done, blocks in one tier or
// two, one session beside another, and many at once.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_device.h"
#include "server/base/logging.h"
#include "server/session/session.h"
#include "server/session/session_manager.h"
#include "tests/bench/bench.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBlockTokens = 16;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kQueryHeads = 32;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kSlotBytes = 64 << 10;
constexpr int kSamples = 9;
// Allows no slot: all of a session's blocks are in host memory.
constexpr int64_t kNoHbm = 1;

template <typename C>
class Waitable : public C {
 public:
  void Done() override { done_.store(true, std::memory_order_release); }
  void Wait() {
    while (!done_.load(std::memory_order_acquire)) {
    }
    done_.store(false, std::memory_order_relaxed);
    OrDie(this->status());
  }

 private:
  std::atomic<bool> done_{false};
};

// One device and manager for all rows, and pinned memory with random K and V.
class Gpu {
 public:
  static Gpu& Get() {
    static Gpu* const gpu = new Gpu();
    return *gpu;
  }
  SessionManager& manager() { return *manager_; }
  // K or V of up to 1,024 blocks.
  TensorView Content(int64_t num_blocks) const {
    return {content_.data(), num_blocks * kSlotBytes / 2, true, DType::kBf16, {}};
  }

 private:
  Gpu() {
    SetLogLevel(LogLevel::kWarning);
    CudaDeviceOptions options;
    options.hbm_budget_bytes = int64_t{40} << 30;
    device_ = OrDie(CreateCudaDevice(options));
    SessionManagerOptions manager;
    manager.hbm_budget_bytes = options.hbm_budget_bytes;
    manager.host_budget_bytes = int64_t{8} << 30;
    manager_ = OrDie(SessionManager::Create(manager, device_.get()));
    constexpr int64_t kBytes = 1024 * kSlotBytes / 2;
    content_ = OrDie(device_->Reserve(MemoryKind::kHost, kBytes));
    OrDie(device_->Commit(content_, 0, kBytes));
    std::mt19937 random(1);
    auto* bits = reinterpret_cast<uint16_t*>(content_.data());
    // BF16 of either sign between 1/4 and 2.
    for (int64_t i = 0; i < kBytes / 2; ++i) {
      bits[i] = static_cast<uint16_t>((random() & 0x8000) | (0x3e80 + random() % 0x180));
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<SessionManager> manager_;
  Buffer content_;
};

// A session of one layer with sequences of equal context, all blocks stored.
class Scheduler {
 public:
  // `hbm_bytes`: of its blocks; 0: as many as there is room for.
  Scheduler(const std::string& name, int64_t num_sequences, int64_t context_tokens,
            int64_t hbm_bytes = 0) {
    const int64_t sequence_blocks = (context_tokens + kBlockTokens - 1) / kBlockTokens;
    SessionSpec spec;
    spec.name = name;
    spec.num_layers = 1;
    spec.num_query_heads = kQueryHeads;
    spec.num_kv_heads = kKvHeads;
    spec.head_dim = kHeadDim;
    spec.block_tokens = kBlockTokens;
    spec.rank = 32;
    spec.max_blocks = num_sequences * sequence_blocks;
    spec.max_sequences = num_sequences;
    spec.hbm_budget_bytes = hbm_bytes;
    const auto opened = OrDie(Gpu::Get().manager().Open(spec));
    epoch_ = opened.info.epoch;
    session_ = OrDie(Gpu::Get().manager().Find(name, epoch_));

    // Ids are shuffled, so that a sequence's blocks lie in no order.
    std::vector<uint32_t> ids(spec.max_blocks);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(2));
    for (size_t first = 0; first < ids.size(); first += 1024) {
      const size_t count = std::min<size_t>(1024, ids.size() - first);
      std::vector<OffloadBlock> blocks;
      for (size_t i = 0; i < count; ++i) blocks.push_back({0, ids[first + i], 0, ""});
      Waitable<OffloadCall> offload;
      offload.blocks = blocks;
      offload.k = offload.v = Gpu::Get().Content(static_cast<int64_t>(count));
      session_->Offload(&offload);
      offload.Wait();
    }
    // A sequence has every num_sequences-th of the blocks in order of storing: where HBM holds half
    // of them, it holds half of each sequence's.
    for (int64_t s = 0; s < num_sequences; ++s) {
      std::vector<uint32_t> table;
      for (int64_t i = 0; i < sequence_blocks; ++i) table.push_back(ids[i * num_sequences + s]);
      const auto id = static_cast<uint32_t>(s);
      OrDie(session_->PutSequence({id, 1, 0, table}).status());
      DecodeSequence sequence;
      sequence.sequence_id = id;
      sequence.context_tokens = context_tokens;
      sequences_.push_back(sequence);
    }
    q_.resize(num_sequences * kQueryHeads * kHeadDim, 0x3e00);
    kv_.resize(num_sequences * kKvHeads * kHeadDim, 0x3e00);
    call_.sequences = sequences_;
    call_.q = View(q_);
  }
  ~Scheduler() {
    std::atomic<bool> closed{false};
    Gpu::Get().manager().Close(session_->spec().name, epoch_, false,
                               [&](const absl::StatusOr<int64_t>&) { closed = true; });
    while (!closed) std::this_thread::yield();
  }

  // With every sequence's newest token written again first.
  void Append() {
    call_.k = View(kv_);
    call_.v = View(kv_);
  }
  void Submit() { session_->Submit(&call_); }
  void Wait() { call_.Wait(); }
  double StepUs() {
    const auto begin = Clock::now();
    Submit();
    Wait();
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }
  std::vector<double> StepsUs(int count) {
    std::vector<double> us;
    for (int i = 0; i < count; ++i) us.push_back(StepUs());
    return us;
  }
  const StepStats& stats() const { return call_.stats; }

 private:
  static TensorView View(const std::vector<uint16_t>& bits) {
    return {reinterpret_cast<const std::byte*>(bits.data()),
            static_cast<int64_t>(bits.size()) * 2,
            true,
            DType::kBf16,
            {}};
  }

  uint64_t epoch_ = 0;
  std::shared_ptr<Session> session_;
  std::vector<DecodeSequence> sequences_;
  std::vector<uint16_t> q_, kv_;
  Waitable<DecodeCall> call_;
};

// The device chain of one step, from Submit to Done: what gRPC comes on top of.
BENCH(session_step) {
  for (const int64_t context : {1024, 8192}) {
    Scheduler scheduler("step", 1, context);
    scheduler.Append();
    scheduler.StepsUs(500);
    bench.Report(absl::StrCat("session_step/p50/1x", context / 1024, "K"), "us", kSamples,
                 [&] { return Percentile(scheduler.StepsUs(1000), 50); });
    bench.Report(absl::StrCat("session_step/p99/1x", context / 1024, "K"), "us", kSamples,
                 [&] { return Percentile(scheduler.StepsUs(1000), 99); });
  }
}

// Half of the blocks in HBM and half in host memory, against the host half alone.
BENCH(session_mixed_tiers) {
  struct Row {
    int64_t num_sequences, context_tokens;
  };
  for (const Row& row : {Row{1, 32'768}, Row{8, 8192}}) {
    const int64_t half_bytes =
        row.num_sequences * row.context_tokens / 2 / kBlockTokens * kSlotBytes;
    Scheduler mixed("mixed", row.num_sequences, row.context_tokens, half_bytes);
    Scheduler host("host", row.num_sequences, row.context_tokens / 2, kNoHbm);
    mixed.StepsUs(20);
    if (mixed.stats().hbm_blocks != mixed.stats().host_blocks) std::abort();
    bench.Report(
        absl::StrCat("session_mixed_tiers/", row.num_sequences, "x", row.context_tokens / 1024,
                     "K"),
        "us", kSamples, [&] { return Percentile(mixed.StepsUs(30), 50); },
        [&] { return Percentile(host.StepsUs(30), 50); });
  }
}

// p99 of an 8K step in HBM, alone and beside a session whose 128K context lies in host memory.
BENCH(session_beside_host) {
  Scheduler fast("fast", 1, 8192);
  Scheduler slow("slow", 1, 131'072, kNoHbm);
  fast.StepsUs(500);
  std::atomic<bool> run{false}, end{false};
  std::thread other([&] {
    while (!end) {
      if (run) {
        slow.StepUs();
      } else {
        std::this_thread::yield();
      }
    }
  });
  for (const int percent : {50, 99}) {
    bench.Report(
        absl::StrCat("session_beside_host/8K_p", percent), "us", kSamples,
        [&] {
          run = true;
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          const double us = Percentile(fast.StepsUs(1000), percent);
          run = false;
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          return us;
        },
        [&] { return Percentile(fast.StepsUs(1000), percent); });
  }
  end = true;
  other.join();
}

// 64 sessions, each with a step over 8K always on its way, against one batch of 64: sequences a
// second.
BENCH(session_many) {
  constexpr int64_t kSessions = 64;
  constexpr int64_t kContext = 8192;
  constexpr std::chrono::milliseconds kTime(300);
  std::vector<std::unique_ptr<Scheduler>> sessions;
  for (int64_t i = 0; i < kSessions; ++i) {
    sessions.push_back(std::make_unique<Scheduler>(absl::StrCat("many-", i), 1, kContext));
  }
  Scheduler batch("batch", kSessions, kContext);
  batch.StepsUs(20);
  for (const int num_threads : {1, 2, 4, 8}) {
    // A thread hands in a step of each of its sessions, then waits for them in order.
    const auto all = [&] {
      std::atomic<int64_t> steps{0};
      std::atomic<bool> end{false};
      std::vector<std::thread> threads;
      const auto begin = Clock::now();
      for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
          while (!end) {
            for (int64_t i = t; i < kSessions; i += num_threads) sessions[i]->Submit();
            for (int64_t i = t; i < kSessions; i += num_threads) {
              sessions[i]->Wait();
              ++steps;
            }
          }
        });
      }
      std::this_thread::sleep_for(kTime);
      end = true;
      for (std::thread& thread : threads) thread.join();
      return static_cast<double>(steps) /
             std::chrono::duration<double>(Clock::now() - begin).count();
    };
    bench.Report(absl::StrCat("session_many/64x8K/threads_", num_threads), "sequences/s", 5, all,
                 [&] { return kSessions / Percentile(batch.StepsUs(100), 50) * 1e6; });
  }
}

}  // namespace
}  // namespace sluice
