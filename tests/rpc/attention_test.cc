// AttentionService: right values, against float64 and against A_g as it is stored.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/projection.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using Attention = v1::AttentionService::Stub;

class AttentionTest : public ::testing::Test {
 protected:
  AttentionTest() : model(SmallSpec("a"), daemon.Open("a")) {}

  void Store(uint32_t layer, const std::vector<uint32_t>& block_ids) {
    v1::OffloadBlocksResponse response;
    const grpc::Status status = Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks,
                                       model.Offload(layer, block_ids), &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.stored_blocks(), static_cast<int64_t>(block_ids.size()));
  }
  void Put(uint32_t sequence_id, const std::vector<uint32_t>& block_ids) {
    v1::PutSequenceRequest request;
    *request.mutable_session() = model.handle;
    request.mutable_update()->set_sequence_id(sequence_id);
    request.mutable_update()->set_generation(1);
    for (const uint32_t id : block_ids) request.mutable_update()->add_block_ids(id);
    v1::PutSequenceResponse response;
    const grpc::Status status =
        Invoke(*daemon.sequence, &v1::SequenceService::Stub::PutSequence, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  v1::DecodeStepResponse Decode(const v1::DecodeStepRequest& request) {
    v1::DecodeStepResponse response;
    const grpc::Status status =
        Invoke(*daemon.attention, &Attention::DecodeStep, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    for (const auto& result : response.sequences()) {
      EXPECT_FALSE(result.has_status()) << result.status().message();
    }
    return response;
  }
  // Row `row` of an output [rows, num_query_heads, head_dim].
  std::vector<double> Row(const v1::Tensor& out, int64_t row) {
    const std::vector<double> all = Numbers(out);
    const int64_t row_elements = model.spec.num_query_heads() * model.spec.head_dim();
    return {all.begin() + row * row_elements, all.begin() + (row + 1) * row_elements};
  }

  Daemon daemon;
  Model model;
};

TEST_F(AttentionTest, DecodeStepGivesExactAttention) {
  Store(1, {3, 9, 4});
  Put(0, {3, 9, 4});
  Put(5, {9});
  v1::DecodeStepRequest request = model.Step(1, {{0, 41}, {5, 16}});
  request.mutable_output()->set_return_lse(true);
  const v1::DecodeStepResponse response = Decode(request);
  EXPECT_EQ(response.out().dtype(), v1::DTYPE_BF16);
  ASSERT_EQ(response.out().shape_size(), 3);
  EXPECT_EQ(response.out().shape(0), 2);
  EXPECT_EQ(response.out().shape(1), 4);
  EXPECT_EQ(response.out().shape(2), 32);
  std::vector<double> lse;
  ExpectClose(Row(response.out(), 0),
              model.Attend(request.q(), 0, 1, {3, 9, 4}, 41, request.options(), &lse));
  ExpectClose(Row(response.out(), 1),
              model.Attend(request.q(), 1, 1, {9}, 16, request.options(), &lse));
  ExpectClose(Numbers(response.lse()), lse);
  ASSERT_EQ(response.sequences_size(), 2);
  EXPECT_EQ(response.stats().host_blocks() + response.stats().hbm_blocks(), 4);
  EXPECT_GT(response.stats().total_us(), 0);
}

TEST_F(AttentionTest, DecodeStepTakesEveryOption) {
  Store(0, {1, 2, 3});
  Put(0, {1, 2, 3});
  v1::DecodeStepRequest request = model.Step(0, {{0, 45}});
  request.mutable_options()->set_scale(0.3f);
  request.mutable_options()->set_logit_softcap(2.5f);
  request.mutable_options()->set_window_tokens(10);
  request.mutable_options()->set_sink_tokens(3);
  for (const float sink : {0.5f, -1.0f, 0.0f, 2.0f})
    request.mutable_options()->add_sink_logits(sink);
  request.mutable_output()->set_dtype(v1::DTYPE_F32);
  request.mutable_output()->set_return_lse(true);
  const v1::DecodeStepResponse response = Decode(request);
  EXPECT_EQ(response.out().dtype(), v1::DTYPE_F32);
  std::vector<double> lse;
  ExpectClose(Numbers(response.out()),
              model.Attend(request.q(), 0, 0, {1, 2, 3}, 45, request.options(), &lse));
  ExpectClose(Numbers(response.lse()), lse);
}

TEST_F(AttentionTest, DecodeStepWritesNewTokensAndUpdatesTables) {
  Store(0, {1});
  Store(1, {1});
  // Two draft tokens behind 15, so that the second opens a block which the step's own update adds.
  v1::DecodeStepRequest request = model.Step(0, {{2, 17}}, /*write=*/true);
  v1::DecodeSequence& sequence = *request.mutable_sequences(0);
  sequence.set_query_tokens(2);
  sequence.mutable_update()->set_generation(1);
  sequence.mutable_update()->add_block_ids(1);
  sequence.mutable_update()->add_block_ids(8);
  *request.mutable_q() = model.RandomTensor({2, 4, 32});
  *request.mutable_k() = model.RandomTensor({2, 2, 32});
  *request.mutable_v() = model.RandomTensor({2, 2, 32});
  const v1::DecodeStepResponse response = Decode(request);
  model.Keep(request, 0, 0, 1, 15);
  model.Keep(request, 1, 0, 8, 0);
  for (int row = 0; row < 2; ++row) {
    ExpectClose(Row(response.out(), row),
                model.Attend(request.q(), row, 0, {1, 8}, 16 + row, request.options(), nullptr));
  }
  // The same step again, as after a lost reply: the same bytes, and nothing changes.
  EXPECT_EQ(Decode(request).out().data(), response.out().data());
  // A row's bits do not depend on what it is batched with.
  v1::DecodeStepRequest alone = model.Step(0, {{2, 17}});
  alone.mutable_q()->set_data(request.q().data().substr(4 * 32 * 2));
  EXPECT_EQ(Decode(alone).out().data(), response.out().data().substr(4 * 32 * 2));

  v1::ListSequencesRequest list;
  *list.mutable_session() = model.handle;
  v1::ListSequencesResponse listed;
  ASSERT_TRUE(
      Invoke(*daemon.sequence, &v1::SequenceService::Stub::ListSequences, list, &listed).ok());
  ASSERT_EQ(listed.sequences_size(), 1);
  EXPECT_EQ(listed.sequences(0).block_ids_size(), 2);
}

TEST_F(AttentionTest, OneBadSequenceDoesNotFailTheOthers) {
  Store(0, {1, 2});
  Put(0, {1, 2});
  Put(1, {2, 30});
  v1::DecodeStepRequest request = model.Step(0, {{1, 20}, {0, 32}, {7, 4}});
  request.mutable_sequences(1)->set_generation(1);
  v1::DecodeStepResponse response;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::DecodeStep, request, &response).ok());
  ASSERT_EQ(response.sequences_size(), 3);
  ExpectRefused(response.sequences(0).status(), grpc::StatusCode::FAILED_PRECONDITION,
                Reason::kTokensMissing);
  EXPECT_EQ(Metadata(response.sequences(0).status(), "layer"), "0");
  EXPECT_EQ(Metadata(response.sequences(0).status(), "block_id"), "30");
  EXPECT_EQ(Metadata(response.sequences(0).status(), "position"), "16");
  EXPECT_FALSE(response.sequences(1).has_status());
  ExpectRefused(response.sequences(2).status(), grpc::StatusCode::NOT_FOUND,
                Reason::kSequenceNotFound);
  ExpectClose(Row(response.out(), 1),
              model.Attend(request.q(), 1, 0, {1, 2}, 32, request.options(), nullptr));
  for (const int row : {0, 2}) {
    for (const double value : Row(response.out(), row)) EXPECT_EQ(value, 0);
  }
}

