// A manager over the CPU device, calls that can be waited for, and float64 references.

#ifndef TESTS_SESSION_SESSION_FIXTURE_H_
#define TESTS_SESSION_SESSION_FIXTURE_H_

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/ops/float16.h"
#include "server/base/error.h"
#include "server/session/session.h"
#include "server/session/session_manager.h"

namespace sluice {

// A call of type C that a test can wait for.
template <typename C>
class Waitable : public C {
 public:
  void Done() override {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    wake_.notify_all();
  }
  const absl::Status& Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return done_; });
    done_ = false;
    return this->status();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
};

using Bits = std::vector<uint16_t>;  // BF16

inline TensorView View(const Bits& bits) {
  return {reinterpret_cast<const std::byte*>(bits.data()), std::ssize(bits) * 2, true, DType::kBf16,
          {}};
}

// K and V of one layer, token by token, as the scheduler has them.
struct Tokens {
  Bits k, v;  // [tokens, kv_heads, head_dim]
};

class SessionFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = CreateCpuDevice({.num_threads = 2});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    MakeManager({});
  }
  void TearDown() override {
    session_.reset();
    manager_.reset();
  }

  void MakeManager(SessionManagerOptions options) {
    manager_.reset();
    if (options.hbm_budget_bytes == 0) options.hbm_budget_bytes = int64_t{1} << 30;
    if (options.host_budget_bytes == 0) options.host_budget_bytes = int64_t{1} << 30;
    options.now = [this] { return absl::Now() + clock_offset_; };
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
      blocks.push_back({layer, first_block + static_cast<uint32_t>(i),
                        static_cast<uint32_t>(valid), ""});
    }
    Waitable<OffloadCall> call;
    call.blocks = blocks;
    call.k = View(padded.k);
    call.v = View(padded.v);
    call.predict = predict;
    session_->Offload(&call);
    return call.Wait();
  }

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
        for (int64_t i = 0; i < d; ++i) dot += double{FloatFromBf16(query[i])} * FloatFromBf16(key[i]);
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
  absl::Duration clock_offset_ = absl::ZeroDuration();
  std::unique_ptr<Device> device_;
  std::unique_ptr<SessionManager> manager_;
  std::shared_ptr<Session> session_;
  uint64_t epoch_ = 0;
};

#define EXPECT_REASON(status, want_code, want_reason)          \
  do {                                                         \
    const absl::Status sluice_seen = (status);                 \
    EXPECT_EQ(sluice_seen.code(), want_code) << sluice_seen;   \
    EXPECT_EQ(ReasonOf(sluice_seen), want_reason) << sluice_seen; \
  } while (false)

}  // namespace sluice

#endif  // TESTS_SESSION_SESSION_FIXTURE_H_
