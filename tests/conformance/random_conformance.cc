// Random cases of every operation against float64, from a seed that is printed; SLUICE_SEED=N runs
// the cases of that seed again. Blocks, projected keys and workspaces lie in host memory, in device
// memory or in both; outputs and scratch start as NaN; every case runs twice.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/attend_fixture.h"
#include "tests/conformance/placement.h"
#include "tests/conformance/score_fixture.h"

namespace sluice {
namespace {

class RandomConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(0);
    stream_ = device_->CreateStream(StreamPriority::kAttention);
    const char* given = std::getenv("SLUICE_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::printf("SLUICE_SEED=%llu\n", static_cast<unsigned long long>(seed_));
    RecordProperty("seed", std::to_string(seed_));
    random_.seed(seed_);
  }
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(int one_in) { return Pick(1, one_in) == 1; }
  // None, all, or some of what is placed.
  std::function<bool()> Placement() {
    const int64_t kind = Pick(0, 3);
    if (kind <= 1) return [kind] { return kind == 1; };
    return [this] { return Chance(2); };
  }
  int Count(int thorough) const { return GetParam().thorough ? thorough : thorough / 5; }

  AttendShape RandomAttend() {
    AttendShape shape;
    shape.dtype = Chance(2) ? DType::kBf16 : DType::kFp16;
    shape.head_dim = static_cast<int>(8 * Pick(2, 32));
    shape.num_kv_heads = static_cast<int>(Pick(1, 4));
    shape.group = static_cast<int>(Pick(1, 9));
    shape.block_tokens = 1 << Pick(0, 8);
    shape.paged = Chance(2);
    shape.causal = !Chance(4);
    if (Chance(3)) shape.options.window_tokens = Pick(1, 900);
    if (Chance(3)) shape.options.sink_tokens = Pick(1, 300);
    if (Chance(4)) shape.options.logit_softcap = 3.0f;
    if (Chance(4)) shape.q_factor = 8;
    sinks_.clear();
    if (Chance(4)) {
      for (int h = 0; h < shape.num_kv_heads * shape.group; ++h) {
        sinks_.push_back(static_cast<float>(Pick(-40, 40)) / 10);
      }
      shape.options.sink_logits = sinks_.data();
    }
    shape.sequences.clear();
    for (int64_t j = Pick(1, 4); j > 0; --j) {
      const int query_tokens = static_cast<int>(Chance(4) ? Pick(1, 64) : Pick(1, 5));
      shape.sequences.push_back({Pick(query_tokens, Chance(6) ? 4500 : 900), query_tokens});
    }
    shape.seed = random_();
    return shape;
  }

