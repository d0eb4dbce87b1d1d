// Results do not depend on where blocks lie: device memory, host memory, or some here and some
// there.

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/attend_fixture.h"
#include "tests/conformance/placement.h"
#include "tests/conformance/score_fixture.h"

namespace sluice {
namespace {

class PlacementConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(0);
    stream_ = device_->CreateStream(StreamPriority::kAttention);
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::mt19937_64 random_{99};
};

// All in host memory, all in device memory, then mixes.
std::vector<std::function<bool()>> Placements(std::mt19937_64& random) {
  return {[] { return false; }, [] { return true; }, [&random] { return random() % 2 == 0; },
          [&random] { return random() % 8 == 0; }};
}

std::vector<AttendShape> Shapes(bool thorough) {
  std::vector<AttendShape> shapes;
  uint64_t seed = 1;
  for (const int group : {1, 4, 5}) {
    for (const int head_dim : {64, 80, 128}) {
      for (const int block_tokens : {1, 16, 64}) {
        if (!thorough && (group + head_dim + block_tokens) % 3 != 0) continue;
        AttendShape shape;
        shape.group = group;
        shape.head_dim = head_dim;
        shape.block_tokens = block_tokens;
        shape.dtype = seed % 3 == 0 ? DType::kFp16 : DType::kBf16;
        shape.paged = seed % 2 == 0;
        shape.num_kv_heads = 1 + static_cast<int>(seed % 2);
        shape.sequences = {{700, 1}, {2500, 5}, {33, 1}, {2048, 5}, {257, 1}, {5, 5}};
        shape.seed = seed++;
        shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

TEST_P(PlacementConformance, AttentionAloneAndInABatchWithOneQueryTokenOrFive) {
  for (const AttendShape& shape : Shapes(GetParam().thorough)) {
    AttendProblem problem(*device_, shape);
    problem.Run(*stream_);
    problem.ExpectNearReference(GetParam().f32_tolerance, 13);
    const SharedArray<float> out = std::move(problem.out);
    const SharedArray<float> lse = std::move(problem.lse);
    const int64_t heads = problem.num_query_heads();
    const std::vector<AttendSequence> all = problem.sequences.ToVector();
    // The rows of these sequences are as in the first run.
    const auto expect_same = [&](const std::vector<AttendSequence>& sequences,
                                 const std::string& what) {
      problem.sequences = SharedArray<AttendSequence>(*device_, sequences);
      problem.Run(*stream_);
      for (const AttendSequence& s : sequences) {
        const int64_t first = s.first_row * heads;
        const int64_t count = s.query_tokens * heads;
        ASSERT_EQ(Bits(problem.out, first * shape.head_dim, count * shape.head_dim),
                  Bits(out, first * shape.head_dim, count * shape.head_dim))
            << shape.ToString() << ": " << what << ", context " << s.context_tokens;
        ASSERT_EQ(Bits(problem.lse, first, count), Bits(lse, first, count))
            << shape.ToString() << ": " << what;
      }
    };
    PlacedBlocks blocks(problem, *stream_);
    int number = 0;
    for (const auto& placement : Placements(random_)) {
      const std::string where = "placement " + std::to_string(number++);
      blocks.Place(placement);
      expect_same(all, where);
      expect_same(all, where + ", again");
      for (const AttendSequence& sequence : all) expect_same({sequence}, where + ", alone");
      std::vector<AttendSequence> singles;
      for (const AttendSequence& sequence : all) {
        for (int t = 0; t < sequence.query_tokens; ++t) {
          AttendSequence single = sequence;
          single.context_tokens -= sequence.query_tokens - 1 - t;
          single.query_tokens = 1;
          single.first_row += t;
          singles.push_back(single);
        }
      }
      expect_same(singles, where + ", one query token each");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(PlacementConformance, ProjectedKeysAndScores) {
  uint64_t seed = 1;
  for (const int rank : {7, 16, 32}) {
    for (const bool paged : {false, true}) {
      ScoreShape shape;
      shape.rank = rank;
      shape.paged = paged;
      shape.head_dim = 128;
      shape.group = 4;
      shape.num_blocks = 700;
      shape.seed = seed++;
      ScoreProblem problem(*device_, *stream_, shape);
      const std::vector<uint16_t> empty = problem.projected.ToVector();
      problem.Project(0, shape.block_tokens);
      const std::vector<uint16_t> projected = problem.projected.ToVector();
      // Keys in device memory, A_g in both.
      DeviceCopy keys(*device_, *stream_, problem.keys.bytes(), problem.keys.count() * 2);
      std::copy(empty.begin(), empty.end(), problem.projected.data());
      DeviceCopy rows(*device_, *stream_, problem.projected.bytes(), problem.projected.count() * 2);
      const int64_t row_bytes = problem.ProjectedPerBlock() * 2;
      SharedArray<ProjectBlock> work(*device_, shape.num_blocks);
      for (int64_t b = 0; b < shape.num_blocks; ++b) {
        work[b] = {keys.data() + b * problem.block_stride, rows.data() + b * row_bytes, 0,
                   shape.block_tokens};
      }
      ProjectKeysParams params;
      params.layout = problem.layout;
      params.rank = rank;
      params.projection = problem.p.bytes();
      params.blocks = work.data();
      params.num_blocks = work.count();
      device_->ops().ProjectKeys(params, *stream_);
      stream_->Synchronize();
      CopyAndWait(*device_, *stream_, problem.projected.bytes(), rows.data(),
                  problem.projected.count() * 2);
      EXPECT_EQ(problem.projected.ToVector(), projected) << "rank " << rank;

      for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
        problem.Score(kind, 0.3f, 50);
        const std::vector<std::byte> scores = Bits(problem.scores, 0, shape.num_blocks);
        const std::vector<int64_t> top = problem.top.ToVector();
        for (const auto& in_device : Placements(random_)) {
          for (int64_t b = 0; b < shape.num_blocks; ++b) {
            problem.blocks[b].projected =
                (in_device() ? rows.data() : problem.projected.bytes()) + b * row_bytes;
          }
          problem.Score(kind, 0.3f, 50);
          EXPECT_EQ(Bits(problem.scores, 0, shape.num_blocks), scores) << "rank " << rank;
          EXPECT_EQ(problem.top.ToVector(), top) << "rank " << rank;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, PlacementConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
