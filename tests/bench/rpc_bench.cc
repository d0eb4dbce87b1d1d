// The daemon over loopback, beside a server that moves the same bytes and does nothing with them.
//
// Daemon and echo server are processes of their own, as in use; this process is the scheduler.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "client/decode.h"
#include "client/offload.h"
#include "client/tensor.h"
#include "tests/bench/bench.h"
#include "tests/bench/raw_rpc.h"
#include "tests/client/daemon_process.h"

namespace sluice {
namespace {

using client::DaemonProcess;

constexpr int kSamples = 9;

// A program that lies beside this one; else where Bazel puts it, as its sources are: from
// bin/tests/bench/PROGRAM to bin/PATH.
std::string Program(const std::string& path) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto beside = folder / std::filesystem::path(path).filename();
  if (std::filesystem::exists(beside)) return beside;
  return folder.parent_path().parent_path() / path;
}

std::vector<uint16_t> RandomBits(int64_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits(count);
  for (uint16_t& element : bits) element = client::FloatToBf16(normal(generator));
  return bits;
}

// The demo's model.
v1::SessionSpec DemoSpec() {
  v1::SessionSpec spec;
  spec.set_name("bench");
  spec.set_num_layers(30);
  spec.set_num_query_heads(9);
  spec.set_num_kv_heads(3);
  spec.set_head_dim(64);
  spec.set_block_tokens(16);
  spec.set_max_blocks(64);
  return spec;
}

constexpr int64_t kBlockTokens = 16;

// A daemon with one sequence of 16 tokens in one block, and room for one more; and a step over it.
struct DecodeSetup {
  DecodeSetup()
      : daemon({"--log_level=error"}, Program("server/sluiced")),
        echo_server({}, Program("tests/bench/echo_server")),
        echo(echo_server.address()),
        daemon_client(OrDie(client::Client::Create({.address = daemon.address()}))),
        session(OrDie(daemon_client.OpenSession(DemoSpec()))),
        step(session) {
    client::OffloadBatch prompt(session);
    for (uint32_t layer = 0; layer < session.spec().num_layers(); ++layer)
      prompt.AddBlock(layer, 0);
    const std::vector<uint16_t> kv =
        RandomBits(session.spec().num_layers() * session.block_elements());
    prompt.SetKv(kv, kv);
    OrDie(session.OffloadBlocks(prompt).status());
    OrDie(session.PutSequence(0, 1, 0, {0, 1}).status());
    step.AddSequence(0, kBlockTokens);
    step.SetQ(RandomBits(9 * 64));
  }

  // Adds a token's K and V, always of the same position: the context does not grow.
  void AppendToken() {
    step.mutable_sequence(0)->set_context_tokens(kBlockTokens + 1);
    step.SetKv(RandomBits(3 * 64), RandomBits(3 * 64));
  }
  std::string StepBytes() { return step.mutable_request()->SerializeAsString(); }

