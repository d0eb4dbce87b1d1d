// ProjectKeys and ScoreBlocks against float64.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/float16.h"
#include "kernels/ops/ops.h"
#include "tests/conformance/device_factory.h"
#include "tests/conformance/reference.h"
#include "tests/conformance/score_fixture.h"

namespace sluice {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint16_t kUntouched = 0xffff;  // what SharedArray starts with

class ScoreConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override { NewDevice(0); }
  void NewDevice(int num_workers) {
    stream_.reset();
    device_.reset();
    device_ = GetParam().create(num_workers);
    stream_ = device_->CreateStream(StreamPriority::kAttention);
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(ScoreConformance, ProjectedKeysAreWithinOneUlp) {
  uint64_t seed = 1;
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (const int rank : {1, 7, 8, 16, 31, 32, 64, 128}) {
      for (const int head_dim : {16, 40, 128, 256}) {
        if (rank > head_dim || (!GetParam().thorough && (head_dim == 256 || rank > 32))) continue;
        ScoreShape shape;
        shape.dtype = dtype;
        shape.rank = rank;
        shape.head_dim = head_dim;
        shape.num_blocks = 5;
        shape.projection_per_head = seed % 2 == 0;
        shape.paged = seed % 3 == 0;
        shape.seed = seed++;
        ScoreProblem problem(*device_, *stream_, shape);
        problem.Project(0, 16);
        for (int64_t b = 0; b < shape.num_blocks; ++b) {
          for (int h = 0; h < shape.num_kv_heads; ++h) {
            for (int t = 0; t < 16; ++t) {
              for (int r = 0; r < rank; ++r) {
                double expected = 0;
                for (int d = 0; d < head_dim; ++d) {
                  expected += problem.Key(b, h, t, d) * problem.P(h, d, r);
                }
                ASSERT_NEAR(FloatFromBf16(problem.Projected(b, h, t, r)), expected,
                            Bf16Ulp(expected))
                    << "rank " << rank << " head_dim " << head_dim << " token " << t;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(ScoreConformance, ProjectingSomeTokensLeavesTheOthersAndGivesTheSameBits) {
  for (const int rank : {7, 32}) {
    ScoreShape shape;
    shape.rank = rank;
    shape.block_tokens = 32;
    ScoreProblem problem(*device_, *stream_, shape);
    problem.Project(0, 32);
    const std::vector<uint16_t> whole = problem.projected.ToVector();
    std::fill_n(problem.projected.data(), problem.projected.count(), kUntouched);
    problem.Project(5, 1);
    problem.Project(9, 6);
    problem.Project(3, 0);
    for (int64_t i = 0; i < problem.projected.count(); ++i) {
      const int64_t t = i / rank % 32;
      const bool written = t == 5 || (t >= 9 && t < 15);
      ASSERT_EQ(problem.projected[i], written ? whole[i] : kUntouched) << i;
    }
  }
}

TEST_P(ScoreConformance, MaxDot) {
  uint64_t seed = 1;
  for (const int rank : {1, 6, 8, 16, 31, 32, 64, 128}) {
    for (const int group : {1, 2, 3, 4, 5, 8}) {
      if (!GetParam().thorough && group + rank % 8 > 4) continue;
      ScoreShape shape;
      shape.rank = rank;
      shape.head_dim = 128;
      shape.group = group;
      shape.num_blocks = 6;
      shape.block_tokens = 1 << (seed % 9);
      shape.dtype = seed % 2 == 0 ? DType::kBf16 : DType::kFp16;
      shape.projection_per_head = seed % 3 == 0;
      shape.seed = seed++;
      ScoreProblem problem(*device_, *stream_, shape);
      // Tokens past the valid ones stay as they were: NaN.
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        problem.blocks[b].valid_tokens = 1 + static_cast<int>(b * 7 % shape.block_tokens);
      }
      problem.Project(0, shape.block_tokens);
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        for (int h = 0; h < shape.num_kv_heads; ++h) {
          for (int t = problem.blocks[b].valid_tokens; t < shape.block_tokens; ++t) {
            for (int r = 0; r < rank; ++r) problem.Projected(b, h, t, r) = 0x7fc0;
          }
        }
      }
      problem.Score(ScoreKind::kMaxDot, 0, 0);
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        double expected = -kInfinity;
        for (int h = 0; h < problem.num_query_heads(); ++h) {
          for (const double dot : problem.ReferenceDots(b, h)) expected = std::max(expected, dot);
        }
        ASSERT_NEAR(problem.scores[b], expected, 1e-4 * (1 + std::abs(expected)))
            << "rank " << rank << " group " << group << " block " << b;
      }
    }
  }
}

TEST_P(ScoreConformance, MassIsTheMeanSoftmaxMass) {
  for (const int group : {1, 3, 4}) {
    ScoreShape shape;
    shape.group = group;
    shape.num_blocks = 1200;  // more than one range of the CPU device's sum
    shape.rank = 16;
    ScoreProblem problem(*device_, *stream_, shape);
    problem.Project(0, 16);
    problem.blocks[17].projected = nullptr;
    problem.blocks[600].projected = nullptr;
    const float scale = 0.5f;
    problem.Score(ScoreKind::kMass, scale, 10);
    std::vector<double> expected(shape.num_blocks, 0);
    for (int h = 0; h < problem.num_query_heads(); ++h) {
      std::vector<double> masses(shape.num_blocks, 0);
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        if (problem.blocks[b].projected == nullptr) continue;
        for (const double dot : problem.ReferenceDots(b, h)) masses[b] += std::exp(scale * dot);
      }
      const double total = std::accumulate(masses.begin(), masses.end(), 0.0);
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        expected[b] += masses[b] / total / problem.num_query_heads();
      }
    }
    double sum = 0;
    for (int64_t b = 0; b < shape.num_blocks; ++b) {
      if (problem.blocks[b].projected == nullptr) {
        EXPECT_EQ(problem.scores[b], -kInfinity);
        continue;
      }
      ASSERT_NEAR(problem.scores[b], expected[b], 1e-4 * expected[b] + 1e-9) << b;
      sum += problem.scores[b];
    }
    EXPECT_NEAR(sum, 1.0, 1e-4);
  }
}

TEST_P(ScoreConformance, MassWithHugeLogits) {
  ScoreShape shape;
  shape.num_blocks = 700;
  ScoreProblem problem(*device_, *stream_, shape);
  problem.Project(0, 16);
  problem.Score(ScoreKind::kMass, 1000.0f, 1);
  double sum = 0;
  for (int64_t b = 0; b < shape.num_blocks; ++b) {
    ASSERT_GE(problem.scores[b], 0.0f);
    sum += problem.scores[b];
  }
  EXPECT_NEAR(sum, 1.0, 1e-3);
}

TEST_P(ScoreConformance, TopKIsInOrderAndUnpredictedComeLast) {
  ScoreShape shape;
  shape.num_blocks = 300;
  shape.rank = 8;
  // One dot product a block: some scores are below zero, and still come before what is unpredicted.
  shape.num_kv_heads = 1;
  shape.group = 1;
  ScoreProblem problem(*device_, *stream_, shape);
  problem.Project(0, 16);
  for (int64_t b = 0; b < shape.num_blocks; ++b) problem.blocks[b].valid_tokens = 1;
  std::vector<bool> predicted(shape.num_blocks, true);
  for (const int64_t b : {0, 5, 6, 150, 299}) {
    problem.blocks[b].projected = nullptr;
    predicted[b] = false;
  }
  // Ties: the same A_g in several places.
  for (const int64_t b : {40, 30, 80, 260}) problem.blocks[b] = problem.blocks[100];
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    for (const int64_t k : {0, 1, 32, 299, 300}) {
      problem.Score(kind, 0.1f, k);
      std::vector<int64_t> order(shape.num_blocks);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        if (predicted[a] != predicted[b]) return static_cast<bool>(predicted[a]);
        return problem.scores[a] > problem.scores[b];
      });
      for (int64_t i = 0; i < k; ++i) ASSERT_EQ(problem.top[i], order[i]) << k << " " << i;
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        ASSERT_EQ(problem.scores[b] == -kInfinity, !predicted[b]);
      }
    }
  }
}