TEST_F(AttentionTest, ProjectedKeysAndScoresAreThoseOfTheSeed) {
  const int64_t rank = model.spec.rank();
  Store(0, {5, 6, 7});
  v1::OffloadBlocksRequest unpredicted = model.Offload(0, {8});
  unpredicted.set_predict(v1::PREDICT_MODE_OFF);
  v1::OffloadBlocksResponse stored;
  ASSERT_TRUE(
      Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks, unpredicted, &stored).ok());
  EXPECT_EQ(stored.predicted_blocks(), 0);

  v1::ReadProjectedKeysRequest read;
  *read.mutable_session() = model.handle;
  for (const uint32_t id : {7, 5, 8}) read.add_block_ids(id);
  v1::ReadProjectedKeysResponse keys;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::ReadProjectedKeys, read, &keys).ok());
  ASSERT_EQ(keys.predicted_size(), 3);
  EXPECT_TRUE(keys.predicted(0));
  EXPECT_FALSE(keys.predicted(2));
  EXPECT_EQ(keys.valid_tokens(2), 16u);
  ASSERT_EQ(keys.projected_keys().shape_size(), 4);
  const std::vector<double> a = Numbers(keys.projected_keys());

  std::vector<uint16_t> p_bits(32 * rank);
  FillGaussianProjection(7, 32, static_cast<int>(rank), p_bits.data());
  const auto project = [&](const auto& row, int64_t r) {
    double sum = 0;
    for (int64_t d = 0; d < 32; ++d) sum += row(d) * FromBf16(p_bits[d * rank + r]);
    return sum;
  };
  // A_g of block 7: [kv_head, token, rank].
  for (int64_t kv_head = 0; kv_head < 2; ++kv_head) {
    for (int64_t token = 0; token < 16; ++token) {
      for (int64_t r = 0; r < rank; ++r) {
        const double want = project(
            [&](int64_t d) {
              return FromBf16(model.blocks[{0, 7}].k[(token * 2 + kv_head) * 32 + d]);
            },
            r);
        EXPECT_NEAR(a[(kv_head * 16 + token) * rank + r], want, std::abs(want) / 128 + 1e-4);
      }
    }
  }

  v1::ScoreBlocksRequest score;
  *score.mutable_session() = model.handle;
  for (const uint32_t id : {8, 7, 5}) score.mutable_blocks()->add_block_ids(id);
  *score.mutable_q() = model.RandomTensor({4, 32});
  score.set_kind(v1::SCORE_KIND_MAX_DOT);
  score.set_top_k(3);
  v1::ScoreBlocksResponse scores;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &scores).ok());
  ASSERT_EQ(scores.scores_size(), 3);
  EXPECT_EQ(scores.scores(0), -std::numeric_limits<float>::infinity());
  EXPECT_FALSE(scores.predicted(0));
  const std::vector<double> q = Numbers(score.q());
  for (int block = 0; block < 2; ++block) {
    double best = -1e30;
    for (int64_t head = 0; head < 4; ++head) {
      for (int64_t token = 0; token < 16; ++token) {
        double dot = 0;
        for (int64_t r = 0; r < rank; ++r) {
          dot += project([&](int64_t d) { return q[head * 32 + d]; }, r) *
                 a[((block * 2 + head / 2) * 16 + token) * rank + r];
        }
        best = std::max(best, dot);
      }
    }
    EXPECT_NEAR(scores.scores(1 + block), best, std::abs(best) * 0.02 + 0.05);
  }
  ASSERT_EQ(scores.top_size(), 3);
  const int first = scores.scores(1) >= scores.scores(2) ? 1 : 2;
  EXPECT_EQ(scores.top(0).index(), static_cast<uint32_t>(first));
  EXPECT_EQ(scores.top(0).score(), scores.scores(first));
  EXPECT_EQ(scores.top(2).index(), 0u);
  EXPECT_EQ(scores.top(2).block_id(), 8u);
  EXPECT_FALSE(scores.top(2).predicted());

  // MASS, of a sequence, the best alone.
  Put(0, {5, 6, 7});
  v1::ScoreBlocksRequest mass = score;
  mass.set_sequence_id(0);
  mass.set_kind(v1::SCORE_KIND_UNSPECIFIED);
  v1::ScoreBlocksResponse masses;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, mass, &masses).ok());
  EXPECT_NEAR(std::accumulate(masses.scores().begin(), masses.scores().end(), 0.0), 1, 1e-3);
  mass.set_top_only(true);
  mass.set_top_k(1);
  v1::ScoreBlocksResponse top;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, mass, &top).ok());
  EXPECT_EQ(top.scores_size(), 0);
  EXPECT_EQ(top.predicted_size(), 0);
  ASSERT_EQ(top.top_size(), 1);
  EXPECT_EQ(top.top(0).score(), *std::max_element(masses.scores().begin(), masses.scores().end()));
}

