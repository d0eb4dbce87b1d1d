// What the daemon refuses of attention, and while it is busy; and that no reason is left out.

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/rpc/status.h"
#include "tests/rpc/refusals.h"

namespace sluice {
namespace {

TEST_F(RefusalsTest, Scores) {
  using Score = v1::ScoreBlocksRequest;
  Score score = WithSession<Score>();
  score.mutable_blocks()->add_block_ids(1);
  *score.mutable_q() = model.RandomTensor({4, 32});
  RunCases(*daemon.attention, &Attention::ScoreBlocks, score,
           std::vector<Case<Score>>{
               {"no layer", [](auto& r) { r.set_layer(2); }, kInvalid, kField, "layer"},
               {"no target", [](auto& r) { r.clear_target(); }, kInvalid, kField, "target"},
               {"no blocks", [](auto& r) { r.mutable_blocks()->clear_block_ids(); }, kInvalid,
                kField, ""},
               {"no such id", [](auto& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid,
                kField, ""},
               {"absent block", [](auto& r) { r.mutable_blocks()->add_block_ids(50); }, kNotFound,
                Reason::kBlockNotFound, ""},
               {"no sequence", [](auto& r) { r.set_sequence_id(7); }, kNotFound,
                Reason::kSequenceNotFound, ""},
               {"sequence out of range", [](auto& r) { r.set_sequence_id(8); }, kInvalid, kField,
                "sequence_id"},
               {"no kind", [](auto& r) { r.set_kind(static_cast<v1::ScoreKind>(9)); }, kInvalid,
                kField, "kind"},
               {"no q", [](auto& r) { r.clear_q(); }, kInvalid, kField, "q"},
               {"q of another shape", [](auto& r) { r.mutable_q()->set_shape(0, 8); }, kInvalid,
                kField, "q.shape"},
               {"scale is no number",
                [](auto& r) { r.set_scale(std::numeric_limits<float>::quiet_NaN()); }, kInvalid,
                kField, "scale"},
               {"large top_k", [](auto& r) { r.set_top_k(2); }, kInvalid, kField, "top_k"},
           });
  using Read = v1::ReadProjectedKeysRequest;
  Read read = WithSession<Read>();
  read.add_block_ids(1);
  RunCases(*daemon.attention, &Attention::ReadProjectedKeys, read,
           std::vector<Case<Read>>{
               {"no layer", [](auto& r) { r.set_layer(2); }, kInvalid, kField, "layer"},
               {"no such id", [](auto& r) { r.add_block_ids(64); }, kInvalid, kField, ""},
               {"absent block", [](auto& r) { r.add_block_ids(50); }, kNotFound,
                Reason::kBlockNotFound, ""},
           });
}

TEST_F(RefusalsTest, DecodeStep) {
  using Request = v1::DecodeStepRequest;
  const Request right = model.Step(0, {{0, 20}}, /*write=*/true);
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  RunCases(
      *daemon.attention, &Attention::DecodeStep, right,
      std::vector<Case<Request>>{
          {"no handle", [](Request& r) { r.clear_session(); }, kInvalid, kField, "session.name"},
          {"no layer", [](Request& r) { r.set_layer(2); }, kInvalid, kField, "layer"},
          {"no sequences", [](Request& r) { r.clear_sequences(); }, kInvalid, kField, "sequences"},
          {"sequence out of range", [](Request& r) { r.mutable_sequences(0)->set_sequence_id(8); },
           kInvalid, kField, ""},
          {"sequence twice", [](Request& r) { *r.add_sequences() = r.sequences(0); }, kInvalid,
           Reason::kDuplicateSequence, ""},
          {"many query tokens", [](Request& r) { r.mutable_sequences(0)->set_query_tokens(65); },
           kInvalid, kField, ""},
          {"no context", [](Request& r) { r.mutable_sequences(0)->set_context_tokens(0); },
           kInvalid, kField, ""},
          {"negative context",
           [](Request& r) {
             r.mutable_sequences(0)->set_context_tokens(std::numeric_limits<int64_t>::min());
           },
           kInvalid, kField, ""},
          {"huge context",
           [](Request& r) {
             r.mutable_sequences(0)->set_context_tokens(std::numeric_limits<int64_t>::max());
           },
           kInvalid, kField, ""},
          {"update of another",
           [](Request& r) { r.mutable_sequences(0)->mutable_update()->set_sequence_id(1); },
           kInvalid, kField, "sequences[0].update.sequence_id"},
          {"update without generation",
           [](Request& r) { r.mutable_sequences(0)->mutable_update(); }, kInvalid, kField, ""},
          {"no q", [](Request& r) { r.clear_q(); }, kInvalid, kField, "q"},
          {"k without v", [](Request& r) { r.clear_v(); }, kInvalid, kField, "v"},
          {"v without k", [](Request& r) { r.clear_k(); }, kInvalid, kField, "k"},
          {"q of F32", [](Request& r) { r.mutable_q()->set_dtype(v1::DTYPE_F32); }, kInvalid,
           kField, "q.dtype"},
          {"negative shape", [](Request& r) { r.mutable_q()->set_shape(0, -1); }, kInvalid, kField,
           "q.shape"},
          {"scale is no number", [=](Request& r) { r.mutable_options()->set_scale(kNan); },
           kInvalid, kField, "options.scale"},
          {"negative softcap", [](Request& r) { r.mutable_options()->set_logit_softcap(-1); },
           kInvalid, kField, "options.logit_softcap"},
          {"negative window", [](Request& r) { r.mutable_options()->set_window_tokens(-1); },
           kInvalid, kField, "options.window_tokens"},
          {"negative sink", [](Request& r) { r.mutable_options()->set_sink_tokens(-1); }, kInvalid,
           kField, "options.sink_tokens"},
          {"few sink logits", [](Request& r) { r.mutable_options()->add_sink_logits(0); }, kInvalid,
           kField, "options.sink_logits"},
          {"sink logit is no number",
           [=](Request& r) {
             for (int i = 0; i < 4; ++i) r.mutable_options()->add_sink_logits(kNan);
           },
           kInvalid, kField, "options.sink_logits"},
          {"out of FP16", [](Request& r) { r.mutable_output()->set_dtype(v1::DTYPE_FP16); },
           kInvalid, kField, "output.dtype"},
          {"out of nothing",
           [](Request& r) { r.mutable_output()->set_dtype(static_cast<v1::Dtype>(9)); }, kInvalid,
           kField, "output.dtype"},
          {"one block twice written",
           [this](Request& r) {
             r = model.Step(0, {{0, 32}, {1, 16}}, true);
           },
           kInvalid, Reason::kDuplicateBlock, ""},
      });
}

TEST_F(RefusalsTest, SequencesOfAStep) {
  using Step = v1::DecodeStepRequest;
  const auto step = [&](Step request, StatusCode code, Reason reason) {
    v1::DecodeStepResponse response;
    const grpc::Status status =
        Invoke(*daemon.attention, &Attention::DecodeStep, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.sequences_size(), 1);
    ExpectRefused(response.sequences(0).status(), code, reason);
  };
  step(model.Step(0, {{7, 1}}), kNotFound, Reason::kSequenceNotFound);
  step(model.Step(0, {{1, 20}}), kPrecondition, Reason::kTokensMissing);
  step(model.Step(0, {{0, 33}}), kPrecondition, Reason::kTokensMissing);
  step(model.Step(0, {{1, 16}}, true), kPrecondition, Reason::kBlockShared);
  Step old = model.Step(0, {{0, 20}});
  old.mutable_sequences(0)->set_generation(4);
  step(old, kAborted, Reason::kStaleGeneration);
  Step old_update = model.Step(0, {{0, 20}});
  old_update.mutable_sequences(0)->mutable_update()->set_generation(4);
  step(old_update, kAborted, Reason::kStaleGeneration);
  Step far = model.Step(0, {{0, 20}});
  far.mutable_sequences(0)->mutable_update()->set_generation(5);
  far.mutable_sequences(0)->mutable_update()->set_base_blocks(3);
  step(far, kPrecondition, Reason::kBaseBeyondTable);
}

TEST_F(RefusalsTest, Tiles) {
  using Begin = v1::BeginTilesRequest;
  Begin begin = WithSession<Begin>();
  *begin.mutable_q() = model.RandomTensor({2, 4, 32});
  RunCases(*daemon.attention, &Attention::BeginTiles, begin,
           std::vector<Case<Begin>>{
               {"no layer", [](Begin& r) { r.set_layer(2); }, kInvalid, kField, "layer"},
               {"no q", [](Begin& r) { r.clear_q(); }, kInvalid, kField, "q"},
               {"q of odd length",
                [](Begin& r) {
                  r.mutable_q()->clear_shape();
                  r.mutable_q()->mutable_data()->pop_back();
                },
                kInvalid, kField, ""},
               {"negative rows", [](Begin& r) { r.mutable_q()->set_shape(0, -2); }, kInvalid,
                kField, ""},
               {"window", [](Begin& r) { r.mutable_options()->set_window_tokens(4); }, kInvalid,
                kField, "options.window_tokens"},
               {"no time", [](Begin& r) { r.mutable_timeout(); }, kInvalid, kField, "timeout"},
               {"long time", [](Begin& r) { r.mutable_timeout()->set_seconds(3601); }, kInvalid,
                kField, "timeout"},
           });
  v1::BeginTilesResponse run;
  ASSERT_TRUE(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run).ok());
  using Step = v1::StepTileRequest;
  Step step = WithSession<Step>();
  step.set_run_id(run.run_id());
  step.add_rows()->add_block_ids(1);
  step.add_rows();
  RunCases(
      *daemon.attention, &Attention::StepTile, step,
      std::vector<Case<Step>>{
          {"no run", [](Step& r) { r.set_run_id(999); }, kNotFound, Reason::kRunNotFound, ""},
          {"out of order", [](Step& r) { r.set_tile_index(1); }, kPrecondition,
           Reason::kTileOutOfOrder, ""},
          {"few rows", [](Step& r) { r.mutable_rows()->RemoveLast(); }, kInvalid, kField, "rows"},
          {"many blocks",
           [](Step& r) {
             for (uint32_t id = 0; id < 9; ++id) r.mutable_rows(1)->add_block_ids(id);
           },
           kInvalid, kField, ""},
          {"no such id", [](Step& r) { r.mutable_rows(1)->add_block_ids(64); }, kInvalid, kField,
           ""},
          {"absent block", [](Step& r) { r.mutable_rows(1)->add_block_ids(50); }, kNotFound,
           Reason::kBlockNotFound, ""},
          {"many tokens", [](Step& r) { r.mutable_rows(0)->set_last_block_valid_tokens(17); },
           kInvalid, kField, ""},
      });
  using Finalize = v1::FinalizeTilesRequest;
  Finalize finalize = WithSession<Finalize>();
  finalize.set_run_id(run.run_id());
  RunCases(*daemon.attention, &Attention::FinalizeTiles, finalize,
           std::vector<Case<Finalize>>{
               {"no run", [](auto& r) { r.set_run_id(999); }, kNotFound, Reason::kRunNotFound, ""},
               {"out of FP16", [](auto& r) { r.mutable_output()->set_dtype(v1::DTYPE_FP16); },
                kInvalid, kField, "output.dtype"},
           });
}

TEST(Refusals, WhileTheDeviceIsBusy) {
  DaemonOptions options;
  options.sessions.max_queued_calls_per_session = 3;
  Daemon daemon(options);
  v1::SessionSpec spec = SmallSpec("a");
  spec.set_num_layers(1);
  spec.set_max_blocks(4);
  Model model(spec, daemon.Open(spec));
  v1::OffloadBlocksResponse stored;
  const v1::OffloadBlocksRequest offload = model.Offload(0, {0, 1, 2, 3});
  ASSERT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, offload, &stored).ok());
  DeviceStall stall(daemon.device());
  std::vector<std::thread> threads;
  const auto inflight = [&] {
    v1::GetUsageResponse usage;
    EXPECT_TRUE(
        Invoke(*daemon.admin, &v1::AdminService::Stub::GetUsage, v1::GetUsageRequest(), &usage)
            .ok());
    return usage.inflight_bytes();
  };
  // Replaced blocks keep their A_g until the new ones are there; with all ids in use, there is room
  // for a second A_g of each and for no third one.
  const auto bytes = static_cast<int64_t>(offload.ByteSizeLong());
  threads.emplace_back([&] {
    v1::OffloadBlocksResponse response;
    EXPECT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, offload, &response).ok());
  });
  ASSERT_TRUE(Eventually([&] { return inflight() >= bytes; }));
  grpc::Status status = Invoke(*daemon.swap, &Swap::OffloadBlocks, offload, &stored);
  ExpectRefused(status, kExhausted, Reason::kPredictionMemory);
  EXPECT_TRUE(HasRetryInfo(DetailsOf(status)));

  v1::ScoreBlocksRequest score;
  *score.mutable_session() = model.handle;
  score.mutable_blocks()->add_block_ids(1);
  *score.mutable_q() = model.RandomTensor({4, 32});
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      v1::ScoreBlocksResponse response;
      EXPECT_TRUE(Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &response).ok());
    });
  }
  v1::ScoreBlocksResponse scores;
  ASSERT_TRUE(Eventually(
      [&] { return inflight() >= bytes + 2 * static_cast<int64_t>(score.ByteSizeLong()); }));
  status = Invoke(*daemon.attention, &Attention::ScoreBlocks, score, &scores);
  ExpectRefused(status, kExhausted, Reason::kQueueFull);
  EXPECT_TRUE(HasRetryInfo(DetailsOf(status)));

  // Closing waits for them; nothing new begins meanwhile.
  threads.emplace_back([&] {
    v1::CloseSessionRequest close;
    *close.mutable_session() = model.handle;
    close.set_mode(v1::CLOSE_MODE_DELETE_DATA);
    v1::CloseSessionResponse closed;
    EXPECT_TRUE(Invoke(*daemon.session, &SessionStub::CloseSession, close, &closed).ok());
  });
  v1::GetSessionRequest get;
  *get.mutable_session() = model.handle;
  v1::GetSessionResponse got;
  ASSERT_TRUE(Eventually([&] {
    status = Invoke(*daemon.session, &SessionStub::GetSession, get, &got);
    return !status.ok();
  }));
  ExpectRefused(status, kPrecondition, Reason::kSessionClosing);
  stall.Release();
  for (std::thread& thread : threads) thread.join();
}

