#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;

class Score : public SessionFixture {
 protected:
  absl::Status ScoreBlocks(uint32_t layer, const std::vector<uint32_t>& ids, const Bits& q,
                           ScoreKind kind, uint32_t top_k = 0) {
    call_.layer = layer;
    call_.by_sequence = false;
    call_.block_ids = ids;
    return Run(q, kind, top_k);
  }
  absl::Status ScoreSequence(uint32_t layer, uint32_t id, const Bits& q, ScoreKind kind,
                             uint32_t top_k = 0) {
    call_.layer = layer;
    call_.by_sequence = true;
    call_.sequence_id = id;
    return Run(q, kind, top_k);
  }
  absl::Status Run(const Bits& q, ScoreKind kind, uint32_t top_k) {
    call_.q = View(q);
    call_.kind = kind;
    call_.top_k = top_k;
    session_->Submit(&call_);
    return call_.Wait();
  }

  // In float64, from A_g as it is stored and P as it is specified. NaN where not predicted.
  std::vector<double> Expected(uint32_t layer, const std::vector<uint32_t>& ids, const Bits& q,
                               ScoreKind kind, double scale) {
    const SessionSpec& spec = session_->spec();
    const ProjectedKeys keys = *ReadProjected(layer, ids);
    const std::vector<double> p = Projection();
    const int64_t group = spec.num_query_heads / spec.num_kv_heads;
    const size_t n = ids.size();
    std::vector<double> scores(n, kind == ScoreKind::kMass ? 0.0 : -INFINITY);
    for (int64_t h = 0; h < spec.num_query_heads; ++h) {
      const std::vector<double> query = Project(&q[h * spec.head_dim], p);
      std::vector<std::vector<double>> logits(n);
      double top = -INFINITY, total = 0;
      for (size_t b = 0; b < n; ++b) {
        for (uint32_t t = 0; keys.predicted[b] && t < keys.valid_tokens[b]; ++t) {
          const uint16_t* row =
              &keys.rows[((b * spec.num_kv_heads + h / group) * spec.block_tokens + t) * spec.rank];
          double dot = 0;
          for (int64_t r = 0; r < spec.rank; ++r) dot += query[r] * FloatFromBf16(row[r]);
          logits[b].push_back(dot);
          top = std::max(top, dot * scale);
        }
      }
      for (const auto& block : logits) {
        for (double dot : block) total += std::exp(dot * scale - top);
      }
      for (size_t b = 0; b < n; ++b) {
        for (double dot : logits[b]) {
          if (kind == ScoreKind::kMaxDot) {
            scores[b] = std::max(scores[b], dot);
          } else {
            scores[b] +=
                std::exp(dot * scale - top) / total / static_cast<double>(spec.num_query_heads);
          }
        }
      }
    }
    for (size_t b = 0; b < n; ++b) {
      if (!keys.predicted[b]) scores[b] = NAN;
    }
    return scores;
  }
  void ExpectScores(const std::vector<double>& expected) {
    ASSERT_EQ(call_.scores.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_EQ(call_.predicted[i], 0) << i;
        EXPECT_EQ(call_.scores[i], -INFINITY) << "never a made-up score";
      } else {
        EXPECT_EQ(call_.predicted[i], 1) << i;
        EXPECT_NEAR(call_.scores[i], expected[i], std::max(1e-6, std::abs(expected[i]) * 1e-4))
            << i;
      }
    }
  }
  // The best top_k of what was scored: predicted ones first, by score, ties by place.
  void ExpectTop(const std::vector<uint32_t>& ids, uint32_t top_k) {
    std::vector<uint32_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      if (call_.predicted[a] != call_.predicted[b]) return call_.predicted[a] > call_.predicted[b];
      return call_.predicted[a] && call_.scores[a] > call_.scores[b];
    });
    ASSERT_EQ(call_.top.size(), top_k);
    for (uint32_t i = 0; i < top_k; ++i) {
      EXPECT_EQ(call_.top[i].index, order[i]);
      EXPECT_EQ(call_.top[i].block_id, ids[order[i]]);
      EXPECT_EQ(call_.top[i].score, call_.scores[order[i]]);
      EXPECT_EQ(call_.top[i].predicted, call_.predicted[order[i]] != 0);
    }
  }

  Waitable<ScoreCall> call_;
};

