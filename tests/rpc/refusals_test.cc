// What the daemon refuses of sessions, sequences and blocks: every case by its code, its reason and
// its details.

#include "tests/rpc/refusals.h"

#include <atomic>
#include <limits>
#include <string>
#include <vector>

namespace sluice {
namespace {

TEST_F(RefusalsTest, OpenSession) {
  using Request = v1::OpenSessionRequest;
  Request right;
  *right.mutable_spec() = SmallSpec("b");
  const auto spec = [](void (*change)(v1::SessionSpec&)) {
    return [change](Request& request) { change(*request.mutable_spec()); };
  };
  RunCases(
      *daemon.session, &SessionStub::OpenSession, right,
      std::vector<Case<Request>>{
          {"no layers", spec([](auto& s) { s.set_num_layers(0); }), kInvalid, kField,
           "spec.num_layers"},
          {"many layers", spec([](auto& s) { s.set_num_layers(1025); }), kInvalid, kField,
           "spec.num_layers"},
          {"no query heads", spec([](auto& s) { s.set_num_query_heads(0); }), kInvalid, kField,
           "spec.num_query_heads"},
          {"uneven heads", spec([](auto& s) { s.set_num_query_heads(5); }), kInvalid, kField,
           "spec.num_query_heads"},
          {"no kv heads", spec([](auto& s) { s.set_num_kv_heads(0); }), kInvalid, kField,
           "spec.num_kv_heads"},
          {"small heads", spec([](auto& s) { s.set_head_dim(8); }), kInvalid, kField,
           "spec.head_dim"},
          {"odd heads", spec([](auto& s) { s.set_head_dim(33); }), kInvalid, kField,
           "spec.head_dim"},
          {"large heads", spec([](auto& s) { s.set_head_dim(264); }), kInvalid, kField,
           "spec.head_dim"},
          {"odd blocks", spec([](auto& s) { s.set_block_tokens(12); }), kInvalid, kField,
           "spec.block_tokens"},
          {"large blocks", spec([](auto& s) { s.set_block_tokens(512); }), kInvalid, kField,
           "spec.block_tokens"},
          {"F32", spec([](auto& s) { s.set_kv_dtype(v1::DTYPE_F32); }), kInvalid, kField,
           "spec.kv_dtype"},
          {"no dtype", spec([](auto& s) { s.set_kv_dtype(static_cast<v1::Dtype>(9)); }), kInvalid,
           kField, "spec.kv_dtype"},
          {"rank above head_dim", spec([](auto& s) { s.set_rank(33); }), kInvalid, kField,
           "spec.rank"},
          {"no projection",
           spec([](auto& s) { s.set_projection_kind(static_cast<v1::ProjectionKind>(5)); }),
           kInvalid, kField, "spec.projection_kind"},
          {"no durability", spec([](auto& s) { s.set_durability(static_cast<v1::Durability>(2)); }),
           kInvalid, kField, "spec.durability"},
          {"no blocks", spec([](auto& s) { s.set_max_blocks(0); }), kInvalid, kField,
           "spec.max_blocks"},
          {"many blocks", spec([](auto& s) { s.set_max_blocks((1 << 24) + 1); }), kInvalid, kField,
           "spec.max_blocks"},
          {"many sequences", spec([](auto& s) { s.set_max_sequences(65'537); }), kInvalid, kField,
           "spec.max_sequences"},
          {"long tiles", spec([](auto& s) { s.set_tile_blocks(65'537); }), kInvalid, kField,
           "spec.tile_blocks"},
          {"negative budget", spec([](auto& s) { s.set_host_budget_bytes(-1); }), kInvalid, kField,
           "spec.host_budget_bytes"},
          {"short lease", spec([](auto& s) { s.mutable_lease()->set_nanos(5); }), kInvalid, kField,
           "spec.lease"},
          {"lease of two signs", spec([](auto& s) {
             s.mutable_lease()->set_seconds(5);
             s.mutable_lease()->set_nanos(-5);
           }),
           kInvalid, kField, "spec.lease"},
          {"long retention", spec([](auto& s) { s.mutable_retention()->set_seconds(31 * 86'400); }),
           kInvalid, kField, "spec.retention"},
          {"bad name", spec([](auto& s) { s.set_name("a b"); }), kInvalid, kField, "spec.name"},
          {"long name", spec([](auto& s) { s.set_name(std::string(100'000, 'x')); }), kInvalid,
           kField, "spec.name"},
          {"long fingerprint",
           spec([](auto& s) { s.set_model_fingerprint(std::string(257, '\xff')); }), kInvalid,
           kField, "spec.model_fingerprint"},
          {"other geometry", spec([](auto& s) {
             s.set_name("a");
             s.set_num_layers(3);
           }),
           kPrecondition, Reason::kSessionMismatch, "spec.num_layers"},
          {"other fingerprint", spec([](auto& s) {
             s.set_name("a");
             s.set_model_fingerprint("x");
           }),
           kPrecondition, Reason::kSessionMismatch, "spec.model_fingerprint"},
          {"too large", spec([](auto& s) {
             s.set_num_layers(1024);
             s.set_max_blocks(1 << 22);
           }),
           kExhausted, Reason::kDeviceMemory, ""},
      });
}

TEST_F(RefusalsTest, SessionHandlesAndPages) {
  using Get = v1::GetSessionRequest;
  RunCases(*daemon.session, &SessionStub::GetSession, WithSession<Get>(),
           std::vector<Case<Get>>{
               {"no handle", [](Get& r) { r.clear_session(); }, kInvalid, kField, "session.name"},
               {"no session", [](Get& r) { r.mutable_session()->set_name("z"); }, kNotFound,
                Reason::kSessionNotFound, ""},
               {"old epoch", [](Get& r) { r.mutable_session()->set_epoch(1); }, kAborted,
                Reason::kFenced, ""},
           });
  using Close = v1::CloseSessionRequest;
  Close close = WithSession<Close>();
  close.set_mode(v1::CLOSE_MODE_DELETE_DATA);
  RunCases(*daemon.session, &SessionStub::CloseSession, close,
           std::vector<Case<Close>>{
               {"no mode", [](Close& r) { r.clear_mode(); }, kInvalid, kField, "mode"},
               {"no handle", [](Close& r) { r.clear_session(); }, kInvalid, kField, "session.name"},
               {"no session", [](Close& r) { r.mutable_session()->set_name("z"); }, kNotFound,
                Reason::kSessionNotFound, ""},
               {"old epoch", [](Close& r) { r.mutable_session()->set_epoch(1); }, kAborted,
                Reason::kFenced, ""},
           });
  using ListSessions = v1::ListSessionsRequest;
  RunCases(
      *daemon.session, &SessionStub::ListSessions, ListSessions(),
      std::vector<Case<ListSessions>>{
          {"large page", [](auto& r) { r.set_page_size(1001); }, kInvalid, kField, "page_size"},
          {"negative page", [](auto& r) { r.set_page_size(-1); }, kInvalid, kField, "page_size"},
          {"bad token", [](auto& r) { r.set_page_token("x"); }, kInvalid, kField, "page_token"},
      });
  using ListSequences = v1::ListSequencesRequest;
  RunCases(
      *daemon.sequence, &Sequence::ListSequences, WithSession<ListSequences>(),
      std::vector<Case<ListSequences>>{
          {"large page", [](auto& r) { r.set_page_size(1001); }, kInvalid, kField, "page_size"},
          {"bad token", [](auto& r) { r.set_page_token("e30="); }, kInvalid, kField, "page_token"},
      });
  using ListBlocks = v1::ListBlocksRequest;
  RunCases(
      *daemon.swap, &Swap::ListBlocks, WithSession<ListBlocks>(),
      std::vector<Case<ListBlocks>>{
          {"large page", [](auto& r) { r.set_page_size(10'001); }, kInvalid, kField, "page_size"},
          {"bad token", [](auto& r) { r.set_page_token("\u00e9"); }, kInvalid, kField,
           "page_token"},
          {"no tier", [](auto& r) { r.set_tier(static_cast<v1::Tier>(7)); }, kInvalid, kField,
           "tier"},
          {"no layer", [](auto& r) { r.add_layers(2); }, kInvalid, kField, ""},
      });
  v1::SetLogLevelRequest level;
  v1::SetLogLevelResponse level_response;
  ExpectRefused(Invoke(*daemon.admin, &v1::AdminService::Stub::SetLogLevel, level, &level_response),
                kInvalid, kField, "level");
  v1::GetUsageRequest usage;
  usage.set_session_name("z");
  v1::GetUsageResponse usage_response;
  ExpectRefused(Invoke(*daemon.admin, &v1::AdminService::Stub::GetUsage, usage, &usage_response),
                kNotFound, Reason::kSessionNotFound);
}

TEST_F(RefusalsTest, Sequences) {
  using Put = v1::PutSequenceRequest;
  Put put = WithSession<Put>();
  put.mutable_update()->set_generation(5);
  RunCases(
      *daemon.sequence, &Sequence::PutSequence, put,
      std::vector<Case<Put>>{
          {"no update", [](Put& r) { r.clear_update(); }, kInvalid, kField, "update.generation"},
          {"no such id", [](Put& r) { r.mutable_update()->set_sequence_id(8); }, kInvalid, kField,
           "update.sequence_id"},
          {"old", [](Put& r) { r.mutable_update()->set_generation(4); }, kAborted,
           Reason::kStaleGeneration, ""},
          {"far base", [](Put& r) { r.mutable_update()->set_base_blocks(3); }, kPrecondition,
           Reason::kBaseBeyondTable, ""},
          {"no such block", [](Put& r) { r.mutable_update()->add_block_ids(64); }, kInvalid, kField,
           ""},
          {"twice",
           [](Put& r) {
             r.mutable_update()->add_block_ids(9);
             r.mutable_update()->add_block_ids(9);
           },
           kInvalid, kField, ""},
      });
  using Fork = v1::ForkSequenceRequest;
  Fork fork = WithSession<Fork>();
  fork.set_source_generation(5);
  fork.set_target_sequence_id(2);
  fork.set_target_generation(1);
  RunCases(*daemon.sequence, &Sequence::ForkSequence, fork,
           std::vector<Case<Fork>>{
               {"no source", [](Fork& r) { r.set_source_sequence_id(7); }, kNotFound,
                Reason::kSequenceNotFound, ""},
               {"other generation", [](Fork& r) { r.set_source_generation(4); }, kAborted,
                Reason::kStaleGeneration, ""},
               {"target exists", [](Fork& r) { r.set_target_sequence_id(1); },
                StatusCode::ALREADY_EXISTS, Reason::kSequenceExists, ""},
               {"target out of range", [](Fork& r) { r.set_target_sequence_id(8); }, kInvalid,
                kField, "target_sequence_id"},
               {"no generation", [](Fork& r) { r.set_target_generation(0); }, kInvalid, kField,
                "target_generation"},
               {"too long", [](Fork& r) { r.set_context_tokens(33); }, kInvalid, kField,
                "context_tokens"},
           });
  using Truncate = v1::TruncateSequenceRequest;
  Truncate truncate = WithSession<Truncate>();
  truncate.set_generation(6);
  RunCases(
      *daemon.sequence, &Sequence::TruncateSequence, truncate,
      std::vector<Case<Truncate>>{
          {"none", [](Truncate& r) { r.set_sequence_id(7); }, kNotFound, Reason::kSequenceNotFound,
           ""},
          {"old", [](Truncate& r) { r.set_generation(4); }, kAborted, Reason::kStaleGeneration, ""},
          {"too long", [](Truncate& r) { r.set_context_tokens(33); }, kInvalid, kField,
           "context_tokens"},
          {"negative", [](Truncate& r) { r.set_context_tokens(-1); }, kInvalid, kField,
           "context_tokens"},
      });
  using Release = v1::ReleaseSequenceRequest;
  Release release = WithSession<Release>();
  release.add_sequence_ids(0);
  RunCases(*daemon.sequence, &Sequence::ReleaseSequence, release,
           std::vector<Case<Release>>{
               {"one is none", [](Release& r) { r.add_sequence_ids(7); }, kNotFound,
                Reason::kSequenceNotFound, ""},
           });
}

TEST_F(RefusalsTest, Offload) {
  using Request = v1::OffloadBlocksRequest;
  const Request right = model.Offload(0, {10, 11});
  RunCases(
      *daemon.swap, &Swap::OffloadBlocks, right,
      std::vector<Case<Request>>{
          {"no blocks", [](Request& r) { r.clear_blocks(); }, kInvalid, kField, "blocks"},
          {"no layer", [](Request& r) { r.mutable_blocks(1)->set_layer(2); }, kInvalid, kField, ""},
          {"no id", [](Request& r) { r.mutable_blocks(1)->set_block_id(64); }, kInvalid, kField,
           ""},
          {"many tokens", [](Request& r) { r.mutable_blocks(1)->set_valid_tokens(17); }, kInvalid,
           kField, ""},
          {"long tag", [](Request& r) { r.mutable_blocks(1)->set_tag(std::string(33, 'x')); },
           kInvalid, kField, ""},
          {"twice", [](Request& r) { r.mutable_blocks(1)->set_block_id(10); }, kInvalid,
           Reason::kDuplicateBlock, ""},
          {"no k", [](Request& r) { r.clear_k(); }, kInvalid, kField, "k"},
          {"no v", [](Request& r) { r.clear_v(); }, kInvalid, kField, "v"},
          {"k without data", [](Request& r) { r.mutable_k()->clear_data(); }, kInvalid, kField,
           "k.data"},
          {"short k", [](Request& r) { r.mutable_k()->mutable_data()->pop_back(); }, kInvalid,
           kField, "k.data"},
          {"k of FP16", [](Request& r) { r.mutable_k()->set_dtype(v1::DTYPE_FP16); }, kInvalid,
           kField, "k.dtype"},
          {"v without dtype", [](Request& r) { r.mutable_v()->clear_dtype(); }, kInvalid, kField,
           "v.dtype"},
          {"other shape", [](Request& r) { r.mutable_k()->set_shape(1, 8); }, kInvalid, kField,
           "k.shape"},
          {"huge shape",
           [](Request& r) { r.mutable_k()->set_shape(0, std::numeric_limits<int64_t>::max()); },
           kInvalid, kField, "k.shape"},
          {"v of other head_dim",
           [](Request& r) {
             r.mutable_v()->set_shape(3, 16);
             r.mutable_v()->mutable_data()->resize(r.v().data().size() / 2);
           },
           kInvalid, Reason::kUnequalKv, ""},
          {"no predict mode", [](Request& r) { r.set_predict(static_cast<v1::PredictMode>(9)); },
           kInvalid, kField, "predict"},
          {"no ack", [](Request& r) { r.set_ack(static_cast<v1::AckLevel>(2)); }, kInvalid, kField,
           "ack"},
          {"shared", [](Request& r) { r.mutable_blocks(0)->set_block_id(2); }, kPrecondition,
           Reason::kBlockShared, ""},
      });
}

TEST_F(RefusalsTest, Blocks) {
  using Describe = v1::DescribeBlocksRequest;
  Describe describe = WithSession<Describe>();
  describe.mutable_blocks()->add_block_ids(1);
  RunCases(
      *daemon.swap, &Swap::DescribeBlocks, describe,
      std::vector<Case<Describe>>{
          {"no ids", [](auto& r) { r.mutable_blocks()->clear_block_ids(); }, kInvalid, kField, ""},
          {"no such id", [](auto& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid, kField,
           ""},
          {"twice", [](auto& r) { r.mutable_blocks()->add_block_ids(1); }, kInvalid, kField, ""},
          {"no layer", [](auto& r) { r.mutable_blocks()->add_layers(2); }, kInvalid, kField, ""},
      });
  using Find = v1::FindBlocksRequest;
  Find find = WithSession<Find>();
  find.add_tags("x");
  RunCases(
      *daemon.swap, &Swap::FindBlocks, find,
      std::vector<Case<Find>>{
          {"empty tag", [](auto& r) { r.add_tags(""); }, kInvalid, kField, ""},
          {"long tag", [](auto& r) { r.add_tags(std::string(33, 'x')); }, kInvalid, kField, ""},
          {"many tags",
           [](auto& r) {
             for (int i = 0; i < 4096; ++i) r.add_tags("y");
           },
           kInvalid, kField, ""},
          {"no layer", [](auto& r) { r.add_layers(2); }, kInvalid, kField, ""},
      });
  using Drop = v1::DropBlocksRequest;
  Drop drop = WithSession<Drop>();
  drop.mutable_blocks()->add_block_ids(3);
  RunCases(*daemon.swap, &Swap::DropBlocks, drop,
           std::vector<Case<Drop>>{
               {"one is none", [](auto& r) { r.mutable_blocks()->add_block_ids(9); }, kNotFound,
                Reason::kBlockNotFound, ""},
               {"in a table", [](auto& r) { r.mutable_blocks()->add_block_ids(1); }, kPrecondition,
                Reason::kBlockInTable, ""},
               {"no such id", [](auto& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid,
                kField, ""},
           });
  using Fetch = v1::FetchBlocksRequest;
  const auto fetch = [&](const std::function<void(Fetch&)>& spoil, StatusCode code, Reason reason,
                         const std::string& field) {
    Fetch request = WithSession<Fetch>();
    request.mutable_blocks()->add_block_ids(1);
    spoil(request);
    grpc::ClientContext context;
    const auto reader = daemon.swap->FetchBlocks(&context, request);
    v1::FetchBlocksResponse piece;
    EXPECT_FALSE(reader->Read(&piece));
    ExpectRefused(reader->Finish(), code, reason, field);
  };
  fetch([](Fetch& r) { r.clear_session(); }, kInvalid, kField, "session.name");
  fetch([](Fetch& r) { r.mutable_session()->set_epoch(1); }, kAborted, Reason::kFenced, "");
  fetch([](Fetch& r) { r.clear_blocks(); }, kInvalid, kField, "blocks.block_ids");
  fetch([](Fetch& r) { r.mutable_blocks()->add_block_ids(1); }, kInvalid, kField,
        "blocks.block_ids[1]");
  fetch([](Fetch& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid, kField,
        "blocks.block_ids[1]");
  fetch([](Fetch& r) { r.mutable_blocks()->add_layers(2); }, kInvalid, kField, "");
  fetch(
      [](Fetch& r) {
        for (const uint32_t layer : {0, 1, 0}) r.mutable_blocks()->add_layers(layer);
      },
      kInvalid, kField, "blocks.layers");
  // Reserved is not stored.
  fetch([](Fetch& r) { r.mutable_blocks()->add_block_ids(30); }, kNotFound, Reason::kBlockNotFound,
        "");
}

TEST(Refusals, Sessions) {
  DaemonOptions options;
  options.sessions.max_sessions = 1;
  options.sessions.max_tile_runs_per_session = 1;
  options.sessions.host_budget_bytes = 3 * 4096;
  std::atomic<int64_t> clock_seconds{1'000'000};
  options.sessions.now = [&] { return absl::FromUnixSeconds(clock_seconds.load()); };
  Daemon daemon(options);
  Model model(SmallSpec("a"), daemon.Open("a"));
  v1::OpenSessionRequest open;
  *open.mutable_spec() = SmallSpec("b");
  v1::OpenSessionResponse opened;
  ExpectRefused(Invoke(*daemon.session, &SessionStub::OpenSession, open, &opened), kExhausted,
                Reason::kTooManySessions);
  // No slot left: nothing of the batch is stored.
  v1::OffloadBlocksResponse stored;
  ExpectRefused(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1, 2, 3, 4}), &stored),
                kExhausted, Reason::kHostMemory);
  EXPECT_TRUE(
      Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1, 2, 3}), &stored).ok());
  EXPECT_EQ(stored.replaced_blocks(), 0);

  v1::BeginTilesRequest begin;
  *begin.mutable_session() = model.handle;
  *begin.mutable_q() = model.RandomTensor({1, 4, 32});
  v1::BeginTilesResponse run;
  EXPECT_TRUE(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run).ok());
  ExpectRefused(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run), kExhausted,
                Reason::kTooManyRuns);

  clock_seconds += 61;
  daemon.manager().Sweep();
  ExpectRefused(Invoke(*daemon.attention, &Attention::BeginTiles, begin, &run), kPrecondition,
                Reason::kSessionDetached);
}

}  // namespace
}  // namespace sluice