// Cancelled calls are seen by nobody but their session.
TEST(Refusals, ACancelledCallIsDropped) {
  Daemon daemon;
  Model model(SmallSpec("a"), daemon.Open("a"));
  const auto session = *daemon.manager().Find(model.handle.name(), model.handle.epoch());
  struct Score final : ScoreCall {
    void Done() override {
      const std::lock_guard<std::mutex> lock(mutex);
      done = true;
    }
    std::mutex mutex;
    bool done = false;
  };
  std::vector<Score> scores(3);
  std::vector<uint32_t> ids = {1};
  const v1::Tensor q = model.RandomTensor({4, 32});
  v1::OffloadBlocksResponse stored;
  ASSERT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, ids), &stored).ok());
  {
    DeviceStall stall(daemon.device());
    for (Score& score : scores) {
      score.block_ids = ids;
      score.q.data = reinterpret_cast<const std::byte*>(q.data().data());
      score.q.bytes = static_cast<int64_t>(q.data().size());
      score.q.dtype_known = true;
      session->Submit(&score);
    }
    scores[2].Cancel();
  }
  for (Score& score : scores) {
    ASSERT_TRUE(Eventually([&] {
      const std::lock_guard<std::mutex> lock(score.mutex);
      return score.done;
    }));
  }
  EXPECT_TRUE(scores[0].status().ok()) << scores[0].status();
  ExpectRefused(ToGrpcStatus(scores[2].status()), StatusCode::CANCELLED, Reason::kCancelled);
}