TEST_F(AttentionTest, TilesFoldOnceAndGiveTheAttentionOfTheirBlocks) {
  Store(0, {1, 2, 3, 4});
  v1::BeginTilesRequest begin;
  *begin.mutable_session() = model.handle;
  *begin.mutable_q() = model.RandomTensor({2, 4, 32});
  v1::BeginTilesResponse run;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run).ok());

  v1::StepTileRequest step;
  *step.mutable_session() = model.handle;
  step.set_run_id(run.run_id());
  const auto fold = [&](uint64_t tile_index) {
    step.set_tile_index(tile_index);
    v1::StepTileResponse response;
    EXPECT_TRUE(Invoke(*daemon.attention, &Attention::StepTile, step, &response).ok());
    return response.folded();
  };
  step.add_rows()->add_block_ids(1);
  step.add_rows();
  EXPECT_TRUE(fold(0));
  EXPECT_FALSE(fold(0));
  step.mutable_rows(0)->set_block_ids(0, 2);
  step.mutable_rows(0)->set_last_block_valid_tokens(5);
  step.mutable_rows(1)->add_block_ids(3);
  step.mutable_rows(1)->add_block_ids(4);
  EXPECT_TRUE(fold(1));
  EXPECT_FALSE(fold(1));

  v1::FinalizeTilesRequest finalize;
  *finalize.mutable_session() = model.handle;
  finalize.set_run_id(run.run_id());
  finalize.mutable_output()->set_return_lse(true);
  finalize.set_return_state(true);
  v1::FinalizeTilesResponse result;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::FinalizeTiles, finalize, &result).ok());
  std::vector<double> lse;
  ExpectClose(Row(result.out(), 0), model.Attend(begin.q(), 0, 0, {1, 2}, 21, {}, &lse));
  ExpectClose(Row(result.out(), 1), model.Attend(begin.q(), 1, 0, {3, 4}, 32, {}, &lse));
  ExpectClose(Numbers(result.lse()), lse);
  const std::vector<double> m = Numbers(result.state_m());
  const std::vector<double> l = Numbers(result.state_l());
  ASSERT_EQ(m.size(), lse.size());
  for (size_t i = 0; i < m.size(); ++i) EXPECT_NEAR(m[i] + std::log(l[i]), lse[i], 1e-3);
  EXPECT_EQ(result.state_o().shape_size(), 3);

  // It is gone now, and aborting what is gone is no error.
  const grpc::Status again =
      Invoke(*daemon.attention, &Attention::FinalizeTiles, finalize, &result);
  ExpectRefused(again, grpc::StatusCode::NOT_FOUND, Reason::kRunNotFound);
  v1::AbortTilesRequest abort;
  *abort.mutable_session() = model.handle;
  abort.set_run_id(run.run_id());
  v1::AbortTilesResponse aborted;
  EXPECT_TRUE(Invoke(*daemon.attention, &Attention::AbortTiles, abort, &aborted).ok());
}

}  // namespace
}  // namespace sluice