  // Every score within 1e-4 of float64 on A_g as stored.
  void ExpectScores(const ScoreProblem& problem, ScoreKind kind, float scale) {
    const int heads = problem.num_query_heads();
    std::vector<double> expected(
        problem.shape.num_blocks,
        kind == ScoreKind::kMass ? 0.0 : -std::numeric_limits<double>::infinity());
    for (int h = 0; h < heads; ++h) {
      // With the maximum taken out, as the formula is meant.
      std::vector<std::vector<double>> dots(problem.shape.num_blocks);
      double most = -std::numeric_limits<double>::infinity();
      for (int64_t b = 0; b < problem.shape.num_blocks; ++b) {
        if (problem.blocks[b].projected == nullptr) continue;
        dots[b] = problem.ReferenceDots(b, h);
        for (const double dot : dots[b]) most = std::max(most, dot);
      }
      double total = 0;
      std::vector<double> masses(dots.size(), 0);
      for (size_t b = 0; b < dots.size(); ++b) {
        for (const double dot : dots[b]) {
          masses[b] += std::exp(scale * (dot - most));
          if (kind == ScoreKind::kMaxDot) expected[b] = std::max(expected[b], dot);
        }
        total += masses[b];
      }
      if (kind == ScoreKind::kMaxDot) continue;
      for (size_t b = 0; b < dots.size(); ++b) expected[b] += masses[b] / total / heads;
    }
    for (int64_t b = 0; b < problem.shape.num_blocks; ++b) {
      if (problem.blocks[b].projected == nullptr) {
        ASSERT_EQ(problem.scores[b], -std::numeric_limits<float>::infinity()) << b;
      } else if (kind == ScoreKind::kMaxDot) {
        ASSERT_NEAR(problem.scores[b], expected[b], 1e-4 * (1 + std::abs(expected[b]))) << b;
      } else {
        ASSERT_NEAR(problem.scores[b], expected[b], 2e-4 * expected[b] + 1e-8) << b;
      }
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  std::vector<float> sinks_;
};

TEST_P(RandomConformance, Attend) {
  for (int i = 0; i < Count(100); ++i) {
    const AttendShape shape = RandomAttend();
    SCOPED_TRACE("SLUICE_SEED=" + std::to_string(seed_) + " case " + std::to_string(i));
    AttendProblem problem(*device_, shape);
    PlacedBlocks blocks(problem, *stream_);
    blocks.Place(Placement());
    problem.Run(*stream_);
    // About 40 rows of each, as float64 takes its time.
    const int64_t num_outputs = problem.num_rows() * problem.num_query_heads();
    problem.ExpectNearReference(GetParam().f32_tolerance, 1 + static_cast<int>(num_outputs / 40));
    if (HasFatalFailure()) return;
    const std::vector<std::byte> out = Bits(problem.out, 0, problem.out.count());
    const std::vector<std::byte> lse = Bits(problem.lse, 0, problem.lse.count());
    blocks.Place(Placement());
    problem.Run(*stream_);
    ASSERT_EQ(Bits(problem.out, 0, problem.out.count()), out) << shape.ToString();
    ASSERT_EQ(Bits(problem.lse, 0, problem.lse.count()), lse) << shape.ToString();
  }
}

TEST_P(RandomConformance, ProjectAndScore) {
  for (int i = 0; i < Count(60); ++i) {
    SCOPED_TRACE("SLUICE_SEED=" + std::to_string(seed_) + " case " + std::to_string(i));
    ScoreShape shape;
    shape.dtype = Chance(2) ? DType::kBf16 : DType::kFp16;
    shape.head_dim = static_cast<int>(8 * Pick(2, 32));
    shape.num_kv_heads = static_cast<int>(Pick(1, 4));
    shape.group = static_cast<int>(Pick(1, 8));
    shape.block_tokens = 1 << Pick(0, 6);
    shape.rank = static_cast<int>(Pick(1, std::min(128, shape.head_dim)));
    shape.num_blocks = Chance(5) ? Pick(500, 1500) : Pick(1, 60);
    shape.projection_per_head = Chance(2);
    shape.paged = Chance(2);
    shape.seed = random_();
    ScoreProblem problem(*device_, *stream_, shape);
    problem.Project(0, shape.block_tokens);
    for (int check = 0; check < 200; ++check) {
      const int64_t b = Pick(0, shape.num_blocks - 1);
      const int h = static_cast<int>(Pick(0, shape.num_kv_heads - 1));
      const int t = static_cast<int>(Pick(0, shape.block_tokens - 1));
      const int r = static_cast<int>(Pick(0, shape.rank - 1));
      double expected = 0;
      for (int d = 0; d < shape.head_dim; ++d) {
        expected += problem.Key(b, h, t, d) * problem.P(h, d, r);
      }
      ASSERT_NEAR(FloatFromBf16(problem.Projected(b, h, t, r)), expected, Bf16Ulp(expected));
    }
    for (int64_t b = 0; b < shape.num_blocks; ++b) {
      if (Chance(9)) problem.blocks[b].projected = nullptr;
    }
    const std::vector<ScoreBlock> in_host = problem.blocks.ToVector();
    DeviceCopy rows(*device_, *stream_, problem.projected.bytes(), problem.projected.count() * 2);
    const ScoreKind kind = Chance(2) ? ScoreKind::kMaxDot : ScoreKind::kMass;
    const float scale = static_cast<float>(Pick(1, 20)) / 20;
    const int64_t top_k = Pick(0, shape.num_blocks);
    problem.Score(kind, scale, top_k);
    ExpectScores(problem, kind, scale);
    if (HasFatalFailure()) return;
    const std::vector<std::byte> scores = Bits(problem.scores, 0, shape.num_blocks);
    const std::vector<int64_t> top = problem.top.ToVector();
    for (int64_t k = 1; k < top_k; ++k) {
      ASSERT_GE(problem.scores[top[k - 1]], problem.scores[top[k]]) << k;
    }
    const auto in_device = Placement();
    for (int64_t b = 0; b < shape.num_blocks; ++b) {
      if (in_host[b].projected == nullptr || !in_device()) continue;
      problem.blocks[b].projected =
          rows.data() + (in_host[b].projected - problem.projected.bytes());
    }
    problem.Score(kind, scale, top_k);
    ASSERT_EQ(Bits(problem.scores, 0, shape.num_blocks), scores);
    ASSERT_EQ(problem.top.ToVector(), top);
  }
}

TEST_P(RandomConformance, StoreGatherAndCopy) {
  for (int i = 0; i < Count(40); ++i) {
    SCOPED_TRACE("SLUICE_SEED=" + std::to_string(seed_) + " case " + std::to_string(i));
    const int kv_heads = static_cast<int>(Pick(1, 8));
    const int head_dim = static_cast<int>(8 * Pick(2, 32));
    const int block_tokens = 1 << Pick(0, 8);
    const int64_t num_blocks = Pick(1, 40);
    const bool paged = Chance(2);
    const int64_t slot = SlotBytes(DType::kBf16, kv_heads, head_dim, block_tokens);
    const KvLayout layout =
        paged ? PagedLayout(DType::kBf16, kv_heads, head_dim, block_tokens, num_blocks * slot / 2)
              : SlotLayout(DType::kBf16, kv_heads, head_dim, block_tokens);
    const int64_t token_values = int64_t{kv_heads} * head_dim;
    SharedArray<uint16_t> wire(*device_, 2 * num_blocks * block_tokens * token_values);
    for (int64_t v = 0; v < wire.count(); ++v) wire[v] = static_cast<uint16_t>(random_());
    const std::vector<uint16_t> sent = wire.ToVector();
    // Poisoned pools in both kinds of memory.
    SharedArray<std::byte> host_pool(*device_, num_blocks * slot);
    DeviceCopy device_pool(*device_, *stream_, host_pool.bytes(), host_pool.count());
    const auto in_device = Placement();
    std::vector<TokenCopy> copies;
    const int64_t half = wire.count() / 2;
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int first = static_cast<int>(Pick(0, block_tokens - 1));
      const int tokens = static_cast<int>(Pick(0, block_tokens - first));
      const int zeros = static_cast<int>(Pick(0, block_tokens - first - tokens));
      std::byte* const pool = in_device() ? device_pool.data() : host_pool.bytes();
      const int64_t at = b * block_tokens * token_values;
      copies.push_back(
          {pool + b * (paged ? slot / 2 : slot), reinterpret_cast<std::byte*>(wire.data() + at),
           reinterpret_cast<std::byte*>(wire.data() + half + at), first, tokens, zeros});
    }
    device_->ops().StoreTokens({layout, copies.data(), num_blocks}, *stream_);
    stream_->Synchronize();
    std::fill_n(wire.data(), wire.count(), uint16_t{0x1234});
    device_->ops().GatherTokens({layout, copies.data(), num_blocks}, *stream_);
    stream_->Synchronize();
    // What was not stored is still poisoned: seen through a copy of the device's pool.
    SharedArray<std::byte> seen(*device_, host_pool.count());
    CopyAndWait(*device_, *stream_, seen.bytes(), device_pool.data(), seen.count());
    for (int64_t b = 0; b < num_blocks; ++b) {
      const TokenCopy& copy = copies[b];
      const int64_t at = b * block_tokens * token_values;
      for (int64_t v = 0; v < block_tokens * token_values; ++v) {
        const int64_t token = v / token_values;
        for (const int64_t part : {int64_t{0}, half}) {
          const uint16_t expected = token < copy.num_tokens ? sent[part + at + v]
                                    : token < copy.num_tokens + copy.zero_tokens ? 0
                                                                                 : 0x1234;
          ASSERT_EQ(wire[part + at + v], expected) << "block " << b << " value " << v;
        }
      }
      const bool placed =
          copy.block >= device_pool.data() && copy.block < device_pool.data() + host_pool.count();
      const std::byte* const block =
          placed ? seen.bytes() + (copy.block - device_pool.data()) : copy.block;
      for (int t = 0; t < block_tokens; ++t) {
        if (t >= copy.first_token && t < copy.first_token + copy.num_tokens + copy.zero_tokens) {
          continue;
        }
        for (int h = 0; h < kv_heads; ++h) {
          for (const int64_t part : {int64_t{0}, layout.v_offset_bytes}) {
            const std::byte* const row =
                block + part + t * layout.token_stride_bytes + h * layout.kv_head_stride_bytes;
            ASSERT_TRUE(std::all_of(row, row + 2 * head_dim,
                                    [](std::byte value) { return value == std::byte{0xff}; }))
                << "block " << b << " token " << t;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RandomConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
