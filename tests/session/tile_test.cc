#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using IdList = std::vector<uint32_t>;

class Tile : public SessionFixture {
 protected:
  absl::StatusOr<uint64_t> Begin(uint32_t layer, const Bits& q,
                                 absl::Duration timeout = absl::ZeroDuration()) {
    Waitable<BeginTilesCall> call;
    call.layer = layer;
    call.q = View(q);
    call.attention = attention_;
    call.timeout = timeout;
    session_->Submit(&call);
    if (const absl::Status status = call.Wait(); !status.ok()) return status;
    return call.run_id;
  }
  // A row each: ids and last_block_valid_tokens.
  absl::StatusOr<bool> Step(uint64_t run, uint64_t tile, const std::vector<IdList>& ids,
                            const std::vector<uint32_t>& last = {}) {
    std::vector<TileRow> rows;
    for (size_t i = 0; i < ids.size(); ++i) rows.push_back({ids[i], last.empty() ? 0 : last[i]});
    Waitable<StepTileCall> call;
    call.run_id = run;
    call.tile_index = tile;
    call.rows = rows;
    session_->Submit(&call);
    if (const absl::Status status = call.Wait(); !status.ok()) return status;
    return call.folded;
  }
  absl::Status Finalize(uint64_t run) {
    finalize_.run_id = run;
    finalize_.return_lse = true;
    session_->Submit(&finalize_);
    return finalize_.Wait();
  }
  absl::Status Abort(uint64_t run) {
    Waitable<AbortTilesCall> call;
    call.run_id = run;
    session_->Submit(&call);
    return call.Wait();
  }
  // Each value within 2 BF16 ulp or 1e-3 of the other.
  static void ExpectClose(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
    ASSERT_EQ(a.size(), b.size());
    const auto* x = reinterpret_cast<const uint16_t*>(a.data());
    const auto* y = reinterpret_cast<const uint16_t*>(b.data());
    for (size_t i = 0; i < a.size() / 2; ++i) {
      if (Bf16UlpsApart(x[i], y[i]) <= 2) continue;
      ASSERT_NEAR(FloatFromBf16(x[i]), FloatFromBf16(y[i]), 1e-3) << i;
    }
  }

  AttentionSpec attention_;
  Waitable<FinalizeTilesCall> finalize_;
};

TEST_F(Tile, NextFoldsARepeatIsAcknowledgedAnyOtherIsOutOfOrder) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(12);
  ASSERT_TRUE(OffloadTokens(1, 0, tokens).ok());
  const Bits q = RandomQ(1);
  const auto run = Begin(1, q);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(Item("running_state").used_bytes, Item("running_state").reserved_bytes / 16);
  const auto out_of_order = [&](uint64_t tile) {
    const absl::Status status = Step(*run, tile, {{0}}).status();
    EXPECT_REASON(status, StatusCode::kFailedPrecondition, "TILE_OUT_OF_ORDER");
    EXPECT_EQ(MetaOf(status, "tile_index"), std::to_string(tile));
  };
  out_of_order(1);
  out_of_order(UINT64_MAX);
  EXPECT_TRUE(*Step(*run, 0, {{0}}));
  EXPECT_FALSE(*Step(*run, 0, {{0}})) << "a repeat";
  EXPECT_FALSE(*Step(*run, 0, {{2}})) << "whatever it holds";
  out_of_order(2);
  EXPECT_TRUE(*Step(*run, 1, {{1, 2}}, {3}));
  out_of_order(0);
  EXPECT_FALSE(*Step(*run, 1, {{1, 2}}, {3}));
  ASSERT_TRUE(Finalize(*run).ok());
  ExpectNear(finalize_.out, 0, Reference(q, 0, tokens, 11));
  EXPECT_EQ(Item("running_state").used_bytes, 0);
  EXPECT_REASON(Finalize(*run), StatusCode::kNotFound, "RUN_NOT_FOUND");
  EXPECT_REASON(Step(*run, 2, {{0}}).status(), StatusCode::kNotFound, "RUN_NOT_FOUND");
}