TEST_F(Score, MatchFloat64OnStoredKeysAndP) {
  SessionSpec wide = SmallSpec();
  wide.num_query_heads = 12;
  wide.num_kv_heads = 3;
  wide.head_dim = 72;
  wide.rank = 19;
  wide.block_tokens = 32;
  for (const SessionSpec& spec : {SmallSpec(), wide}) {
    MakeManager({});
    Open(spec);
    const int64_t bt = spec.block_tokens;
    // Blocks 0..9: the last is not full; 4 and 6 are not predicted; 7 is only reserved.
    ASSERT_TRUE(OffloadTokens(1, 0, RandomTokens(7 * bt)).ok());
    ASSERT_TRUE(OffloadTokens(1, 4, RandomTokens(bt), PredictMode::kOff).ok());
    ASSERT_TRUE(OffloadTokens(1, 6, RandomTokens(bt), PredictMode::kOff).ok());
    ASSERT_TRUE(OffloadTokens(1, 8, RandomTokens(2 * bt - 1)).ok());
    ASSERT_TRUE(Put(2, 1, 0, Ids(0, 10)).ok());
    const std::vector<uint32_t> some = {9, 4, 0, 7, 2, 6, 8, 2};
    const double scale = 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
    for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
      const Bits q = RandomQ(1);
      ASSERT_TRUE(ScoreSequence(1, 2, q, kind, 10).ok()) << call_.status();
      ExpectScores(Expected(1, Ids(0, 10), q, kind, scale));
      ExpectTop(Ids(0, 10), 10);
      for (uint32_t top_k : {0, 1, 3, 8}) {
        ASSERT_TRUE(ScoreBlocks(1, some, q, kind, top_k).ok()) << call_.status();
        ExpectScores(Expected(1, some, q, kind, scale));
        ExpectTop(some, top_k);
      }
    }
    const Bits q = RandomQ(1);
    call_.has_scale = true;
    call_.scale = 0.37f;
    ASSERT_TRUE(ScoreBlocks(1, some, q, ScoreKind::kMass).ok());
    ExpectScores(Expected(1, some, q, ScoreKind::kMass, 0.37f));
    ASSERT_TRUE(ScoreBlocks(1, some, q, ScoreKind::kMaxDot).ok());
    ExpectScores(Expected(1, some, q, ScoreKind::kMaxDot, 1));
    call_.has_scale = false;
  }
}

TEST_F(Score, TiesGoByPlaceAndUnpredictedComeLast) {
  Open(SmallSpec());
  const Tokens same = RandomTokens(4);
  for (uint32_t id : {3, 1, 7}) ASSERT_TRUE(OffloadTokens(0, id, same).ok());
  for (uint32_t id : {2, 5}) ASSERT_TRUE(OffloadTokens(0, id, same, PredictMode::kOff).ok());
  const std::vector<uint32_t> ids = {5, 7, 2, 1, 3};
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    ASSERT_TRUE(ScoreBlocks(0, ids, RandomQ(1), kind, 5).ok());
    std::vector<uint32_t> order;
    for (const TopBlock& top : call_.top) order.push_back(top.block_id);
    EXPECT_THAT(order, ElementsAre(7, 1, 3, 5, 2));
  }
  // Of nothing predicted there is no mass; zero queries tie all.
  ASSERT_TRUE(ScoreBlocks(0, {5, 2}, RandomQ(1), ScoreKind::kMass, 2).ok());
  EXPECT_THAT(call_.predicted, ElementsAre(0, 0));
  EXPECT_EQ(call_.top[0].block_id, 5u);
  ASSERT_TRUE(ScoreBlocks(0, ids, Bits(4 * 32, 0), ScoreKind::kMass, 1).ok());
  EXPECT_NEAR(call_.top[0].score, 1.0 / 3, 1e-6);
}

