// What the daemon adds to a DecodeStep: its p50, less that of an echo of the same bytes over the
// same gRPC, less the time on the device. Prints one JSON line for each shape:
//
//   bazel run //tests/rpc:step_latency

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "server/base/logging.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

constexpr int kRounds = 9;
constexpr int kCallsPerRound = 400;
constexpr double kAimUs = 40;

using Attention = v1::AttentionService;

// Answers with bytes that it was given beforehand.
class Echo final : public Attention::WithRawCallbackMethod_DecodeStep<Attention::Service> {
 public:
  explicit Echo(const std::string& reply) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    const grpc::Slice slice(reply);
    reply_ = grpc::ByteBuffer(&slice, 1);
    server_ = builder.BuildAndStart();
  }
  grpc::ServerUnaryReactor* DecodeStep(grpc::CallbackServerContext* call, const grpc::ByteBuffer*,
                                       grpc::ByteBuffer* reply) override {
    *reply = reply_;
    grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  int port() const { return port_; }

 private:
  grpc::ByteBuffer reply_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Shape {
  int num_sequences;
  uint32_t num_query_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  int64_t context_tokens;
};

void Measure(const Shape& shape) {
  Daemon daemon;
  v1::SessionSpec spec = SmallSpec("a");
  spec.set_num_layers(1);
  spec.set_num_query_heads(shape.num_query_heads);
  spec.set_num_kv_heads(shape.num_kv_heads);
  spec.set_head_dim(shape.head_dim);
  spec.set_max_sequences(64);
  const int64_t blocks = (shape.context_tokens + 15) / 16;
  spec.set_max_blocks(static_cast<uint32_t>(blocks * shape.num_sequences));
  Model model(spec, daemon.Open(spec));
  std::vector<std::pair<uint32_t, int64_t>> contexts;
  for (int i = 0; i < shape.num_sequences; ++i) {
    std::vector<uint32_t> ids;
    v1::PutSequenceRequest put;
    *put.mutable_session() = model.handle;
    put.mutable_update()->set_sequence_id(static_cast<uint32_t>(i));
    put.mutable_update()->set_generation(1);
    for (int64_t b = 0; b < blocks; ++b) {
      ids.push_back(static_cast<uint32_t>(i * blocks + b));
      put.mutable_update()->add_block_ids(ids.back());
    }
    v1::OffloadBlocksResponse stored;
    v1::PutSequenceResponse put_response;
    Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks, model.Offload(0, ids), &stored);
    Invoke(*daemon.sequence, &v1::SequenceService::Stub::PutSequence, put, &put_response);
    contexts.emplace_back(i, shape.context_tokens);
  }
  const v1::DecodeStepRequest request = model.Step(0, contexts, /*write=*/true);
  v1::DecodeStepResponse response;
  if (!Invoke(*daemon.attention, &Attention::Stub::DecodeStep, request, &response).ok()) abort();
  Echo echo(response.SerializeAsString());
  const auto echo_stub = Attention::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", echo.port()), grpc::InsecureChannelCredentials()));
  std::vector<double> extra_us, step_us, echo_us, device_us;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> step, echoed, device;
    for (int i = 0; i < kCallsPerRound; ++i) {
      absl::Time start = absl::Now();
      Invoke(*daemon.attention, &Attention::Stub::DecodeStep, request, &response);
      step.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
      device.push_back(static_cast<double>(response.stats().device_us()));
      start = absl::Now();
      Invoke(*echo_stub, &Attention::Stub::DecodeStep, request, &response);
      echoed.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    }
    step_us.push_back(Median(step));
    echo_us.push_back(Median(echoed));
    device_us.push_back(Median(device));
    extra_us.push_back(step_us.back() - echo_us.back() - device_us.back());
  }
  std::printf(
      "{\"name\":\"decode_step_added_us/sequences=%d/heads=%u:%u/head_dim=%u/context=%ld\","
      "\"value\":%.1f,\"unit\":\"us\",\"ceiling\":%.1f,\"ratio\":%.2f,\"step_us\":%.1f,"
      "\"echo_us\":%.1f,\"device_us\":%.1f}\n",
      shape.num_sequences, shape.num_query_heads, shape.num_kv_heads, shape.head_dim,
      static_cast<long>(shape.context_tokens), Median(extra_us), kAimUs, Median(extra_us) / kAimUs,
      Median(step_us), Median(echo_us), Median(device_us));
}

}  // namespace
}  // namespace sluice

int main() {
  sluice::SetLogLevel(sluice::LogLevel::kWarning);
  sluice::Measure({1, 4, 2, 32, 60});
  sluice::Measure({1, 32, 8, 128, 256});
  sluice::Measure({16, 32, 8, 128, 64});
  return 0;
}
