// The CUDA kernels against what reading the same bytes takes. Each line is JSON: name, value, unit,
// ceiling, ratio; a table comes last.
//
//   cuda_bench [NAME]     only rows whose name contains NAME
//   cuda_bench --serve    times decode cases as it is told to (flashinfer_bench.py)
//
// A row and its ceiling run in turn, as graphs of equally many launches over inputs that rotate
// through at least 1 GiB; both are the median of kRounds.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/op_kernels.h"
#include "tests/bench/cuda/latency.h"

namespace {

using namespace sluice;        // NOLINT
using namespace sluice::cuda;  // NOLINT

constexpr int kRounds = 11;
constexpr int64_t kRotationBytes = int64_t{1} << 30;

void Check(cudaError_t error, const char* what, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%d: %s: %s\n", line, what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK_CUDA(expression) Check(expression, #expression, __LINE__)

__global__ void FillKernel(uint4* data, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t word[4];
    for (int j = 0; j < 4; ++j) {
      uint32_t x = static_cast<uint32_t>(i * 4 + j) * 2654435761u + seed;
      x ^= x >> 16;
      x *= 0x85ebca6bu;
      x ^= x >> 13;
      // BF16 pairs of magnitude 2^-2 .. 2.
      word[j] = (x & 0x807f807fu) | 0x3e803e80u | ((x >> 3) & 0x01000100u);
    }
    data[i] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Reads the pieces in order of the table, a block of threads a piece at a time.
template <int kUnroll>
__global__ void ReadKernel(const uint4* const* pieces, int64_t num_pieces, int64_t piece_words,
                           uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t parts = piece_words / (int64_t{blockDim.x} * kUnroll);
  for (int64_t i = blockIdx.x; i < num_pieces * parts; i += gridDim.x) {
    const uint4* at = pieces[i / parts] + i % parts * blockDim.x * kUnroll + threadIdx.x;
    uint4 x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x[j] = __ldg(at + j * int64_t{blockDim.x});
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

struct Array {
  std::byte* data = nullptr;
  Array(int64_t bytes, bool host = false) {
    void* pointer = nullptr;
    CHECK_CUDA(host ? cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped)
                    : cudaMalloc(&pointer, bytes));
    data = static_cast<std::byte*>(pointer);
    is_host = host;
  }
  Array(const Array&) = delete;
  ~Array() { CHECK_CUDA(is_host ? cudaFreeHost(data) : cudaFree(data)); }
  bool is_host;
};

cudaStream_t stream;
int num_sms;

// A graph of what `enqueue` puts on the stream; timed by events.
class Graph {
 public:
  explicit Graph(const std::function<void(int)>& enqueue, int launches) : launches_(launches) {
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) enqueue(i);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
    Time();
  }
  Graph(const Graph&) = delete;
  ~Graph() { CHECK_CUDA(cudaGraphExecDestroy(exec_)); }
  // Microseconds of one launch.
  double Time() {
    CHECK_CUDA(cudaEventRecord(begin_, stream));
    CHECK_CUDA(cudaGraphLaunch(exec_, stream));
    CHECK_CUDA(cudaEventRecord(end_, stream));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return 1e3 * ms / launches_;
  }

 private:
  int launches_;
  cudaGraphExec_t exec_;
  cudaEvent_t begin_, end_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Line {
  std::string name;
  double bytes, us, ceiling_us;
};
std::vector<Line> lines;
std::string filter;

bool Wanted(const std::string& name) { return name.find(filter) != std::string::npos; }

// Times `rows` and the candidates for the ceiling in turn; the best candidate is the ceiling.
void Report(const std::vector<std::string>& names, double bytes,
            const std::vector<std::unique_ptr<Graph>>& rows,
            const std::vector<std::unique_ptr<Graph>>& ceilings) {
  std::vector<std::vector<double>> row_us(rows.size()), ceiling_us(ceilings.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < ceilings.size(); ++i) ceiling_us[i].push_back(ceilings[i]->Time());
    for (size_t i = 0; i < rows.size(); ++i) row_us[i].push_back(rows[i]->Time());
  }
  double best = 1e30;
  for (const auto& us : ceiling_us) best = std::min(best, Median(us));
  for (size_t i = 0; i < rows.size(); ++i) {
    lines.push_back({names[i], bytes, Median(row_us[i]), best});
    const Line& line = lines.back();
    std::printf(
        "{\"name\": \"%s\", \"value\": %.2f, \"unit\": \"us\", \"bytes\": %.0f, "
        "\"ceiling\": %.2f, \"ratio\": %.3f}\n",
        line.name.c_str(), line.us, bytes, best, best / line.us);
    std::fflush(stdout);
  }
}

std::vector<std::unique_ptr<Graph>> ReadGraphs(const std::vector<const uint4* const*>& tables,
                                               int64_t num_pieces, int64_t piece_bytes,
                                               int launches, uint32_t* sink, bool host = false) {
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const int threads : {256, 512, 1024}) {
    for (const int per_sm : {1, 2, 4, 8}) {
      if (threads * per_sm > 2048) continue;
      if (host && per_sm > 2) continue;
      const auto add = [&](auto kernel) {
        graphs.push_back(std::make_unique<Graph>(
            [&](int i) {
              kernel<<<num_sms * per_sm, threads, 0, stream>>>(tables[i % tables.size()],
                                                               num_pieces, piece_bytes / 16, sink);
            },
            launches));
      };
      if (piece_bytes % (16 * threads * 4) == 0) add(ReadKernel<4>);
      if (piece_bytes % (16 * threads * 8) == 0) add(ReadKernel<8>);
      if (piece_bytes % (16 * threads * 2) == 0) add(ReadKernel<2>);
    }
  }
  return graphs;
}

struct DecodeCase {
  int batch;
  int64_t context;
  int group = 4;
  int block_tokens = 16;
  int query_tokens = 1;
  bool host = false;
};

// One call's q, tables, outputs, workspace and arrays.
struct DecodeInput {
  std::vector<const std::byte*> table;
  std::vector<AttendSequence> sequences;
  AttendPlan plan;
  AttendParams params;
  std::unique_ptr<AttendCall> call;
  std::unique_ptr<Array> arrays;
};

// The inputs of a case, each in as many sets as rotate through kRotationBytes, and its graph.
class Decode {
 public:
  explicit Decode(const DecodeCase& c)
      : slot_bytes(SlotBytes(DType::kBf16, kHeads, kDim, c.block_tokens)),
        blocks(c.batch * c.context / c.block_tokens),
        bytes(blocks * slot_bytes),
        sets(c.host ? 1 : static_cast<int>(std::max<int64_t>(1, kRotationBytes / bytes))),
        launches(c.host ? 2 : std::max(sets, 8)),
        pool_(sets * bytes, c.host),
        q_(QueryBytes(c)),
        out_(QueryBytes(c)),
        inputs_(sets) {
    FillKernel<<<1024, 256, 0, stream>>>(reinterpret_cast<uint4*>(pool_.data), sets * bytes / 16,
                                         1);
    FillKernel<<<64, 256, 0, stream>>>(reinterpret_cast<uint4*>(q_.data), QueryBytes(c) / 16, 2);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    std::vector<int64_t> order(sets * blocks);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(1);
    std::shuffle(order.begin(), order.end(), random);
    for (int s = 0; s < sets; ++s) Fill(c, order.data() + s * blocks, inputs_[s]);
    // A copy from pageable memory may still be on its way when cudaMemcpy returns, and the stream
    // does not wait for it by itself.
    CHECK_CUDA(cudaDeviceSynchronize());
    graph = std::make_unique<Graph>(
        [&](int i) { CHECK_CUDA(inputs_[i % sets].call->Launch(stream)); }, launches);
  }

  const int64_t slot_bytes;
  const int64_t blocks;
  const int64_t bytes;
  const int sets;
  const int launches;
  std::vector<const uint4* const*> tables;  // block addresses on the GPU, of each set
  std::unique_ptr<Graph> graph;

 private:
  static constexpr int kHeads = 8;
  static constexpr int kDim = 128;
  static int64_t QueryBytes(const DecodeCase& c) {
    return int64_t{c.batch} * c.query_tokens * kHeads * c.group * kDim * 2;
  }

  void Fill(const DecodeCase& c, const int64_t* order, DecodeInput& input) {
    for (int64_t i = 0; i < blocks; ++i) {
      input.table.push_back(pool_.data + order[i] * slot_bytes);
    }
    for (int i = 0; i < c.batch; ++i) {
      AttendSequence sequence;
      sequence.blocks = input.table.data() + i * (c.context / c.block_tokens);
      sequence.context_tokens = c.context;
      sequence.host_blocks = c.host ? c.context / c.block_tokens : 0;
      sequence.first_row = int64_t{i} * c.query_tokens;
      sequence.query_tokens = c.query_tokens;
      input.sequences.push_back(sequence);
    }
    AttendParams& params = input.params;
    params.layout = SlotLayout(DType::kBf16, kHeads, kDim, c.block_tokens);
    params.options.scale = 0.088f;
    params.num_query_heads = kHeads * c.group;
    params.sequences = input.sequences.data();
    params.num_sequences = c.batch;
    params.num_rows = int64_t{c.batch} * c.query_tokens;
    params.q = q_.data;
    params.out = out_.data;
    if (workspace_ == nullptr) {
      workspace_ = std::make_unique<Array>(AttendWorkspaceBytes(params));
    }
    params.workspace = workspace_->data;
    input.call = std::make_unique<AttendCall>(&input.plan, params, num_sms);
    const int64_t upload_bytes = std::max<int64_t>(input.call->upload_bytes(), 16);
    input.arrays = std::make_unique<Array>(upload_bytes);
    std::vector<std::byte> packed(upload_bytes);
    input.call->Fill(packed.data(), input.arrays->data);
    CHECK_CUDA(cudaMemcpy(input.arrays->data, packed.data(), upload_bytes, cudaMemcpyHostToDevice));
    table_arrays_.push_back(std::make_unique<Array>(8 * blocks));
    CHECK_CUDA(cudaMemcpy(table_arrays_.back()->data, input.table.data(), 8 * blocks,
                          cudaMemcpyHostToDevice));
    tables.push_back(reinterpret_cast<const uint4* const*>(table_arrays_.back()->data));
  }

  Array pool_, q_, out_;
  std::unique_ptr<Array> workspace_;
  std::vector<DecodeInput> inputs_;
  std::vector<std::unique_ptr<Array>> table_arrays_;
};

void ReportDecode(const DecodeCase& c) {
  char name[128];
  std::snprintf(name, sizeof(name), "decode %d x %lldK gqa %d block %d q %d%s", c.batch,
                static_cast<long long>(c.context / 1024), c.group, c.block_tokens, c.query_tokens,
                c.host ? " host" : "");
  if (!Wanted(name)) return;
  Decode decode(c);
  const Array sink(256);
  std::vector<std::unique_ptr<Graph>> row;
  row.push_back(std::move(decode.graph));
  Report({name}, static_cast<double>(decode.bytes), row,
         ReadGraphs(decode.tables, decode.blocks, decode.slot_bytes, decode.launches,
                    reinterpret_cast<uint32_t*>(sink.data), c.host));
}

// Reads cases from standard input, a line each: batch, context, group, block_tokens. Answers
// "ready", then each line "time" with the microseconds of one launch, until another line ends the
// case.
void Serve() {
  std::string line;
  while (std::getline(std::cin, line)) {
    DecodeCase c;
    if (!(std::istringstream(line) >> c.batch >> c.context >> c.group >> c.block_tokens)) continue;
    Decode decode(c);
    std::cout << "ready" << std::endl;
    while (std::getline(std::cin, line) && line == "time") {
      std::cout << decode.graph->Time() << std::endl;
    }
  }
}

void Score(ScoreKind kind, int64_t top_k) {
  const std::string name = std::string("score 1M tokens rank 32 ") +
                           (kind == ScoreKind::kMass ? "mass" : "max_dot") + " top " +
                           std::to_string(top_k);
  if (!Wanted(name)) return;
  constexpr int kHeads = 8;
  constexpr int kRank = 32;
  constexpr int64_t kBlocks = 65'536;
  constexpr int64_t kBlockBytes = kHeads * 16 * kRank * 2;
  Array pool(2 * kBlocks * kBlockBytes);
  FillKernel<<<1024, 256, 0, stream>>>(reinterpret_cast<uint4*>(pool.data),
                                       2 * kBlocks * kBlockBytes / 16, 1);
  Array q(32 * 128 * 2), p(128 * kRank * 2), scores(4 * kBlocks), top(8 * kBlocks), sink(256);
  FillKernel<<<16, 256, 0, stream>>>(reinterpret_cast<uint4*>(q.data), 32 * 128 * 2 / 16, 2);
  FillKernel<<<16, 256, 0, stream>>>(reinterpret_cast<uint4*>(p.data), 128 * kRank * 2 / 16, 3);
  std::vector<int64_t> order(2 * kBlocks);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(1);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Array>> keep;
  std::vector<ScoreParams> calls;
  std::vector<const uint4* const*> tables;
  for (int s = 0; s < 2; ++s) {
    std::vector<ScoreBlock> blocks;
    std::vector<const std::byte*> table;
    for (int64_t i = 0; i < kBlocks; ++i) {
      table.push_back(pool.data + order[s * kBlocks + i] * kBlockBytes);
      blocks.push_back({table.back(), 16});
    }
    keep.push_back(std::make_unique<Array>(kBlocks * 16));
    CHECK_CUDA(cudaMemcpy(keep.back()->data, blocks.data(), kBlocks * 16, cudaMemcpyHostToDevice));
    ScoreParams params;
    params.kind = kind;
    params.num_query_heads = 32;
    params.num_kv_heads = kHeads;
    params.head_dim = 128;
    params.block_tokens = 16;
    params.rank = kRank;
    params.scale = 0.1f;
    params.projection = p.data;
    params.q = q.data;
    params.blocks = reinterpret_cast<const ScoreBlock*>(keep.back()->data);
    params.num_blocks = kBlocks;
    params.scores = reinterpret_cast<float*>(scores.data);
    params.top = reinterpret_cast<int64_t*>(top.data);
    params.top_k = top_k;
    keep.push_back(std::make_unique<Array>(ScoreWorkspaceBytes(params)));
    params.workspace = keep.back()->data;
    calls.push_back(params);
    keep.push_back(std::make_unique<Array>(kBlocks * 8));
    CHECK_CUDA(cudaMemcpy(keep.back()->data, table.data(), kBlocks * 8, cudaMemcpyHostToDevice));
    tables.push_back(reinterpret_cast<const uint4* const*>(keep.back()->data));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<std::unique_ptr<Graph>> row;
  CHECK_CUDA(LaunchScore(calls[0], stream));
  row.push_back(
      std::make_unique<Graph>([&](int i) { CHECK_CUDA(LaunchScore(calls[i % 2], stream)); }, 4));
  std::vector<std::unique_ptr<Graph>> ceilings;
  Report({name}, static_cast<double>(kBlocks * kBlockBytes), row,
         ReadGraphs(tables, kBlocks, kBlockBytes, 4, reinterpret_cast<uint32_t*>(sink.data)));
}

__global__ void EmptyKernel() {}

// How soon the host can learn of a kernel's end: two ways that the device does not take.
void RunWays() {
  if (!Wanted("latency")) return;
  using Clock = std::chrono::steady_clock;
  constexpr int kSteps = 2000;
  std::vector<double> event_us, function_us, wait_us;
  cudaEvent_t event;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  };
  for (int i = 0; i < kSteps; ++i) {
    Clock::time_point start = Clock::now();
    EmptyKernel<<<1, 32, 0, stream>>>();
    CHECK_CUDA(cudaEventRecord(event, stream));
    while (cudaEventQuery(event) == cudaErrorNotReady) {
    }
    event_us.push_back(since(start));
    std::atomic<bool> done{false};
    start = Clock::now();
    EmptyKernel<<<1, 32, 0, stream>>>();
    CHECK_CUDA(cudaLaunchHostFunc(
        stream, [](void* flag) { static_cast<std::atomic<bool>*>(flag)->store(true); }, &done));
    while (!done.load()) {
    }
    function_us.push_back(since(start));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    start = Clock::now();
    EmptyKernel<<<1, 32, 0, stream>>>();
    CHECK_CUDA(cudaStreamSynchronize(stream));
    wait_us.push_back(since(start));
  }
  std::printf("{\"name\": \"empty kernel, event polled\", \"value\": %.2f, \"unit\": \"us\"}\n",
              Median(event_us));
  std::printf(
      "{\"name\": \"empty kernel, cudaLaunchHostFunc\", \"value\": %.2f, \"unit\": \"us\"}\n",
      Median(function_us));
  std::printf("{\"name\": \"empty kernel, synchronize\", \"value\": %.2f, \"unit\": \"us\"}\n",
              Median(wait_us));
}

}  // namespace

int main(int argc, char** argv) {
  const bool serve = argc > 1 && std::string(argv[1]) == "--serve";
  if (argc > 1 && !serve) filter = argv[1];
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  num_sms = properties.multiProcessorCount;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (serve) {
    Serve();
    return 0;
  }
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d}\n", properties.name, num_sms);
  for (const DecodeCase& c : std::vector<DecodeCase>{{64, 8192},
                                                     {8, 32'768},
                                                     {16, 8192},
                                                     {1, 131'072},
                                                     {64, 1024},
                                                     {1, 8192},
                                                     {1, 1024},
                                                     {64, 8192, 1},
                                                     {64, 8192, 8},
                                                     {64, 8192, 4, 64},
                                                     {1, 8192, 4, 64},
                                                     {64, 8192, 4, 16, 4},
                                                     {1, 32'768, 4, 16, 1, true},
                                                     {8, 8192, 4, 16, 1, true}}) {
    ReportDecode(c);
  }
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    for (const int64_t top_k : {0, 1024}) Score(kind, top_k);
  }
  RunWays();
  if (Wanted("latency")) sluice::RunLatency();
  std::printf("\n%-48s %10s %10s %10s %8s\n", "row", "us", "ceiling us", "GB/s", "ratio");
  for (const Line& line : lines) {
    std::printf("%-48s %10.2f %10.2f %10.0f %8.3f\n", line.name.c_str(), line.us, line.ceiling_us,
                line.bytes / line.us / 1e3, line.ceiling_us / line.us);
  }
  return 0;
}
