// A manager over the device that the program links (device_under_test.h), calls that can be waited
// for, and float64 references.
//
// With SLUICE_TEST_STRICT_DEVICE in the environment the device is strict about memory, as a GPU is
// (tests/base/strict_device.h).

#ifndef TESTS_SESSION_SESSION_FIXTURE_H_
#define TESTS_SESSION_SESSION_FIXTURE_H_

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/float16.h"
#include "kernels/ops/projection.h"
#include "server/base/error.h"
#include "server/session/session.h"
#include "server/session/session_manager.h"
#include "tests/base/device_under_test.h"
#include "tests/base/test_device.h"
#include "tests/session/waitable.h"

namespace sluice {

using Bits = std::vector<uint16_t>;  // BF16

inline TensorView View(const Bits& bits) {
  return {reinterpret_cast<const std::byte*>(bits.data()),
          std::ssize(bits) * 2,
          true,
          DType::kBf16,
          {}};
}

// K and V of one layer, token by token, as the scheduler has them.
struct Tokens {
  Bits k, v;  // [tokens, kv_heads, head_dim]
  friend bool operator==(const Tokens&, const Tokens&) = default;
};

// What ReadProjectedKeysCall gives.
struct ProjectedKeys {
  Bits rows;  // [blocks, kv_heads, block_tokens, rank]
  std::vector<uint8_t> predicted;
  std::vector<uint32_t> valid_tokens;
};

// How far apart two BF16 numbers are, counted in representable ones.
inline int64_t Bf16UlpsApart(uint16_t a, uint16_t b) {
  const auto place = [](uint16_t bits) -> int64_t {
    return (bits & 0x8000) != 0 ? -int64_t{bits & 0x7fff} : int64_t{bits};
  };
  return std::abs(place(a) - place(b));
}

// How far the manager's clock is ahead; its threads read it.
class TestClockOffset {
 public:
  TestClockOffset& operator=(absl::Duration offset) {
    offset_ns_ = absl::ToInt64Nanoseconds(offset);
    return *this;
  }
  TestClockOffset& operator+=(absl::Duration offset) { return *this = get() + offset; }
  absl::Duration get() const { return absl::Nanoseconds(offset_ns_.load()); }

