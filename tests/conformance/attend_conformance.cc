// Attend against float64: shapes, options, and inputs meant to break it.

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/attend_fixture.h"

namespace sluice {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class AttendConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(0);
    stream_ = device_->CreateStream(StreamPriority::kAttention);
  }

  void ExpectNear(const AttendShape& shape, int row_step = 1) {
    AttendProblem problem(*device_, shape);
    problem.Run(*stream_);
    problem.ExpectNearReference(GetParam().f32_tolerance, row_step);
  }
  bool thorough() const { return GetParam().thorough; }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(AttendConformance, EveryHeadDimAndGroup) {
  uint64_t seed = 1;
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (const int head_dim : {16, 24, 40, 64, 80, 96, 112, 128, 192, 256}) {
      for (const int group : {1, 2, 3, 4, 5, 7, 8, 16}) {
        if (!thorough() && (head_dim + group) % 3 != 0) continue;
        AttendShape shape;
        shape.dtype = dtype;
        shape.head_dim = head_dim;
        shape.group = group;
        shape.num_kv_heads = group > 4 ? 1 : 2;
        shape.paged = seed % 2 == 0;
        shape.sequences = {{group > 4 ? 70 : 301, 1}};
        shape.seed = seed++;
        ExpectNear(shape);
      }
    }
  }
}

TEST_P(AttendConformance, EveryBlockSizeAtItsBorders) {
  uint64_t seed = 100;
  for (int block = 1; block <= kMaxBlockTokens; block *= 2) {
    for (const int64_t context : {1, block - 1, block, block + 1, 2 * block + 1, 300}) {
      if (context == 0) continue;
      AttendShape shape;
      shape.head_dim = 40;
      shape.group = 3;
      shape.block_tokens = block;
      shape.paged = seed % 2 == 0;
      shape.sequences = {{context, 1}};
      shape.seed = seed++;
      ExpectNear(shape);
    }
  }
}

TEST_P(AttendConformance, ContextsAtSplitAndChunkBorders) {
  uint64_t seed = 200;
  for (const int64_t context : {1,    15,   16,   17,   255,  256,  257,  511,  512,  513,  2047,
                                2048, 2049, 2303, 2304, 2305, 4095, 4096, 4097, 6143, 6144, 6145}) {
    if (!thorough() && context > 2049) continue;
    AttendShape shape;
    shape.head_dim = 32;
    shape.group = 2;
    shape.sequences = {{context, 1}};
    shape.seed = seed++;
    ExpectNear(shape);
  }
}

TEST_P(AttendConformance, QueryTokens) {
  uint64_t seed = 300;
  for (const int query_tokens : {1, 2, 5, 64}) {
    for (const int group : {1, 3, 4, 8}) {
      for (const int64_t context : {64, 257, 300, 2100}) {
        if (!thorough() && (context > 300 || group == 3)) continue;
        AttendShape shape;
        shape.head_dim = 24;
        shape.num_kv_heads = 1;
        shape.group = group;
        shape.sequences = {{context, query_tokens}};
        shape.seed = seed++;
        ExpectNear(shape, query_tokens == 64 ? 5 : 1);
      }
    }
  }
}

TEST_P(AttendConformance, BatchesOfMixedLengths) {
  AttendShape shape;
  shape.head_dim = 64;
  shape.group = 4;
  shape.sequences = {{1, 1}, {0, 1}, {300, 5}, {17, 2}, {0, 3}, {2500, 1}, {64, 64}, {5000, 2}};
  if (!thorough()) shape.sequences.resize(6);
  for (const bool paged : {false, true}) {
    shape.paged = paged;
    shape.seed += 1;
    ExpectNear(shape, 3);
  }
}

TEST_P(AttendConformance, NotCausalQueriesSeeEverything) {
  AttendShape shape;
  shape.causal = false;
  shape.group = 2;
  shape.sequences = {{270, 5}, {3, 5}, {0, 2}};
  ExpectNear(shape);
}

