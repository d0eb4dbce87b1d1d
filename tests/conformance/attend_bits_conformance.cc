// Attend: which changes of a call must not change a bit of an output.

#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/attend_fixture.h"

namespace sluice {
namespace {

class AttendBitsConformance : public testing::TestWithParam<DeviceFactory> {
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

TEST_P(AttendBitsConformance, AloneOrInABatch) {
  AttendShape shape;
  shape.group = 4;
  shape.head_dim = 80;
  shape.sequences = {{700, 1}, {5000, 3}, {33, 2}, {2048, 1}, {257, 7}};
  AttendProblem problem(*device_, shape);
  problem.Run(*stream_);
  const int64_t row_values = problem.num_query_heads() * shape.head_dim;
  const SharedArray<float> batch_out = std::move(problem.out);
  const SharedArray<float> batch_lse = std::move(problem.lse);
  const std::vector<AttendSequence> all = problem.sequences.ToVector();
  for (size_t i = 0; i < all.size(); ++i) {
    problem.sequences = SharedArray<AttendSequence>(*device_, {all[i]});
    problem.Run(*stream_);
    EXPECT_EQ(Bits(problem.out, all[i].first_row * row_values, all[i].query_tokens * row_values),
              Bits(batch_out, all[i].first_row * row_values, all[i].query_tokens * row_values))
        << i;
    const int64_t heads = problem.num_query_heads();
    EXPECT_EQ(Bits(problem.lse, all[i].first_row * heads, all[i].query_tokens * heads),
              Bits(batch_lse, all[i].first_row * heads, all[i].query_tokens * heads))
        << i;
  }
}

TEST_P(AttendBitsConformance, OneQueryTokenOrMany) {
  uint64_t seed = 1;
  for (const int group : {1, 2, 3, 4, 5}) {
    for (const int64_t context : {64, 258, 2050, 4200}) {
      for (const int64_t window : {0, 200}) {
        AttendShape shape;
        shape.group = group;
        shape.num_kv_heads = 1;
        shape.head_dim = 48;
        shape.options.window_tokens = window;
        shape.options.sink_tokens = window > 0 ? 3 : 0;
        shape.sequences = {{context, group == 4 ? 64 : 5}};
        shape.seed = seed++;
        AttendProblem problem(*device_, shape);
        problem.Run(*stream_);
        const SharedArray<float> many = std::move(problem.out);
        const AttendSequence together = problem.sequences[0];
        std::vector<AttendSequence> singles;
        for (int t = 0; t < together.query_tokens; ++t) {
          AttendSequence single = together;
          single.context_tokens -= together.query_tokens - 1 - t;
          single.query_tokens = 1;
          single.first_row = t;
          singles.push_back(single);
        }
        problem.sequences = SharedArray<AttendSequence>(*device_, singles);
        problem.Run(*stream_);
        ASSERT_EQ(Bits(problem.out, 0, problem.out.count()), Bits(many, 0, many.count()))
            << shape.ToString();
      }
    }
  }
}

TEST_P(AttendBitsConformance, NumberOfWorkers) {
  for (const int64_t context : {900, 4000, 9000}) {
    std::vector<std::byte> first;
    for (const int workers : {1, 2, 4}) {
      NewDevice(workers);
      AttendShape shape;
      shape.group = 2;
      shape.num_kv_heads = 1;
      shape.sequences = {{context, 2}, {context / 3, 1}};
      AttendProblem problem(*device_, shape);
      problem.Run(*stream_);
      const std::vector<std::byte> bits = Bits(problem.out, 0, problem.out.count());
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << workers << " workers, context " << context;
    }
  }
}

TEST_P(AttendBitsConformance, SlotOrPagedLayoutAndBlockSize) {
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    // Values are drawn token by token, so that every layout holds the same numbers.
    AttendShape shape;
    shape.dtype = dtype;
    shape.group = 3;
    shape.sequences = {{1024, 2}};
    std::vector<std::byte> first;
    for (const int block_tokens : {1, 16, 256}) {
      for (const bool paged : {false, true}) {
        shape.paged = paged;
        shape.block_tokens = block_tokens;
        AttendProblem problem(*device_, shape);
        AttendShape one_block = shape;
        one_block.block_tokens = 16;
        one_block.paged = false;
        AttendProblem values(*device_, one_block);
        // The shuffle of the blocks takes from the same generator: copy the values over.
        for (int64_t t = 0; t < 1024; ++t) {
          for (int head = 0; head < shape.num_kv_heads; ++head) {
            for (int kv = 0; kv < 2; ++kv) {
              const auto at = [&](AttendProblem& p) {
                return const_cast<std::byte*>(p.tables[0][t / p.shape.block_tokens]) +
                       t % p.shape.block_tokens * p.layout.token_stride_bytes +
                       head * p.layout.kv_head_stride_bytes + kv * p.layout.v_offset_bytes;
              };
              std::memcpy(at(problem), at(values), 2 * shape.head_dim);
            }
          }
        }
        std::copy_n(values.q.data(), values.q.count(), problem.q.data());
        problem.Run(*stream_);
        const std::vector<std::byte> bits = Bits(problem.out, 0, problem.out.count());
        if (first.empty()) first = bits;
        EXPECT_EQ(bits, first) << shape.ToString();
      }
    }
  }
}

TEST_P(AttendBitsConformance, RepeatedCallsAndMaskedTokens) {
  AttendShape shape;
  shape.group = 4;
  shape.sequences = {{300, 1}};
  AttendProblem problem(*device_, shape);
  problem.Run(*stream_);
  const std::vector<std::byte> first = Bits(problem.out, 0, problem.out.count());
  problem.Run(*stream_);
  EXPECT_EQ(Bits(problem.out, 0, problem.out.count()), first);
  // Zeros instead of poison in the tokens past the context.
  auto* last = const_cast<std::byte*>(problem.tables[0][300 / 16]);
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    for (int kv = 0; kv < 2; ++kv) {
      std::byte* row =
          last + head * problem.layout.kv_head_stride_bytes + kv * problem.layout.v_offset_bytes;
      const int64_t stride = problem.layout.token_stride_bytes;
      std::memset(row + 300 % 16 * stride, 0, (16 - 300 % 16) * stride);
    }
  }
  problem.Run(*stream_);
  EXPECT_EQ(Bits(problem.out, 0, problem.out.count()), first);
}

TEST_P(AttendBitsConformance, TilesOnChunkBordersAndOneCall) {
  AttendShape shape;
  shape.group = 3;
  shape.causal = false;
  shape.head_dim = 72;
  shape.sequences = {{7000, 2}};
  AttendProblem problem(*device_, shape);
  problem.Run(*stream_);
  StateArrays state(*device_, 2, problem.num_query_heads(), shape.head_dim);
  Ops& ops = device_->ops();
  ops.BeginStates({2, problem.num_query_heads(), shape.head_dim, state.state()}, *stream_);
  const AttendSequence whole = problem.sequences[0];
  for (int64_t begin = 0; begin < 7000; begin += 2 * kChunkTokens) {
    problem.sequences[0].blocks = whole.blocks + begin / shape.block_tokens;
    problem.sequences[0].context_tokens = std::min<int64_t>(2 * kChunkTokens, 7000 - begin);
    AttendParams params = problem.Params();
    params.state = state.state();
    ops.Attend(params, *stream_);
    stream_->Synchronize();
  }
  SharedArray<float> out(*device_, problem.out.count());
  SharedArray<float> lse(*device_, problem.lse.count());
  FinalizeParams finalize;
  finalize.num_rows = 2;
  finalize.num_query_heads = problem.num_query_heads();
  finalize.head_dim = shape.head_dim;
  finalize.state = state.state();
  finalize.out = out.bytes();
  finalize.out_dtype = DType::kF32;
  finalize.lse = lse.data();
  ops.FinalizeStates(finalize, *stream_);
  stream_->Synchronize();
  EXPECT_EQ(Bits(out, 0, out.count()), Bits(problem.out, 0, out.count()));
  EXPECT_EQ(Bits(lse, 0, lse.count()), Bits(problem.lse, 0, lse.count()));
}

INSTANTIATE_TEST_SUITE_P(Devices, AttendBitsConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