TEST_P(ScoreConformance, NothingPredictedAndNoBlocks) {
  ScoreShape shape;
  shape.num_blocks = 4;
  ScoreProblem problem(*device_, *stream_, shape);
  for (int64_t b = 0; b < 4; ++b) problem.blocks[b].projected = nullptr;
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    problem.Score(kind, 1.0f, 4);
    for (int64_t b = 0; b < 4; ++b) {
      EXPECT_EQ(problem.scores[b], -kInfinity);
      EXPECT_EQ(problem.top[b], b);
    }
  }
  problem.shape.num_blocks = 0;
  problem.blocks = SharedArray<ScoreBlock>(*device_, 0);
  problem.Score(ScoreKind::kMass, 1.0f, 0);
}

TEST_P(ScoreConformance, BitsDoNotDependOnWorkersOrTheOtherBlocks) {
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    std::vector<float> first;
    for (const int workers : {1, 2, 4}) {
      NewDevice(workers);
      ScoreShape shape;
      shape.num_blocks = 1500;
      shape.group = 3;
      ScoreProblem problem(*device_, *stream_, shape);
      problem.Project(0, 16);
      problem.Score(kind, 0.3f, 0);
      const std::vector<float> scores = problem.scores.ToVector();
      if (first.empty()) first = scores;
      EXPECT_EQ(std::memcmp(scores.data(), first.data(), scores.size() * 4), 0) << workers;
    }
  }
}

// Needles 32 q/|q| + noise in 32 of 256 blocks are found among the best 32 at rank 32.
TEST_P(ScoreConformance, RecallOfNeedles) {
  double found = 0;
  const int num_seeds = GetParam().thorough ? 20 : 3;
  for (int seed = 1; seed <= num_seeds; ++seed) {
    ScoreShape shape;
    shape.head_dim = 128;
    shape.num_kv_heads = 1;
    shape.group = 1;
    shape.num_blocks = 256;
    shape.seed = seed;
    ScoreProblem problem(*device_, *stream_, shape);
    for (int64_t b = 0; b < 256; ++b) problem.blocks[b].valid_tokens = 16;
    std::mt19937_64 random(seed + 1000);
    std::vector<int64_t> order(256);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    double norm = 0;
    for (int d = 0; d < 128; ++d) norm += std::pow(FloatFromBf16(problem.q[d]), 2);
    norm = std::sqrt(norm);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 32; ++i) {
      const int64_t token = random() % 16;
      std::byte* row = problem.keys.bytes() + order[i] * problem.block_stride +
                       token * problem.layout.token_stride_bytes;
      for (int d = 0; d < 128; ++d) {
        const uint16_t bits = Bf16FromFloat(
            static_cast<float>(32 * FloatFromBf16(problem.q[d]) / norm) + normal(random));
        std::memcpy(row + 2 * d, &bits, 2);
      }
    }
    problem.Project(0, 16);
    problem.Score(ScoreKind::kMaxDot, 0, 32);
    for (int i = 0; i < 32; ++i) {
      found += std::find(order.begin(), order.begin() + 32, problem.top[i]) != order.begin() + 32;
    }
  }
  EXPECT_GE(found / (32 * num_seeds), 0.95);
}

INSTANTIATE_TEST_SUITE_P(Devices, ScoreConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
