// The CPU device's kernels against what its workers can read or multiply.

#include <time.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/pool.h"
#include "kernels/ops/ops.h"
#include "kernels/ops/projection.h"
#include "tests/bench/bench.h"
#include "tests/bench/cpu_ceilings.h"

namespace sluice {
namespace {

constexpr int kSamples = 9;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kBlockTokens = 16;
constexpr int kRank = 32;
constexpr int64_t kSlot = SlotBytes(DType::kBf16, kKvHeads, kHeadDim, kBlockTokens);

std::atomic<uint32_t> sink{0};

template <class Work>
double ProcessorSeconds(const Work& work) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  const double begin = now();
  work();
  return now() - begin;
}

// A device, and 512 MiB of blocks in shuffled order: larger than any cache.
struct Pool {
  Pool() : device(*CreateCpuDevice({})) {
    stream = device->CreateStream(StreamPriority::kAttention);
    buffer = *device->Reserve(MemoryKind::kHost, kBlocks * kSlot);
    if (!device->Commit(buffer, 0, buffer.bytes()).ok()) std::abort();
    std::mt19937_64 random(1);
    auto* values = reinterpret_cast<uint16_t*>(buffer.data());
    // BF16 between 0.5 and 2 with either sign.
    for (int64_t i = 0; i < kBlocks * kSlot / 2; i += 4) {
      uint64_t bits = random();
      for (int j = 0; j < 4; ++j, bits >>= 16) values[i + j] = (bits & 0x80ff) | 0x3f00;
    }
    for (int64_t i = 0; i < kBlocks; ++i) blocks.push_back(buffer.data() + i * kSlot);
    std::shuffle(blocks.begin(), blocks.end(), random);
  }

  // Bytes per second of `op` that reads or writes `bytes`.
  template <class Op>
  double GigabytesPerSecond(const Op& op, int64_t bytes) {
    const double seconds = Seconds([&] {
      CpuStream::From(*stream).Submit(op);
      stream->Synchronize();
    });
    return static_cast<double>(bytes) / seconds / 1e9;
  }
  // The best of several ways to read.
  double ReadCeiling(const std::vector<const std::byte*>& pieces, int64_t piece_bytes,
                     int64_t pieces_per_unit) {
    double best = 0;
    const auto count = static_cast<int64_t>(pieces.size());
    for (const int ahead : {0, 1}) {
      best = std::max(best, GigabytesPerSecond(ReadOp{pieces.data(), count, piece_bytes,
                                                      pieces_per_unit, ahead, &sink},
                                               count * piece_bytes));
    }
    return best;
  }

  static constexpr int64_t kBlocks = (int64_t{512} << 20) / kSlot;
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
  Buffer buffer;
  std::vector<const std::byte*> blocks;
};

// Bytes of K and V for each second of multiply-adds.
double MultiplyAddCeiling(Pool& pool, int group) {
  const MultiplyAddOp op = {group, 1 << 16, 32, &sink};
  return pool.GigabytesPerSecond(op, op.iterations * op.units * MultiplyAddElements() * 2);
}

void AttendCase(Bench& bench, Pool& pool, int64_t num_sequences, int group) {
  const int64_t context = Pool::kBlocks * kBlockTokens / num_sequences;
  const int heads = kKvHeads * group;
  std::vector<AttendSequence> sequences;
  std::vector<const std::byte*> pieces;  // as attention goes: chunk, kv head, K and V of its blocks
  for (int64_t i = 0; i < num_sequences; ++i) {
    sequences.push_back({pool.blocks.data() + i * context / kBlockTokens, context, i, 1, true});
    for (int64_t begin = 0; begin < context; begin += kChunkTokens) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int64_t t = begin; t < std::min(begin + kChunkTokens, context); t += kBlockTokens) {
          const std::byte* block = sequences[i].blocks[t / kBlockTokens];
          pieces.push_back(block + head * kSlot / 2 / kKvHeads);
          pieces.push_back(block + kSlot / 2 + head * kSlot / 2 / kKvHeads);
        }
      }
    }
  }
  std::vector<uint16_t> q(num_sequences * heads * kHeadDim, 0x3e00), out(q.size());
  AttendParams params;
  params.layout = SlotLayout(DType::kBf16, kKvHeads, kHeadDim, kBlockTokens);
  params.options.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  params.num_query_heads = heads;
  params.sequences = sequences.data();
  params.num_sequences = num_sequences;
  params.num_rows = num_sequences;
  params.q = reinterpret_cast<std::byte*>(q.data());
  params.out = reinterpret_cast<std::byte*>(out.data());
  std::vector<std::byte> workspace(pool.device->ops().AttendWorkspaceBytes(params));
  params.workspace = workspace.data();
  const std::string name = "attend_cpu/gqa" + std::to_string(group) + "/" +
                           std::to_string(num_sequences) + "x" + std::to_string(context);
  bench.Report(
      name, "GB/s", kSamples,
      [&] {
        return Pool::kBlocks * kSlot / 1e9 / Seconds([&] {
                 pool.device->ops().Attend(params, *pool.stream);
                 pool.stream->Synchronize();
               });
      },
      [&] {
        const double read =
            pool.ReadCeiling(pieces, kSlot / 2 / kKvHeads, 2 * kChunkTokens / kBlockTokens);
        return std::min(read, MultiplyAddCeiling(pool, group));
      });
}