  DaemonProcess daemon;
  DaemonProcess echo_server;
  RawEcho echo;
  client::Client daemon_client;
  client::Session session;
  client::DecodeBatch step;
};

// Microseconds of each of `count` calls.
template <typename Call>
std::vector<double> TimesUs(int count, const Call& call) {
  std::vector<double> times;
  times.reserve(count);
  for (int i = 0; i < count; ++i) times.push_back(Seconds(call) * 1e6);
  return times;
}

BENCH(rpc_decode_step) {
  constexpr int kCalls = 400;
  DecodeSetup setup;
  const std::string bytes = setup.StepBytes();
  std::vector<double> device_us;
  const auto step_p50 = [&] {
    device_us.clear();
    return Percentile(TimesUs(kCalls,
                              [&] {
                                OrDie(setup.session.DecodeStep(&setup.step));
                                OrDie(setup.step.FirstSequenceError());
                                device_us.push_back(
                                    static_cast<double>(setup.step.response().stats().device_us()));
                              }),
                      50);
  };
  const auto echo_p50 = [&] {
    return Percentile(TimesUs(kCalls, [&] { setup.echo.Unary(bytes); }), 50);
  };
  // The ceiling of a time is the least that it can be: here, an echo of the request.
  bench.Report("rpc_decode_step/p50/context16", "us", kSamples, step_p50, echo_p50);
  bench.Report("rpc_decode_step/device_p50/context16", "us", kSamples,
               [&] { return step_p50(), Percentile(device_us, 50); });
  bench.Report("rpc_decode_step/p50_less_echo_and_device/context16", "us", kSamples, [&] {
    const double echo = echo_p50();
    const double step = step_p50();
    return step - echo - Percentile(device_us, 50);
  });
}

BENCH(rpc_decode_stream) {
  constexpr int kTokens = 100;
  DecodeSetup setup;
  setup.AppendToken();
  const std::string bytes = setup.StepBytes();
  const uint32_t num_layers = setup.session.spec().num_layers();
  client::DecodeStream stream = setup.session.OpenDecodeStream();
  const auto token = [&] {
    for (uint32_t layer = 0; layer < num_layers; ++layer) {
      setup.step.set_layer(layer);
      OrDie(stream.Send(layer, &setup.step));
      OrDie(OrDie(stream.Receive(&setup.step)).status);
      OrDie(setup.step.FirstSequenceError());
    }
  };
  const auto echoes = [&] {
    for (uint32_t layer = 0; layer < num_layers; ++layer) setup.echo.Stream(bytes);
  };
  for (const int percent : {50, 99}) {
    bench.Report(
        "rpc_decode_stream/token_of_30_layers/p" + std::to_string(percent), "us", kSamples,
        [&] { return Percentile(TimesUs(kTokens, token), percent); },
        [&] { return Percentile(TimesUs(kTokens, echoes), percent); });
  }
  OrDie(stream.Finish());
}

// Blocks of 64 KiB: 8 kv heads of 128, 16 tokens.
v1::SessionSpec BulkSpec(uint32_t num_layers, uint32_t max_blocks) {
  v1::SessionSpec spec;
  spec.set_name("bench");
  spec.set_num_layers(num_layers);
  spec.set_num_query_heads(8);
  spec.set_num_kv_heads(8);
  spec.set_head_dim(128);
  spec.set_block_tokens(kBlockTokens);
  spec.set_max_blocks(max_blocks);
  return spec;
}

constexpr int64_t kBulkBlockBytes = int64_t{64} << 10;

// Sends `num_batches` batches, each of the next ids of a ring of `ring_blocks`.
void Offload(const client::Session& session, client::OffloadBatch& batch, int num_batches,
             uint32_t ring_blocks) {
  client::OffloadWriter writer = session.OffloadStream({});
  uint32_t next_id = 0;
  for (int i = 0; i < num_batches; ++i) {
    for (v1::OffloadBlock& block : *batch.mutable_request()->mutable_blocks()) {
      block.set_block_id(next_id);
      next_id = (next_id + 1) % ring_blocks;
    }
    OrDie(writer.Write(&batch).status());
  }
  OrDie(writer.Finish());
}

BENCH(rpc_offload) {
  constexpr int kBatchBlocks = 128;  // 8 MiB
  constexpr int kBatches = 64;       // 512 MiB a sample
  constexpr uint32_t kRingBlocks = 4096;
  DaemonProcess daemon({"--log_level=error"}, Program("server/sluiced"));
  DaemonProcess sink({}, Program("tests/bench/echo_server"));
  const client::Client daemon_client = OrDie(client::Client::Create({.address = daemon.address()}));
  const client::Session session = OrDie(daemon_client.OpenSession(BulkSpec(1, 2 * kRingBlocks)));
  const client::Session sink_session =
      OrDie(client::Client::Create({.address = sink.address()})).UseSession(session.info());
  client::OffloadBatch batch(session);
  for (uint32_t i = 0; i < kBatchBlocks; ++i) batch.AddBlock(0, i);
  const std::vector<uint16_t> kv = RandomBits(kBatchBlocks * session.block_elements());
  batch.SetKv(kv, kv);
  const auto gb_per_s = [&](const client::Session& to) {
    const double seconds = Seconds([&] { Offload(to, batch, kBatches, kRingBlocks); });
    return static_cast<double>(kBatches * kBatchBlocks * kBulkBlockBytes) / seconds / 1e9;
  };
  for (const bool predict : {true, false}) {
    batch.set_predict(predict ? v1::PREDICT_MODE_REQUIRED : v1::PREDICT_MODE_OFF);
    bench.Report(
        std::string("rpc_offload/inline/predict_") + (predict ? "on" : "off"), "GB/s", kSamples,
        [&] { return gb_per_s(session); }, [&] { return gb_per_s(sink_session); });
  }
}

// Whether the daemon has a GPU; says so where not.
bool HasGpu(const client::Client& client, const char* bench) {
  if (OrDie(client.GetServer()).device().kind() == "cuda") return true;
  std::printf("{\"name\": \"%s\", \"skipped\": \"the daemon has no GPU\"}\n", bench);
  std::fflush(stdout);
  return false;
}

// A sequence of `context_tokens` in blocks of 64 KiB, four query heads a kv head; and a step over
// it that writes its newest token again.
struct LargeStep {
  LargeStep(const client::Client& client, const std::string& name, uint32_t context_tokens)
      : session(OrDie(client.OpenSession(Spec(name, context_tokens)))), step(session) {
    constexpr uint32_t kBatchBlocks = 512;
    const uint32_t num_blocks = session.spec().max_blocks();
    std::vector<uint32_t> ids;
    for (uint32_t id = 0; id < num_blocks; ++id) ids.push_back(id);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    for (uint32_t first = 0; first < num_blocks; first += kBatchBlocks) {
      const uint32_t count = std::min(kBatchBlocks, num_blocks - first);
      client::OffloadBatch batch(session);
      for (uint32_t i = 0; i < count; ++i) batch.AddBlock(0, ids[first + i]);
      const std::vector<uint16_t> kv = RandomBits(count * session.block_elements());
      batch.SetKv(kv, kv);
      OrDie(session.OffloadBlocks(batch).status());
    }
    std::sort(ids.begin(), ids.end());
    OrDie(session.PutSequence(0, 1, 0, ids).status());
    step.AddSequence(0, context_tokens);
    step.SetQ(RandomBits(32 * 128));
    step.SetKv(RandomBits(8 * 128), RandomBits(8 * 128));
  }
  static v1::SessionSpec Spec(const std::string& name, uint32_t context_tokens) {
    v1::SessionSpec spec = BulkSpec(1, context_tokens / kBlockTokens);
    spec.set_name(name);
    spec.set_num_query_heads(32);
    return spec;
  }