TEST(Refusals, ABrokenInvariantIsInternal) {
  ExpectRefused(ToGrpcStatus(absl::InternalError("broken")), StatusCode::INTERNAL,
                Reason::kInternal);
}

// Every reason of server/base/error.h is met by a test above, or where is said. Runs when all tests
// have.
class EveryReasonIsMet : public ::testing::Environment {
 public:
  void TearDown() override {
    if (::testing::GTEST_FLAG(filter) != "*") return;
    const std::vector<std::string> met = ReasonsMet();
    // Of error.h; INTERNAL is the last one.
    for (int i = 0; i <= static_cast<int>(Reason::kInternal); ++i) {
      const auto reason = static_cast<Reason>(i);
      if (reason == Reason::kInflightBytes || reason == Reason::kMessageTooLarge)
        continue;  // limits_test
      if (reason == Reason::kDeadlineExceeded || reason == Reason::kShuttingDown)
        continue;                                     // stream_test
      if (reason == Reason::kDeviceFailed) continue;  // device_failure_test
      EXPECT_NE(std::find(met.begin(), met.end(), std::string(ReasonName(reason))), met.end())
          << ReasonName(reason) << " is met by no test";
    }
  }
};
const auto* const kEveryReasonIsMet = ::testing::AddGlobalTestEnvironment(new EveryReasonIsMet);

}  // namespace
}  // namespace sluice