TEST_P(AttendConformance, SlidingWindowWithSinks) {
  uint64_t seed = 400;
  for (const int64_t window : {1, 7, 256, 300, 3000}) {
    for (const int64_t sinks : {0, 4, 300, 2100}) {
      for (const int64_t context : {5, 290, 4500}) {
        if (!thorough() && context > 290) continue;
        AttendShape shape;
        shape.head_dim = 16;
        shape.num_kv_heads = 1;
        shape.group = 1 + seed % 4;
        shape.options.window_tokens = window;
        shape.options.sink_tokens = sinks;
        shape.sequences = {{context, 5}};
        shape.seed = seed++;
        ExpectNear(shape);
      }
    }
  }
}

TEST_P(AttendConformance, BlocksOutsideTheWindowAreNotTouched) {
  AttendShape shape;
  shape.options.window_tokens = 100;
  shape.options.sink_tokens = 20;
  shape.sequences = {{4500, 2}};
  AttendProblem problem(*device_, shape);
  // The oldest position seen is 4498 - 99; sinks end in block 1.
  for (int64_t block = 2; block < 4399 / 16; ++block) problem.tables[0][block] = nullptr;
  problem.Run(*stream_);
  problem.ExpectNearReference(GetParam().f32_tolerance);
}

TEST_P(AttendConformance, ScaleSoftcapAndSinkLogits) {
  AttendShape shape;
  shape.group = 3;
  shape.sequences = {{700, 2}, {0, 1}, {5, 1}};
  shape.options.scale = 0.7f;
  shape.options.logit_softcap = 5.0f;
  ExpectNear(shape);
  const std::vector<float> sink_logits = {-kInfinity, 0.0f, 3.5f, -2.0f, 100.0f, 7.0f};
  shape.options.sink_logits = sink_logits.data();
  ExpectNear(shape);
  shape.options.logit_softcap = 0;
  ExpectNear(shape);
}

TEST_P(AttendConformance, HugeLogits) {
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    AttendShape shape;
    shape.dtype = dtype;
    shape.head_dim = 128;
    shape.group = 2;
    shape.q_factor = 300;
    shape.options.scale = 3.0f;  // logits of standard deviation 1e4
    shape.sequences = {{3000, 1}, {20, 2}};
    AttendProblem problem(*device_, shape);
    problem.Run(*stream_);
    // A float logit of 1e4 is known to 1e-3: the promise holds, and no more than it.
    problem.ExpectNearReference(kInfinity);
  }
}

// All logits of a row equal, and very large or very small: only their differences may count.
TEST_P(AttendConformance, LogitsAreShiftedByTheirMaximum) {
  for (const float value : {1e4f, -1e4f, 3e37f}) {
    AttendShape shape;
    shape.head_dim = 16;
    shape.num_kv_heads = 1;
    shape.sequences = {{300, 1}};
    shape.options.scale = value;
    AttendProblem problem(*device_, shape);
    for (int d = 0; d < 16; ++d) problem.q[d] = 0;
    problem.q[0] = FromFloat(DType::kBf16, 1);
    std::vector<double> mean(16, 0);
    for (int64_t t = 0; t < 300; ++t) {
      auto* row = const_cast<std::byte*>(problem.tables[0][t / 16] +
                                         t % 16 * problem.layout.token_stride_bytes);
      const uint16_t one = FromFloat(DType::kBf16, 1);
      std::memcpy(row, &one, 2);
      for (int d = 0; d < 16; ++d) mean[d] += problem.v[0][t * 16 + d] / 300;
    }
    problem.Run(*stream_);
    for (int d = 0; d < 16; ++d) EXPECT_NEAR(problem.OutputAt(0, 0, d), mean[d], 1e-4) << value;
  }
}

TEST_P(AttendConformance, NarrowOutputsAreRoundedOnce) {
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    AttendShape shape;
    shape.dtype = dtype;
    shape.head_dim = 80;
    shape.group = 4;
    shape.sequences = {{600, 2}, {0, 1}};
    AttendProblem problem(*device_, shape);
    problem.Run(*stream_);
    const std::vector<uint16_t> narrow = problem.RunNarrow(*stream_);
    for (size_t i = 0; i < narrow.size(); ++i) {
      ASSERT_EQ(narrow[i], FromFloat(dtype, problem.out[i])) << i;
    }
  }
}

