// What a step costs beside its kernels: from the call to the host task that ends it.

#include "tests/bench/cuda/latency.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/ops/ops.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 2000;
constexpr int kWarmup = 200;

struct Done : HostTask {
  void Run() override { at.store(Clock::now().time_since_epoch().count()); }
  std::atomic<int64_t> at{0};
};

// p50 and p99 of the time from `enqueue` to the end of a host task behind it, in us.
template <typename Enqueue>
void Measure(const char* name, Stream& stream, const Enqueue& enqueue) {
  std::vector<double> us;
  for (int i = 0; i < kWarmup + kSteps; ++i) {
    Done done;
    const int64_t start = Clock::now().time_since_epoch().count();
    enqueue();
    stream.Enqueue(&done);
    while (done.at.load() == 0) {
    }
    if (i >= kWarmup) us.push_back(static_cast<double>(done.at.load() - start) / 1e3);
    stream.Synchronize();
  }
  std::sort(us.begin(), us.end());
  std::printf("{\"name\": \"%s\", \"value\": %.2f, \"unit\": \"us\", \"p99\": %.2f}\n", name,
              us[us.size() / 2], us[us.size() * 99 / 100]);
  std::fflush(stdout);
}

Buffer Take(Device& device, MemoryKind kind, int64_t bytes) {
  absl::StatusOr<Buffer> buffer = device.Reserve(kind, bytes);
  if (!buffer.ok() || !device.Commit(*buffer, 0, bytes).ok()) std::abort();
  return *std::move(buffer);
}

}  // namespace

void RunLatency() {
  absl::StatusOr<std::unique_ptr<Device>> created = CreateCudaDevice({});
  if (!created.ok()) {
    std::fprintf(stderr, "%s\n", created.status().ToString().c_str());
    return;
  }
  Device& device = **created;
  Ops& ops = device.ops();
  std::unique_ptr<Stream> stream = device.CreateStream(StreamPriority::kAttention);
  Measure("host task alone", *stream, [] {});
  const Buffer state = Take(device, MemoryKind::kDevice, 1 << 20);
  const BeginParams begin = {
      1,
      1,
      64,
      {reinterpret_cast<float*>(state.data()), reinterpret_cast<float*>(state.data() + 4096),
       reinterpret_cast<float*>(state.data() + 8192)}};
  Measure("smallest kernel", *stream, [&] { ops.BeginStates(begin, *stream); });

  for (const int64_t context : {1024, 8192}) {
    constexpr int kHeads = 8;
    constexpr int kDim = 128;
    constexpr int kRank = 32;
    const KvLayout layout = SlotLayout(DType::kBf16, kHeads, kDim, 16);
    const int64_t slot = SlotBytes(DType::kBf16, kHeads, kDim, 16);
    const int64_t blocks = context / 16;
    const Buffer pool = Take(device, MemoryKind::kDevice, blocks * slot);
    const Buffer projected = Take(device, MemoryKind::kDevice, kHeads * 16 * kRank * 2);
    const Buffer projection = Take(device, MemoryKind::kDevice, kDim * kRank * 2);
    const Buffer host = Take(device, MemoryKind::kHost, 1 << 20);
    std::memset(host.data(), 0, 1 << 20);
    std::vector<const std::byte*> table;
    for (int64_t i = 0; i < blocks; ++i) table.push_back(pool.data() + (i * 7 % blocks) * slot);
    AttendSequence sequence;
    sequence.blocks = table.data();
    sequence.context_tokens = context;
    sequence.query_tokens = 1;
    AttendParams params;
    params.layout = layout;
    params.options.scale = 0.088f;
    params.num_query_heads = 32;
    params.sequences = &sequence;
    params.num_sequences = 1;
    params.num_rows = 1;
    params.q = host.data();
    params.out = host.data() + (512 << 10);
    const Buffer workspace = Take(device, MemoryKind::kDevice, ops.AttendWorkspaceBytes(params));
    params.workspace = workspace.data();
    const TokenCopy copy = {
        pool.data(), host.data() + (64 << 10), host.data() + (96 << 10), 3, 1, 0};
    const ProjectBlock project = {pool.data(), projected.data(), 3, 1};
    const std::string suffix = " 1 x " + std::to_string(context / 1024) + "K";
    Measure(("attend" + suffix).c_str(), *stream, [&] { ops.Attend(params, *stream); });
    Measure(("store, project, attend" + suffix).c_str(), *stream, [&] {
      ops.StoreTokens({layout, &copy, 1}, *stream);
      ops.ProjectKeys({layout, kRank, projection.data(), 0, &project, 1}, *stream);
      ops.Attend(params, *stream);
    });
  }
}

}  // namespace sluice