TEST_F(Score, AppendedTokensCountAndTheirKeysAreProjected) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(7);
  ASSERT_TRUE(OffloadTokens(0, 0, Slice(tokens, 0, 2)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0, 1}).ok());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{2, 3}, {3, 6}, {6, 7}}) {
    const Tokens step = Slice(tokens, begin, end);
    ASSERT_TRUE(
        Step(0, Seq(0, static_cast<uint32_t>(end - begin), end), RandomQ(end - begin), &step).ok());
    ASSERT_TRUE(SessionFixture::call_.sequence_status[0].ok());
  }
  const ProjectedKeys keys = *ReadProjected(0, {0, 1});
  ExpectProjected(keys, 0, &tokens.k[0], 4);
  Bits padded = tokens.k;
  padded.resize(8 * 64);
  ExpectProjected(keys, 1, &padded[4 * 64], 3);
  const Bits q = RandomQ(1);
  ASSERT_TRUE(ScoreSequence(0, 0, q, ScoreKind::kMass, 1).ok());
  ExpectScores(Expected(0, {0, 1}, q, ScoreKind::kMass, 1 / std::sqrt(32.0)));
  // A token that truncation took away does not count.
  ASSERT_TRUE(session_->TruncateSequence(0, 2, 5).ok());
  ASSERT_TRUE(ScoreSequence(0, 0, q, ScoreKind::kMaxDot).ok());
  EXPECT_EQ(ReadProjected(0, {1})->valid_tokens[0], 1u);
  ExpectScores(Expected(0, {0, 1}, q, ScoreKind::kMaxDot, 1));
}

TEST_F(Score, AnEmptySequenceHasNoScores) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {}).ok());
  ASSERT_TRUE(ScoreSequence(0, 0, RandomQ(1), ScoreKind::kMass).ok());
  EXPECT_TRUE(call_.scores.empty());
  EXPECT_TRUE(call_.predicted.empty());
  EXPECT_TRUE(call_.top.empty());
}

// The workspace must hold the masses and the order of as many blocks as a session may have.
TEST_F(Score, AllBlocksOfASessionCanBeRanked) {
  SessionSpec spec = SmallSpec();
  spec.num_query_heads = spec.num_kv_heads = 1;
  spec.head_dim = 16;
  spec.block_tokens = 1;
  spec.rank = 1;
  spec.num_layers = 1;
  spec.max_blocks = 60'000;
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(60'000)).ok());
  const Bits q = RandomQ(1);
  for (const ScoreKind kind : {ScoreKind::kMaxDot, ScoreKind::kMass}) {
    ASSERT_TRUE(ScoreBlocks(0, Ids(0, 60'000), q, kind, 60'000).ok());
    ExpectTop(Ids(0, 60'000), 60'000);
  }
  ExpectScores(Expected(0, Ids(0, 60'000), q, ScoreKind::kMass, 0.25));
}

TEST_F(Score, RefusesWhatIsWrong) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  const Bits q = RandomQ(1);
  const auto field = [&](const absl::Status& status) {
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    return MetaOf(status, "field");
  };
  const ScoreKind kind = ScoreKind::kMass;
  EXPECT_EQ(field(ScoreBlocks(2, {0}, q, kind)), "layer");
  EXPECT_EQ(field(ScoreBlocks(0, {}, q, kind)), "blocks.block_ids");
  EXPECT_EQ(field(ScoreBlocks(0, Ids(0, 65), q, kind)), "blocks.block_ids");
  EXPECT_EQ(field(ScoreBlocks(0, {64}, q, kind)), "blocks.block_ids");
  EXPECT_EQ(field(ScoreBlocks(0, {0}, q, kind, 2)), "top_k");
  EXPECT_EQ(field(ScoreBlocks(0, {0}, Bits(3), kind)), "q.data");
  EXPECT_EQ(field(ScoreSequence(0, 8, q, kind)), "sequence_id");
  EXPECT_REASON(ScoreSequence(0, 0, q, kind), StatusCode::kNotFound, "SEQUENCE_NOT_FOUND");
  EXPECT_REASON(ScoreBlocks(0, {0, 1}, q, kind), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_REASON(ScoreBlocks(1, {0}, q, kind), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  call_.has_scale = true;
  call_.scale = INFINITY;
  EXPECT_EQ(field(ScoreBlocks(0, {0}, q, kind)), "scale");
  EXPECT_EQ(field(ReadProjected(2, {0}).status()), "layer");
  EXPECT_EQ(field(ReadProjected(0, {}).status()), "block_ids");
  EXPECT_EQ(field(ReadProjected(0, {64}).status()), "block_ids");
  EXPECT_REASON(ReadProjected(0, {1}).status(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
}

}  // namespace
}  // namespace sluice