TEST_P(AttendConformance, EmptyContextGivesZeroAndMinusInfinity) {
  AttendShape shape;
  shape.sequences = {{0, 1}, {0, 64}};
  AttendProblem problem(*device_, shape);
  problem.Run(*stream_);
  for (int64_t i = 0; i < problem.out.count(); ++i) ASSERT_EQ(problem.out[i], 0.0f);
  for (int64_t i = 0; i < problem.lse.count(); ++i) ASSERT_EQ(problem.lse[i], -kInfinity);
}

// A query token's later neighbours are masked for it whatever they hold.
TEST_P(AttendConformance, LaterQueryTokensDoNotReachEarlierOnes) {
  for (const int group : {1, 2, 3, 4}) {
    AttendShape shape;
    shape.group = group;
    shape.sequences = {{258, 5}};
    AttendProblem problem(*device_, shape);
    problem.Run(*stream_);
    const int64_t row_values = problem.num_query_heads() * shape.head_dim;
    const std::vector<std::byte> before = Bits(problem.out, 0, 4 * row_values);
    for (const uint16_t poison : {0x7fc0, 0x7f80, 0xff80}) {
      auto* block = const_cast<std::byte*>(problem.tables[0][257 / 16]);
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        for (int kv = 0; kv < 2; ++kv) {
          std::byte* row = block + 257 % 16 * problem.layout.token_stride_bytes +
                           head * problem.layout.kv_head_stride_bytes +
                           kv * problem.layout.v_offset_bytes;
          for (int d = 0; d < shape.head_dim; ++d) std::memcpy(row + 2 * d, &poison, 2);
        }
      }
      problem.Run(*stream_);
      EXPECT_EQ(Bits(problem.out, 0, 4 * row_values), before) << group;
    }
  }
}

// NaN in K makes the rows that see it NaN, NaN in V one element of theirs; rows that do not see it
// stay as they are.
TEST_P(AttendConformance, NaNThatIsSeenReachesTheResult) {
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    const uint16_t nan = dtype == DType::kBf16 ? 0x7fc0 : 0x7e00;
    for (const int64_t context : {3, 40, 700, 3000}) {
      for (const bool in_v : {false, true}) {
        // Seen by all three query tokens, by the last two, by the last.
        for (const int64_t token : {context / 3, context - 2, context - 1}) {
          AttendShape shape;
          shape.dtype = dtype;
          shape.group = 3;
          shape.sequences = {{context, 3}, {context, 1}};
          AttendProblem problem(*device_, shape);
          constexpr int kDim = 21;
          auto* row = const_cast<std::byte*>(problem.tables[0][token / shape.block_tokens]) +
                      token % shape.block_tokens * problem.layout.token_stride_bytes +
                      (in_v ? problem.layout.v_offset_bytes : 0) + 2 * kDim;
          std::memcpy(row, &nan, 2);  // of kv head 0
          problem.Run(*stream_);
          for (int r = 0; r < 4; ++r) {
            const bool sees = r < 3 && context - 3 + r >= token;
            for (int h = 0; h < problem.num_query_heads(); ++h) {
              const bool hit = sees && h < shape.group;
              for (int d = 0; d < shape.head_dim; ++d) {
                ASSERT_EQ(std::isnan(problem.OutputAt(r, h, d)), hit && (!in_v || d == kDim))
                    << shape.ToString() << ": token " << token << (in_v ? " V" : " K") << " row "
                    << r << " head " << h << " element " << d;
              }
              ASSERT_EQ(std::isnan(problem.lse[r * problem.num_query_heads() + h]), hit && !in_v);
            }
          }
        }
      }
    }
  }
}

TEST_P(AttendConformance, NothingButNaN) {
  for (const int64_t context : {1, 100, 2500}) {
    AttendShape shape;
    shape.sequences = {{context, 1}};
    AttendProblem problem(*device_, shape);
    for (int64_t i = 0; i < problem.pool.count(); i += 2) {
      const uint16_t nan = 0x7fc0;
      std::memcpy(problem.pool.data() + i, &nan, 2);
    }
    problem.Run(*stream_);
    for (int64_t i = 0; i < problem.out.count(); ++i) {
      ASSERT_TRUE(std::isnan(problem.out[i])) << context << " " << i;
    }
    for (int64_t i = 0; i < problem.lse.count(); ++i) ASSERT_TRUE(std::isnan(problem.lse[i]));
  }
}