  client::Session session;
  client::DecodeBatch step;
};

const std::vector<std::string>& GpuDaemonFlags() {
  static const auto* const flags = new std::vector<std::string>{
      "--log_level=error", "--hbm_budget_bytes=21474836480", "--host_budget_bytes=1073741824"};
  return *flags;
}

// A step over 1,024 tokens in HBM. What the device chain takes without gRPC: session_bench.
BENCH(rpc_gpu_step) {
  constexpr int kCalls = 1000;
  DaemonProcess daemon(GpuDaemonFlags(), Program("server/sluiced"));
  const client::Client client = OrDie(client::Client::Create({.address = daemon.address()}));
  if (!HasGpu(client, "rpc_gpu_step")) return;
  DaemonProcess echo_server({}, Program("tests/bench/echo_server"));
  RawEcho echo(echo_server.address());
  for (const uint32_t context_tokens : {1024, 8192}) {
    LargeStep large(client, "step", context_tokens);
    const std::string bytes = large.step.mutable_request()->SerializeAsString();
    const auto step_p50 = [&] {
      return Percentile(TimesUs(kCalls,
                                [&] {
                                  OrDie(large.session.DecodeStep(&large.step));
                                  OrDie(large.step.FirstSequenceError());
                                }),
                        50);
    };
    const auto echo_p50 = [&] {
      return Percentile(TimesUs(kCalls, [&] { echo.Unary(bytes); }), 50);
    };
    const std::string row = "/1x" + std::to_string(context_tokens / 1024) + "K";
    bench.Report("rpc_gpu_step/p50" + row, "us", kSamples, step_p50, echo_p50);
    bench.Report("rpc_gpu_step/p50_less_echo" + row, "us", kSamples, [&] {
      const double echo_us = echo_p50();
      return step_p50() - echo_us;
    });
    OrDie(large.session.CloseSession(v1::CLOSE_MODE_DELETE_DATA).status());
  }
}

// 64 sessions over 8,192 tokens each, a step of each always on its way: steps a second. What one
// batch of 64 takes without gRPC: session_bench.
BENCH(rpc_gpu_many) {
  constexpr int kSessions = 64;
  constexpr std::chrono::milliseconds kTime(500);
  DaemonProcess daemon(GpuDaemonFlags(), Program("server/sluiced"));
  std::vector<client::Client> clients;
  clients.push_back(OrDie(client::Client::Create({.address = daemon.address()})));
  if (!HasGpu(clients[0], "rpc_gpu_many")) return;
  std::vector<std::unique_ptr<LargeStep>> steps;
  std::vector<client::DecodeStream> streams;
  for (int i = 0; i < kSessions; ++i) {
    clients.push_back(OrDie(client::Client::Create({.address = daemon.address()})));
    steps.push_back(std::make_unique<LargeStep>(clients.back(), "many-" + std::to_string(i), 8192));
    streams.push_back(steps.back()->session.OpenDecodeStream());
  }
  for (const int num_threads : {1, 4, 8}) {
    // A thread sends a step of each of its sessions, then receives the replies in order.
    bench.Report(
        "rpc_gpu_many/64x8K/threads_" + std::to_string(num_threads), "sequences/s", 5, [&] {
          std::atomic<int64_t> replies{0};
          std::atomic<bool> end{false};
          std::vector<std::thread> threads;
          const auto begin = std::chrono::steady_clock::now();
          for (int t = 0; t < num_threads; ++t) {
            threads.emplace_back([&, t] {
              while (!end) {
                for (int i = t; i < kSessions; i += num_threads) {
                  OrDie(streams[i].Send(1, &steps[i]->step));
                }
                for (int i = t; i < kSessions; i += num_threads) {
                  OrDie(OrDie(streams[i].Receive(&steps[i]->step)).status);
                  OrDie(steps[i]->step.FirstSequenceError());
                  ++replies;
                }
              }
            });
          }
          std::this_thread::sleep_for(kTime);
          end = true;
          for (std::thread& thread : threads) thread.join();
          return static_cast<double>(replies) /
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        });
  }
  for (client::DecodeStream& stream : streams) OrDie(stream.Finish());
}

int64_t UsedBytes(const v1::GetUsageResponse& usage, const std::string& name) {
  for (const v1::MemoryItem& item : usage.sessions(0).items()) {
    if (item.name() == name) return item.used_bytes();
  }
  std::fprintf(stderr, "there is no item %s\n", name.c_str());
  std::abort();
}

// What a block costs beside its own bytes and those of its projected keys.
BENCH(rpc_bookkeeping) {
  constexpr uint32_t kLayers = 4;
  constexpr uint32_t kIds = 25000;  // 100,000 blocks
  constexpr uint32_t kBatchBlocks = 10;
  DaemonProcess daemon({"--log_level=error", "--host_budget_bytes=8589934592"},
                       Program("server/sluiced"));
  const client::Client daemon_client = OrDie(client::Client::Create({.address = daemon.address()}));
  const client::Session session =
      OrDie(daemon_client.OpenSession(BulkSpec(kLayers, kIds + kBatchBlocks)));
  client::OffloadBatch batch(session);
  const std::vector<uint16_t> kv = RandomBits(kBatchBlocks * session.block_elements());
  const auto store = [&](uint32_t layer, uint32_t first_id) {
    batch.Clear();
    for (uint32_t i = 0; i < kBatchBlocks; ++i) batch.AddBlock(layer, first_id + i);
    batch.SetKv(kv, kv);
    OrDie(session.OffloadBlocks(batch).status());
  };
  // Buffers of requests and of the allocator reach their size first.
  for (int i = 0; i < 1000; ++i) store(i % kLayers, kIds);
  const auto measure = [&] {
    const int64_t rss = OrDie(daemon_client.GetServer()).rss_bytes();
    const v1::GetUsageResponse usage = OrDie(daemon_client.GetUsage("bench"));
    return static_cast<double>(rss - UsedBytes(usage, "blocks.host") - UsedBytes(usage, "a_g"));
  };
  const double before = measure();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t id = 0; id < kIds; id += kBatchBlocks) store(layer, id);
  }
  const double bytes_per_block = (measure() - before) / (kLayers * kIds);
  constexpr double kLimitBytes = 96;
  std::printf(
      "{\"name\": \"rpc_bookkeeping/rss_per_block\", \"value\": %.4g, \"unit\": \"bytes\", "
      "\"ceiling\": %.4g, \"ratio\": %.3f, \"samples\": 1}\n",
      bytes_per_block, kLimitBytes, bytes_per_block / kLimitBytes);
  std::fflush(stdout);
}

}  // namespace
}  // namespace sluice