BENCH(attend_cpu) {
  Pool pool;
  for (const int group : {1, 4}) {
    for (const int64_t sequences : {16, 1}) AttendCase(bench, pool, sequences, group);
  }
}

// Spins until it is opened, or says that it has been reached.
struct Flag : HostTask {
  explicit Flag(bool wait_in) : wait(wait_in) {}
  void Run() override {
    if (!wait) at.store(true, std::memory_order_release);
    while (!at.load(std::memory_order_acquire)) {
    }
  }
  const bool wait;
  std::atomic<bool> at{false};
};

// Median time from the start of what `enqueue` puts on the stream to a host task behind it.
template <class EnqueueWork>
double ChainMicroseconds(Stream& stream, const EnqueueWork& enqueue, bool awake) {
  std::vector<double> seconds;
  for (int i = 0; i < 101; ++i) {
    Flag start(true), done(false);
    const auto work = [&] {
      enqueue();
      stream.Enqueue(&done);
    };
    if (awake) {
      stream.Enqueue(&start);
      work();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    seconds.push_back(Seconds([&] {
      if (awake) {
        start.at.store(true, std::memory_order_release);
      } else {
        work();
      }
      while (!done.at.load(std::memory_order_acquire)) {
      }
    }));
    stream.Synchronize();
  }
  std::nth_element(seconds.begin(), seconds.begin() + 50, seconds.end());
  return seconds[50] * 1e6;
}

// A step over little context is all overhead: the chain of a decode step, on one stream.
BENCH(chain_cpu) {
  Pool pool;
  constexpr int kGroup = 4;
  const KvLayout layout = SlotLayout(DType::kBf16, kKvHeads, kHeadDim, kBlockTokens);
  std::vector<uint16_t> wire(2 * kKvHeads * kHeadDim, 0x3f80), p(kHeadDim * kRank);
  std::vector<uint16_t> projected(kKvHeads * kBlockTokens * kRank);
  FillGaussianProjection(1, kHeadDim, kRank, p.data());
  auto* block = const_cast<std::byte*>(pool.blocks[0]);
  const TokenCopy copy = {block,
                          reinterpret_cast<std::byte*>(wire.data()),
                          reinterpret_cast<std::byte*>(wire.data() + kKvHeads * kHeadDim),
                          15,
                          1,
                          0};
  const ProjectBlock project = {block, reinterpret_cast<std::byte*>(projected.data()), 15, 1};
  const AttendSequence sequence = {pool.blocks.data(), 16, 0, 1, true};
  std::vector<uint16_t> q(kKvHeads * kGroup * kHeadDim, 0x3e00), out(q.size());
  AttendParams attend;
  attend.layout = layout;
  attend.options.scale = 0.1f;
  attend.num_query_heads = kKvHeads * kGroup;
  attend.sequences = &sequence;
  attend.num_sequences = 1;
  attend.num_rows = 1;
  attend.q = reinterpret_cast<std::byte*>(q.data());
  attend.out = reinterpret_cast<std::byte*>(out.data());
  std::vector<std::byte> workspace(pool.device->ops().AttendWorkspaceBytes(attend));
  attend.workspace = workspace.data();
  Ops& ops = pool.device->ops();
  const auto step = [&] {
    ops.StoreTokens({layout, &copy, 1}, *pool.stream);
    ops.ProjectKeys({layout, kRank, reinterpret_cast<std::byte*>(p.data()), 0, &project, 1},
                    *pool.stream);
    ops.Attend(attend, *pool.stream);
  };
  const auto nothing = [&] {
    for (int i = 0; i < 3; ++i) ops.StoreTokens({layout, nullptr, 0}, *pool.stream);
  };
  const auto none = [] {};
  // From Enqueue on an idle device, the wake-up of a worker included.
  bench.Report("chain_cpu/wake_and_host_task", "us", kSamples,
               [&] { return ChainMicroseconds(*pool.stream, none, false); });
  bench.Report("chain_cpu/wake_and_16_token_step", "us", kSamples,
               [&] { return ChainMicroseconds(*pool.stream, step, false); });
  // With the worker awake already: what the chain itself takes.
  bench.Report("chain_cpu/awake_host_task", "us", kSamples,
               [&] { return ChainMicroseconds(*pool.stream, none, true); });
  bench.Report("chain_cpu/awake_3_empty_ops", "us", kSamples,
               [&] { return ChainMicroseconds(*pool.stream, nothing, true); });
  bench.Report("chain_cpu/awake_16_token_step", "us", kSamples,
               [&] { return ChainMicroseconds(*pool.stream, step, true); });
}

BENCH(project_cpu) {
  Pool pool;
  std::vector<uint16_t> p(kHeadDim * kRank),
      projected(Pool::kBlocks * kSlot / 2 / kHeadDim * kRank);
  FillGaussianProjection(1, kHeadDim, kRank, p.data());
  std::vector<ProjectBlock> work;
  const int64_t per_block = 2 * kKvHeads * kBlockTokens * kRank;
  for (int64_t i = 0; i < Pool::kBlocks; ++i) {
    work.push_back({pool.blocks[i], reinterpret_cast<std::byte*>(projected.data()) + i * per_block,
                    0, kBlockTokens});
  }
  ProjectKeysParams params;
  params.layout = SlotLayout(DType::kBf16, kKvHeads, kHeadDim, kBlockTokens);
  params.rank = kRank;
  params.projection = reinterpret_cast<std::byte*>(p.data());
  params.blocks = work.data();
  params.num_blocks = Pool::kBlocks;
  // Keys for each second of processor time, so that what else runs on the machine does not count;
  // the ceiling is the aim, 0.5 GB/s for each core.
  bench.Report(
      "project_cpu/rank32_per_core", "GB/s", kSamples,
      [&] {
        return Pool::kBlocks * kSlot / 2 / 1e9 / ProcessorSeconds([&] {
                 pool.device->ops().ProjectKeys(params, *pool.stream);
                 pool.stream->Synchronize();
               });
      },
      [] { return 0.5; });
}

void ScoreCase(Bench& bench, Pool& pool, ScoreKind kind, int group, const std::string& name) {
  // The pool's bytes serve as A_g; blocks of 8 KiB, shuffled.
  const int64_t per_block = 2 * kKvHeads * kBlockTokens * kRank;
  const int64_t num_blocks = Pool::kBlocks * kSlot / per_block;
  std::vector<const std::byte*> pieces;
  for (int64_t i = 0; i < num_blocks; ++i) pieces.push_back(pool.buffer.data() + i * per_block);
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937_64(2));
  std::vector<ScoreBlock> blocks;
  for (const std::byte* piece : pieces) blocks.push_back({piece, kBlockTokens});
  std::vector<uint16_t> p(kHeadDim * kRank), q(kKvHeads * group * kHeadDim, 0x3e00);
  FillGaussianProjection(1, kHeadDim, kRank, p.data());
  std::vector<float> scores(num_blocks);
  ScoreParams params;
  params.kind = kind;
  params.num_query_heads = kKvHeads * group;
  params.num_kv_heads = kKvHeads;
  params.head_dim = kHeadDim;
  params.block_tokens = kBlockTokens;
  params.rank = kRank;
  params.scale = 0.1f;
  params.projection = reinterpret_cast<std::byte*>(p.data());
  params.q = reinterpret_cast<std::byte*>(q.data());
  params.blocks = blocks.data();
  params.num_blocks = num_blocks;
  params.scores = scores.data();
  std::vector<std::byte> workspace(pool.device->ops().ScoreWorkspaceBytes(params));
  params.workspace = workspace.data();
  bench.Report(
      name, "GB/s", kSamples,
      [&] {
        return num_blocks * per_block / 1e9 / Seconds([&] {
                 pool.device->ops().ScoreBlocks(params, *pool.stream);
                 pool.stream->Synchronize();
               });
      },
      [&] { return pool.ReadCeiling(pieces, per_block, 16); });
}

BENCH(score_cpu) {
  Pool pool;
  for (const int group : {1, 4}) {
    const std::string gqa = "/gqa" + std::to_string(group);
    ScoreCase(bench, pool, ScoreKind::kMaxDot, group, "score_cpu/max_dot" + gqa);
    ScoreCase(bench, pool, ScoreKind::kMass, group, "score_cpu/mass" + gqa);
  }
}

}  // namespace
}  // namespace sluice