 private:
  std::atomic<int64_t> offset_ns_{0};
};

class SessionFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    // Two workers for the work, two for gates to hold.
    device_ = std::make_unique<TestDevice>(CreateDeviceUnderTest(4),
                                           std::getenv("SLUICE_TEST_STRICT_DEVICE") != nullptr);
    MakeManager({});
  }
  void TearDown() override {
    session_.reset();
    manager_.reset();
  }

  // The bytes given back, or why not.
  absl::StatusOr<int64_t> CloseSession(const std::string& name, uint64_t epoch, bool keep_data) {
    struct Outcome {
      std::mutex mutex;
      std::condition_variable wake;
      bool done = false;
      absl::StatusOr<int64_t> freed_bytes;
    };
    const auto outcome = std::make_shared<Outcome>();
    manager_->Close(name, epoch, keep_data, [outcome](absl::StatusOr<int64_t> freed_bytes) {
      std::lock_guard<std::mutex> lock(outcome->mutex);
      outcome->freed_bytes = std::move(freed_bytes);
      outcome->done = true;
      outcome->wake.notify_all();
    });
    std::unique_lock<std::mutex> lock(outcome->mutex);
    outcome->wake.wait(lock, [&] { return outcome->done; });
    return outcome->freed_bytes;
  }

  void MakeManager(SessionManagerOptions options) {
    session_.reset();
    manager_.reset();
    if (options.hbm_budget_bytes == 0) options.hbm_budget_bytes = int64_t{1} << 30;
    if (options.host_budget_bytes == 0) options.host_budget_bytes = int64_t{1} << 30;
    // Blocks lie in host memory on every device, unless a test is about tiers.
    if (options.hbm_block_budget_bytes < 0) options.hbm_block_budget_bytes = 0;
    options.now = [this] { return absl::Now() + clock_offset_.get(); };
    auto manager = SessionManager::Create(options, device_.get());
    ASSERT_TRUE(manager.ok()) << manager.status();
    manager_ = *std::move(manager);
  }

  static SessionSpec SmallSpec() {
    SessionSpec spec;
    spec.name = "test";
    spec.num_layers = 2;
    spec.num_query_heads = 4;
    spec.num_kv_heads = 2;
    spec.head_dim = 32;
    spec.block_tokens = 4;
    spec.rank = 8;
    spec.projection_seed = 7;
    spec.max_blocks = 64;
    spec.max_sequences = 8;
    return spec;
  }

  // Opens `spec` as session_.
  void Open(const SessionSpec& spec) {
    auto opened = manager_->Open(spec);
    ASSERT_TRUE(opened.ok()) << opened.status();
    epoch_ = opened->info.epoch;
    auto session = manager_->Find(opened->info.name, epoch_);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *session;
    if (opened->attached) return;
    const auto last = device_->streams().end();
    attention_stream_ = last[-3];
    ingest_stream_ = last[-2];
    fetch_stream_ = last[-1];
  }

  Bits RandomBits(int64_t count, float amplitude = 1.0f) {
    std::normal_distribution<float> normal(0.0f, amplitude);
    Bits bits(count);
    for (uint16_t& b : bits) b = Bf16FromFloat(normal(random_));
    return bits;
  }
  Tokens RandomTokens(int64_t tokens) {
    const int64_t count = tokens * session_->spec().num_kv_heads * session_->spec().head_dim;
    return {RandomBits(count), RandomBits(count)};
  }

  // Offloads tokens as blocks first_block, first_block + 1, ... of a layer.
  absl::Status OffloadTokens(uint32_t layer, uint32_t first_block, const Tokens& tokens,
                             PredictMode predict = PredictMode::kRequired) {
    const SessionSpec& spec = session_->spec();
    const int64_t row = spec.num_kv_heads * spec.head_dim;
    const int64_t num_tokens = std::ssize(tokens.k) / row;
    const int64_t num_blocks = (num_tokens + spec.block_tokens - 1) / spec.block_tokens;
    Tokens padded = tokens;
    padded.k.resize(num_blocks * spec.block_tokens * row, 0x7fc0);
    padded.v.resize(num_blocks * spec.block_tokens * row, 0x7fc0);
    std::vector<OffloadBlock> blocks;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t valid = std::min(spec.block_tokens, num_tokens - i * spec.block_tokens);
      blocks.push_back(
          {layer, first_block + static_cast<uint32_t>(i), static_cast<uint32_t>(valid), ""});
    }
    return OffloadBlocks(blocks, padded, predict);
  }
  // `wire` holds whole blocks, in order.
  absl::Status OffloadBlocks(const std::vector<OffloadBlock>& blocks, const Tokens& wire,
                             PredictMode predict = PredictMode::kRequired,
                             OffloadResult* result = nullptr) {
    Waitable<OffloadCall> call;
    call.blocks = blocks;
    call.k = View(wire.k);
    call.v = View(wire.v);
    call.predict = predict;
    session_->Offload(&call);
    const absl::Status status = call.Wait();
    if (result != nullptr) *result = call.result;
    return status;
  }

  // Whole blocks, as the wire has them; `info` optional.
  absl::StatusOr<Tokens> Fetch(uint32_t layer, const std::vector<uint32_t>& ids,
                               std::vector<BlockInfo>* info = nullptr) {
    Tokens wire = RandomTokens(std::ssize(ids) * session_->spec().block_tokens);
    Waitable<FetchCall> call;
    call.layer = layer;
    call.block_ids = ids;
    call.k = reinterpret_cast<std::byte*>(wire.k.data());
    call.v = reinterpret_cast<std::byte*>(wire.v.data());
    session_->Fetch(&call);
    if (const absl::Status status = call.Wait(); !status.ok()) return status;
    if (info != nullptr) *info = call.info;
    return wire;
  }

  absl::StatusOr<ProjectedKeys> ReadProjected(uint32_t layer, const std::vector<uint32_t>& ids) {
    Waitable<ReadProjectedKeysCall> call;
    call.layer = layer;
    call.block_ids = ids;
    session_->Submit(&call);
    if (const absl::Status status = call.Wait(); !status.ok()) return status;
    ProjectedKeys keys;
    keys.rows.resize(call.projected_keys.size() / 2);
    std::memcpy(keys.rows.data(), call.projected_keys.data(), call.projected_keys.size());
    keys.predicted.assign(call.predicted.begin(), call.predicted.end());
    keys.valid_tokens.assign(call.valid_tokens.begin(), call.valid_tokens.end());
    return keys;
  }

  // P of the session, [head_dim, rank].
  std::vector<double> Projection() const {
    const SessionSpec& spec = session_->spec();
    Bits bits(spec.head_dim * spec.rank);
    FillGaussianProjection(spec.projection_seed, static_cast<int>(spec.head_dim),
                           static_cast<int>(spec.rank), bits.data());
    std::vector<double> p(bits.size());
    for (size_t i = 0; i < bits.size(); ++i) p[i] = FloatFromBf16(bits[i]);
    return p;
  }
  // x P for one row of head_dim.
  std::vector<double> Project(const uint16_t* x, const std::vector<double>& p) const {
    const SessionSpec& spec = session_->spec();
    std::vector<double> projected(spec.rank);
    for (int64_t r = 0; r < spec.rank; ++r) {
      for (int64_t i = 0; i < spec.head_dim; ++i) {
        projected[r] += FloatFromBf16(x[i]) * p[i * spec.rank + r];
      }
    }
    return projected;
  }
  // A_g of one block within 1 ulp of the float64 projection of its first `valid` tokens, zero
  // behind them.
  void ExpectProjected(const ProjectedKeys& keys, int64_t index, const uint16_t* k,
                       int64_t valid) const {
    const SessionSpec& spec = session_->spec();
    const std::vector<double> p = Projection();
    ASSERT_TRUE(keys.predicted[index]);
    ASSERT_EQ(keys.valid_tokens[index], valid);
    for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
      for (int64_t t = 0; t < spec.block_tokens; ++t) {
        const uint16_t* row =
            &keys.rows[((index * spec.num_kv_heads + head) * spec.block_tokens + t) * spec.rank];
        const auto expected = Project(k + (t * spec.num_kv_heads + head) * spec.head_dim, p);
        for (int64_t r = 0; r < spec.rank; ++r) {
          const uint16_t want = t < valid ? Bf16FromDouble(expected[r]) : 0;
          ASSERT_LE(Bf16UlpsApart(row[r], want), t < valid ? 1 : 0)
              << "block " << index << " head " << head << " token " << t << " rank " << r;
        }
      }
    }
  }

  Bits RandomQ(int64_t rows) {
    return RandomBits(rows * session_->spec().num_query_heads * session_->spec().head_dim);
  }
  // The tokens [begin, end) of `tokens`.
  Tokens Slice(const Tokens& tokens, int64_t begin, int64_t end) const {
    const int64_t row = session_->spec().num_kv_heads * session_->spec().head_dim;
    return {Bits(tokens.k.begin() + begin * row, tokens.k.begin() + end * row),
            Bits(tokens.v.begin() + begin * row, tokens.v.begin() + end * row)};
  }
  BlockInfo Describe(uint32_t layer, uint32_t block_id) const {
    auto info = session_->DescribeBlocks(
        {absl::MakeConstSpan(&layer, 1), absl::MakeConstSpan(&block_id, 1)});
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() ? (*info)[0] : BlockInfo();
  }
  // Done runs before its stream counts the work as complete; until then what was replaced waits in
  // limbo.
  void WaitUntilQuiet() {
    for (Stream* stream : {attention_stream_, ingest_stream_, fetch_stream_}) stream->Synchronize();
  }
  int64_t HostBytes() const { return manager_->MemoryUsage()[1].used_bytes; }
  int64_t DeviceBytes() const { return manager_->MemoryUsage()[0].used_bytes; }
  MemoryItem Item(absl::string_view name) const {
    for (const MemoryItem& item : session_->Info().memory) {
      if (item.name == name) return item;
    }
    ADD_FAILURE() << "no memory item " << name;
    return {};
  }

  // A step of one sequence; the call stays for inspection.
  absl::Status Step(uint32_t layer, DecodeSequence sequence, const Bits& q, const Tokens* tokens) {
    sequences_ = {sequence};
    return Step(layer, q, tokens);
  }
  absl::Status Step(uint32_t layer, const Bits& q, const Tokens* tokens) {
    Fill(call_, layer, q, tokens);
    session_->Submit(&call_);
    return call_.Wait();
  }
  void Fill(DecodeCall& call, uint32_t layer, const Bits& q, const Tokens* tokens) {
    call.layer = layer;
    call.sequences = sequences_;
    call.q = View(q);
    call.k = tokens == nullptr ? TensorView() : View(tokens->k);
    call.v = tokens == nullptr ? TensorView() : View(tokens->v);
  }
  static DecodeSequence Seq(uint32_t id, uint32_t query_tokens, int64_t context_tokens) {
    DecodeSequence sequence;
    sequence.sequence_id = id;
    sequence.query_tokens = query_tokens;
    sequence.context_tokens = context_tokens;
    return sequence;
  }
  static std::string Bytes(absl::Span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string Out() const { return Bytes(call_.out); }

  absl::Status Put(uint32_t id, uint64_t generation, uint32_t base,
                   const std::vector<uint32_t>& blocks) {
    return session_->PutSequence({id, generation, base, blocks}).status();
  }

  static std::vector<uint32_t> Ids(uint32_t first, uint32_t count) {
    std::vector<uint32_t> ids(count);
    for (uint32_t i = 0; i < count; ++i) ids[i] = first + i;
    return ids;
  }

  // float64 attention of one query row over tokens [begin, context): out [heads, head_dim].
  std::vector<double> Reference(const Bits& q, int64_t row, const Tokens& tokens,
                                int64_t context) const {
    const SessionSpec& spec = session_->spec();
    const int64_t d = spec.head_dim;
    const int64_t group = spec.num_query_heads / spec.num_kv_heads;
    std::vector<double> out(spec.num_query_heads * d);
    for (int64_t h = 0; h < spec.num_query_heads; ++h) {
      const uint16_t* query = &q[(row * spec.num_query_heads + h) * d];
      std::vector<double> logits(context);
      double top = -std::numeric_limits<double>::infinity();
      for (int64_t t = 0; t < context; ++t) {
        const uint16_t* key = &tokens.k[(t * spec.num_kv_heads + h / group) * d];
        double dot = 0;
        for (int64_t i = 0; i < d; ++i)
          dot += double{FloatFromBf16(query[i])} * FloatFromBf16(key[i]);
        logits[t] = dot / std::sqrt(static_cast<double>(d));
        top = std::max(top, logits[t]);
      }
      double sum = 0;
      for (double& x : logits) sum += x = std::exp(x - top);
      for (int64_t t = 0; t < context; ++t) {
        const uint16_t* value = &tokens.v[(t * spec.num_kv_heads + h / group) * d];
        for (int64_t i = 0; i < d; ++i) out[h * d + i] += logits[t] / sum * FloatFromBf16(value[i]);
      }
    }
    return out;
  }

  // Within 2 BF16 ulp or 1e-3.
  static void ExpectNear(absl::Span<const std::byte> out, int64_t row,
                         const std::vector<double>& expected) {
    const auto* bits = reinterpret_cast<const uint16_t*>(out.data());
    for (size_t i = 0; i < expected.size(); ++i) {
      const double value = FloatFromBf16(bits[row * std::ssize(expected) + i]);
      const double tolerance = std::max(1e-3, std::abs(expected[i]) * 2 / 128);
      ASSERT_NEAR(value, expected[i], tolerance) << "row " << row << " element " << i;
    }
  }

  std::mt19937 random_{12345};
  TestClockOffset clock_offset_;
  std::unique_ptr<TestDevice> device_;
  std::unique_ptr<SessionManager> manager_;
  std::shared_ptr<Session> session_;
  uint64_t epoch_ = 0;
  // Of the session that was opened last.
  Stream* attention_stream_ = nullptr;
  Stream* ingest_stream_ = nullptr;
  Stream* fetch_stream_ = nullptr;

  std::vector<DecodeSequence> sequences_;
  Waitable<DecodeCall> call_;
};

inline ::testing::AssertionResult HasReason(const absl::Status& status, absl::StatusCode code,
                                            absl::string_view reason) {
  if (status.code() == code && ReasonOf(status) == reason) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status << ", not " << code << " " << reason << "\n";
}
#define EXPECT_REASON(status, code, reason) EXPECT_TRUE(HasReason(status, code, reason))

}  // namespace sluice

#endif  // TESTS_SESSION_SESSION_FIXTURE_H_