TEST_F(Tile, RandomSplitsEqualTheFusedStep) {
  SessionSpec spec = SmallSpec();
  spec.max_blocks = 700;
  spec.tile_blocks = 97;
  Open(spec);
  const int64_t contexts[] = {2700, 1, 2797, 4, 513};
  const Tokens tokens = RandomTokens(2797);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(0, 1, 0, Ids(0, 700)).ok());
  for (uint32_t id = 1; id < 5; ++id) ASSERT_TRUE(session_->ForkSequence(0, 1, id, 1, 0).ok());
  const std::vector<float> sinks = {0.5f, -2.0f, 1.0f, -INFINITY};
  for (int round = 0; round < 6; ++round) {
    attention_ = AttentionSpec();
    if (round >= 2) attention_.logit_softcap = 3.0f;
    if (round >= 3) {
      attention_.has_scale = true;
      attention_.scale = 0.11f;
    }
    if (round >= 4) attention_.sink_logits = sinks;
    const Bits q = RandomQ(5);
    sequences_.clear();
    for (uint32_t id = 0; id < 5; ++id) sequences_.push_back(Seq(id, 1, contexts[id]));
    call_.attention = attention_;
    call_.return_lse = true;
    ASSERT_TRUE(SessionFixture::Step(0, q, nullptr).ok()) << call_.status();

    const auto run = Begin(0, q);
    ASSERT_TRUE(run.ok()) << run.status();
    int64_t done[5] = {};
    uint64_t tile = 0;
    for (bool more = true; more; ++tile) {
      more = false;
      std::vector<IdList> ids(5);
      std::vector<uint32_t> last(5);
      for (int row = 0; row < 5; ++row) {
        const int64_t blocks = (contexts[row] + 3) / 4;
        const int64_t take =
            std::min<int64_t>(blocks - done[row], static_cast<int64_t>(random_() % 98));
        ids[row] = Ids(static_cast<uint32_t>(done[row]), static_cast<uint32_t>(take));
        done[row] += take;
        if (done[row] == blocks) last[row] = static_cast<uint32_t>((contexts[row] - 1) % 4 + 1);
        more |= done[row] < blocks;
      }
      ASSERT_TRUE(*Step(*run, tile, ids, last));
      if (random_() % 4 == 0) {
        ASSERT_FALSE(*Step(*run, tile, ids, last));
      }
    }
    ASSERT_TRUE(Finalize(*run).ok());
    ExpectClose(finalize_.out, call_.out);
    for (size_t i = 0; i < call_.lse.size(); ++i) {
      EXPECT_NEAR(finalize_.lse[i], call_.lse[i], 1e-5 * std::max(1.0f, std::abs(call_.lse[i])));
    }
  }
}

TEST_F(Tile, StatesMergedByHandEqualTheWhole) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(40);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  const Bits q = RandomQ(2);
  struct State {
    std::vector<double> m, l, o;
  };
  std::vector<State> parts;
  finalize_.return_state = true;
  // Row 1 has nothing in the first part: the empty state.
  for (const auto& rows : {std::vector<IdList>{{0, 1, 2}, {}},
                           {{3, 4}, {0, 1, 2, 3, 4}},
                           {{5, 6, 7, 8, 9}, {5, 6, 7, 8, 9}}}) {
    const auto run = Begin(0, q);
    ASSERT_TRUE(*Step(*run, 0, rows));
    ASSERT_TRUE(Finalize(*run).ok());
    ASSERT_EQ(finalize_.state_o.size(), 2u * 4 * 32);
    parts.push_back({{finalize_.state_m.begin(), finalize_.state_m.end()},
                     {finalize_.state_l.begin(), finalize_.state_l.end()},
                     {finalize_.state_o.begin(), finalize_.state_o.end()}});
  }
  EXPECT_EQ(parts[0].m[4], -INFINITY);
  EXPECT_EQ(parts[0].l[4], 0);
  EXPECT_EQ(parts[0].o[4 * 32], 0);
  Bits merged(2 * 4 * 32);
  for (int i = 0; i < 8; ++i) {
    double m = -INFINITY, l = 0;
    for (const State& part : parts) m = std::max(m, part.m[i]);
    for (const State& part : parts) l += part.l[i] * std::exp(part.m[i] - m);
    for (int d = 0; d < 32; ++d) {
      double o = 0;
      for (const State& part : parts) o += part.o[i * 32 + d] * std::exp(part.m[i] - m);
      merged[i * 32 + d] = Bf16FromDouble(o / l);
    }
  }
  const auto bytes =
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(merged.data()), merged.size() * 2);
  for (int row = 0; row < 2; ++row) ExpectNear(bytes, row, Reference(q, row, tokens, 40));
}

TEST_F(Tile, AnEmptyRunGivesZeroAndNoMass) {
  Open(SmallSpec());
  const auto run = Begin(0, RandomQ(1));
  EXPECT_TRUE(*Step(*run, 0, {{}}));
  ASSERT_TRUE(Finalize(*run).ok());
  EXPECT_EQ(Bytes(finalize_.out), std::string(4 * 32 * 2, '\0'));
  EXPECT_EQ(finalize_.lse[0], -INFINITY);
  EXPECT_TRUE(finalize_.state_m.empty()) << "not asked for";
}