TEST_P(AttendConformance, OffsetsAre64Bit) {
  // Blocks and V lie more than 2^32 elements (8 GiB) apart, in address space that is not backed.
  constexpr int64_t kFar = int64_t{9} << 30;
  constexpr int kBlocks = 4;
  AttendShape shape;
  shape.head_dim = 16;
  shape.num_kv_heads = 1;
  shape.sequences = {{kBlocks * 16, 1}};
  AttendProblem problem(*device_, shape);
  absl::StatusOr<Buffer> far = device_->Reserve(MemoryKind::kHost, 6 * kFar);
  if (!far.ok()) GTEST_SKIP() << far.status();
  const std::vector<int64_t> places = {4 * kFar, 0, kFar, 3 * kFar};
  problem.layout.v_offset_bytes = kFar + (1 << 20);
  for (int b = 0; b < kBlocks; ++b) {
    std::byte* to = far->data() + places[b];
    ASSERT_TRUE(device_->Commit(*far, places[b], 512).ok());
    ASSERT_TRUE(device_->Commit(*far, places[b] + problem.layout.v_offset_bytes, 512).ok());
    std::memcpy(to, problem.tables[0][b], 512);
    std::memcpy(to + problem.layout.v_offset_bytes, problem.tables[0][b] + 512, 512);
    problem.tables[0][b] = to;
  }
  problem.Run(*stream_);
  problem.ExpectNearReference(GetParam().f32_tolerance);
}

TEST_P(AttendConformance, AMillionTokensOverAFewBlocks) {
  if (!thorough()) GTEST_SKIP() << "one variant of the device is enough";
  AttendShape shape;
  shape.head_dim = 16;
  shape.num_kv_heads = 1;
  shape.group = 2;
  shape.sequences = {{8 * 16, 1}};
  AttendProblem problem(*device_, shape);
  // Every block stands in the table equally often: the output is that of the eight blocks alone.
  constexpr int64_t kTokens = 1'000'000 / 128 * 128;
  SharedArray<const std::byte*> table(*device_, kTokens / 16);
  for (int64_t i = 0; i < table.count(); ++i) table[i] = problem.tables[0][i % 8];
  problem.sequences[0].blocks = table.data();
  problem.sequences[0].context_tokens = kTokens;
  problem.Run(*stream_);
  for (int h = 0; h < 2; ++h) {
    const ReferenceRow expected = problem.Reference(0, 0, h);
    for (int d = 0; d < 16; ++d) EXPECT_NEAR(problem.OutputAt(0, h, d), expected.out[d], 1e-4);
    EXPECT_NEAR(problem.lse[h], expected.lse + std::log(kTokens / 128.0), 1e-4);
  }
}

TEST_P(AttendConformance, RandomCases) {
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int i = 0; i < (thorough() ? 60 : 15); ++i) {
    AttendShape shape;
    shape.dtype = pick(0, 1) == 0 ? DType::kBf16 : DType::kFp16;
    shape.head_dim = static_cast<int>(8 * pick(2, 32));
    shape.num_kv_heads = static_cast<int>(pick(1, 3));
    shape.group = static_cast<int>(pick(1, 9));
    shape.block_tokens = 1 << pick(0, 8);
    shape.paged = pick(0, 1) == 0;
    shape.causal = pick(0, 3) != 0;
    if (pick(0, 2) == 0) shape.options.window_tokens = pick(1, 600);
    if (pick(0, 2) == 0) shape.options.sink_tokens = pick(1, 300);
    if (pick(0, 3) == 0) shape.options.logit_softcap = 3.0f;
    shape.sequences.clear();
    for (int64_t j = pick(1, 4); j > 0; --j) {
      const int query_tokens = static_cast<int>(pick(0, 3) == 0 ? pick(1, 64) : pick(1, 4));
      shape.sequences.push_back({pick(query_tokens, 700), query_tokens});
    }
    shape.seed = random();
    SCOPED_TRACE("seed " + std::to_string(seed) + " case " + std::to_string(i));
    ExpectNear(shape, 7);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, AttendConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