// What is set aside for splits is enough for max_blocks blocks, however often an id comes.
TEST_F(Tile, ARowOfMoreBlocksThanTheSessionHasIsRefused) {
  SessionSpec spec = SmallSpec();
  spec.max_blocks = 2;
  spec.max_sequences = 1;
  spec.tile_blocks = 65'536;
  Open(spec);
  const Tokens tokens = RandomTokens(4);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  const Bits q = RandomQ(1);
  const auto run = Begin(0, q);
  ASSERT_TRUE(run.ok()) << run.status();
  const absl::Status refused = Step(*run, 0, {std::vector<uint32_t>(65'536, 0)}).status();
  EXPECT_REASON(refused, StatusCode::kInvalidArgument, "INVALID_FIELD");
  EXPECT_EQ(MetaOf(refused, "field"), "rows.block_ids");
  EXPECT_TRUE(*Step(*run, 0, {{0}}));
  ASSERT_TRUE(Finalize(*run).ok());
  ExpectNear(finalize_.out, 0, Reference(q, 0, tokens, 4));
}

TEST_F(Tile, AStepThatIsRefusedChangesNothing) {
  SessionSpec spec = SmallSpec();
  spec.tile_blocks = 3;
  Open(spec);
  const Tokens tokens = RandomTokens(11);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(0, 1, 0, {5}).ok());
  const Bits q = RandomQ(2);
  const auto run = Begin(0, q);
  const auto refused = [&](const std::vector<IdList>& ids, const std::vector<uint32_t>& last = {}) {
    return Step(*run, 0, ids, last).status();
  };
  EXPECT_EQ(MetaOf(refused({{0}}), "field"), "rows");
  EXPECT_EQ(MetaOf(refused({{0}, {0}, {0}}), "field"), "rows");
  EXPECT_EQ(MetaOf(refused({{0}, {0, 1, 2, 0}}), "field"), "rows.block_ids");
  EXPECT_EQ(MetaOf(refused({{0}, {64}}), "field"), "rows.block_ids");
  EXPECT_EQ(MetaOf(refused({{0}, {0}}, {0, 5}), "field"), "rows.last_block_valid_tokens");
  const absl::Status absent = refused({{0}, {0, 9}});
  EXPECT_REASON(absent, StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(absent, "block_id"), "9");
  EXPECT_REASON(refused({{0}, {5}}), StatusCode::kNotFound, "BLOCK_NOT_FOUND") << "only reserved";
  const absl::Status missing = refused({{0}, {2}}, {0, 4});
  EXPECT_REASON(missing, StatusCode::kFailedPrecondition, "TOKENS_MISSING");
  EXPECT_EQ(MetaOf(missing, "layer"), "0");
  EXPECT_EQ(MetaOf(missing, "block_id"), "2");
  EXPECT_EQ(MetaOf(missing, "position"), "3");
  EXPECT_REASON(refused({{0}, {2, 0}}), StatusCode::kFailedPrecondition, "TOKENS_MISSING")
      << "a block before the last must be full";
  EXPECT_TRUE(*Step(*run, 0, {{0, 1, 2}, {0, 1}}));
  ASSERT_TRUE(Finalize(*run).ok());
  ExpectNear(finalize_.out, 0, Reference(q, 0, tokens, 11));
  ExpectNear(finalize_.out, 1, Reference(q, 1, tokens, 8));
}

TEST_F(Tile, BeginChecksItsFields) {
  Open(SmallSpec());
  const Bits q = RandomQ(1);
  const auto field = [](const absl::Status& status) {
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    return MetaOf(status, "field");
  };
  EXPECT_EQ(field(Begin(2, q).status()), "layer");
  EXPECT_EQ(field(Begin(0, {}).status()), "q");
  EXPECT_EQ(field(Begin(0, Bits(4 * 32 + 1)).status()), "q.data");
  EXPECT_EQ(field(Begin(0, RandomQ(4097)).status()), "q.shape");
  EXPECT_EQ(field(Begin(0, q, absl::Microseconds(999)).status()), "timeout");
  EXPECT_EQ(field(Begin(0, q, -absl::Seconds(1)).status()), "timeout");
  EXPECT_EQ(field(Begin(0, q, absl::Hours(1) + absl::Seconds(1)).status()), "timeout");
  attention_.window_tokens = 4;
  EXPECT_EQ(field(Begin(0, q).status()), "options.window_tokens");
  attention_ = {};
  attention_.sink_tokens = 4;
  EXPECT_EQ(field(Begin(0, q).status()), "options.sink_tokens");
  attention_ = {};
  Waitable<BeginTilesCall> call;
  const Bits two = RandomQ(2);
  call.q = View(two);
  call.num_rows = 1;
  session_->Submit(&call);
  EXPECT_EQ(field(call.Wait()), "q.data") << "num_rows counts where it is given";
  const auto run = Begin(0, q);
  finalize_.out_dtype = DType::kFp16;
  EXPECT_EQ(field(Finalize(*run)), "output.dtype");
  finalize_.out_dtype = DType::kF32;
  EXPECT_TRUE(Finalize(*run).ok()) << "the run was still there";
  EXPECT_EQ(finalize_.out.size(), 4u * 32 * 4);
}

TEST_F(Tile, RunsAndTheirRowsAreBounded) {
  MakeManager({.max_tile_runs_per_session = 3});
  Open(SmallSpec());
  std::vector<uint64_t> runs;
  for (int i = 0; i < 3; ++i) runs.push_back(*Begin(0, RandomQ(1)));
  const absl::Status runs_full = Begin(0, RandomQ(1)).status();
  EXPECT_REASON(runs_full, StatusCode::kResourceExhausted, "TOO_MANY_RUNS");
  EXPECT_EQ(MetaOf(runs_full, "open_runs"), "3");
  EXPECT_TRUE(runs_full.GetPayload("sluice/retry_ms").has_value());
  EXPECT_TRUE(Abort(runs[0]).ok());
  EXPECT_TRUE(Abort(runs[0]).ok()) << "aborting is repeatable";
  EXPECT_REASON(Step(runs[0], 0, {{}}).status(), StatusCode::kNotFound, "RUN_NOT_FOUND");
  const absl::Status never = Begin(0, RandomQ(17)).status();
  EXPECT_REASON(never, StatusCode::kInvalidArgument, "INVALID_FIELD");
  EXPECT_EQ(MetaOf(never, "field"), "q.shape");
  // 2 x max_sequences = 16 rows in all; two are open.
  EXPECT_REASON(Begin(0, RandomQ(15)).status(), StatusCode::kResourceExhausted, "TOO_MANY_RUNS");
  const auto large = Begin(0, RandomQ(14));
  ASSERT_TRUE(large.ok()) << large.status();
  EXPECT_EQ(Item("running_state").used_bytes, Item("running_state").reserved_bytes);
  EXPECT_TRUE(Abort(*large).ok());
  EXPECT_TRUE(Finalize(runs[1]).ok());
  EXPECT_TRUE(Abort(runs[2]).ok());
  EXPECT_EQ(Item("running_state").used_bytes, 0);
}

TEST_F(Tile, ARunEndsAtItsDeadline) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  const auto shorter = Begin(0, RandomQ(1), absl::Seconds(5));
  const auto usual = Begin(0, RandomQ(1));
  clock_offset_ = absl::Seconds(4);
  EXPECT_TRUE(*Step(*shorter, 0, {{0}}));
  clock_offset_ = absl::Seconds(6);
  EXPECT_REASON(Step(*shorter, 1, {{0}}).status(), StatusCode::kNotFound, "RUN_NOT_FOUND");
  EXPECT_TRUE(*Step(*usual, 0, {{0}}));
  // The sweep takes what nobody asks for any more.
  clock_offset_ = absl::Seconds(61);
  ASSERT_TRUE(session_->CheckHandle(epoch_).ok());
  manager_->Sweep();
  EXPECT_EQ(Item("running_state").used_bytes, 0);
}

TEST_F(Tile, AnAbortOrADeadlineDuringAStepLeavesItsMemoryAlone) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  const auto run = Begin(0, RandomQ(1), absl::Seconds(5));
  const IdList ids = {0};
  const TileRow row{ids, 0};
  Waitable<StepTileCall> step;
  step.run_id = *run;
  step.rows = {&row, 1};
  Waitable<AbortTilesCall> abort;
  abort.run_id = *run;
  {
    StreamGate gate(*attention_stream_);
    session_->Submit(&step);
    session_->Submit(&abort);
    clock_offset_ = absl::Seconds(6);
    ASSERT_TRUE(session_->CheckHandle(epoch_).ok());
    manager_->Sweep();
    EXPECT_EQ(Item("running_state").used_bytes, 0);
  }
  EXPECT_TRUE(step.Wait().ok());
  EXPECT_TRUE(step.folded);
  EXPECT_TRUE(abort.Wait().ok());
}

}  // namespace
}  // namespace sluice
