// What the daemon refuses: every case by its code, its reason and its details; and that no reason is left out.

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/rpc/status.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using grpc::StatusCode;
using Attention = v1::AttentionService::Stub;
using Sequence = v1::SequenceService::Stub;
using SessionStub = v1::SessionService::Stub;
using Swap = v1::SwapService::Stub;

// A request that is right but for one thing.
template <typename Request>
struct Case {
  std::string name;
  std::function<void(Request&)> spoil;
  StatusCode code;
  Reason reason;
  std::string field;
};

template <typename Stub, typename Request, typename Response>
void RunCases(Stub& stub,
              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& right, const std::vector<Case<Request>>& cases) {
  for (const Case<Request>& c : cases) {
    SCOPED_TRACE(c.name);
    Request request = right;
    c.spoil(request);
    Response response;
    ExpectRefused(Invoke(stub, method, request, &response), c.code, c.reason, c.field);
  }
}

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
constexpr StatusCode kNotFound = StatusCode::NOT_FOUND;
constexpr StatusCode kPrecondition = StatusCode::FAILED_PRECONDITION;
constexpr StatusCode kAborted = StatusCode::ABORTED;
constexpr StatusCode kExhausted = StatusCode::RESOURCE_EXHAUSTED;
constexpr Reason kField = Reason::kInvalidField;

// A session "a": blocks 1, 2, 3 in both layers; sequence 0 is 1, 2; sequence 1 is 2, 30, of which 30 is only reserved.
class RefusalsTest : public ::testing::Test {
 protected:
  RefusalsTest() : model(SmallSpec("a"), daemon.Open("a")) {
    for (const uint32_t layer : {0, 1}) {
      v1::OffloadBlocksResponse stored;
      EXPECT_TRUE(
          Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(layer, {1, 2, 3}), &stored)
              .ok());
    }
    Put(0, {1, 2});
    Put(1, {2, 30});
  }
  void Put(uint32_t sequence_id, const std::vector<uint32_t>& block_ids) {
    v1::PutSequenceRequest put;
    *put.mutable_session() = model.handle;
    put.mutable_update()->set_sequence_id(sequence_id);
    put.mutable_update()->set_generation(5);
    for (const uint32_t id : block_ids) put.mutable_update()->add_block_ids(id);
    v1::PutSequenceResponse response;
    EXPECT_TRUE(Invoke(*daemon.sequence, &Sequence::PutSequence, put, &response).ok());
  }
  template <typename Request>
  Request WithSession() {
    Request request;
    *request.mutable_session() = model.handle;
    return request;
  }

  Daemon daemon;
  Model model;
};

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
  RunCases(*daemon.session, &SessionStub::ListSessions, ListSessions(),
           std::vector<Case<ListSessions>>{
               {"large page", [](auto& r) { r.set_page_size(1001); }, kInvalid, kField, "page_size"},
               {"negative page", [](auto& r) { r.set_page_size(-1); }, kInvalid, kField,
                "page_size"},
               {"bad token", [](auto& r) { r.set_page_token("x"); }, kInvalid, kField,
                "page_token"},
           });
  using ListSequences = v1::ListSequencesRequest;
  RunCases(*daemon.sequence, &Sequence::ListSequences, WithSession<ListSequences>(),
           std::vector<Case<ListSequences>>{
               {"large page", [](auto& r) { r.set_page_size(1001); }, kInvalid, kField, "page_size"},
               {"bad token", [](auto& r) { r.set_page_token("e30="); }, kInvalid, kField,
                "page_token"},
           });
  using ListBlocks = v1::ListBlocksRequest;
  RunCases(*daemon.swap, &Swap::ListBlocks, WithSession<ListBlocks>(),
           std::vector<Case<ListBlocks>>{
               {"large page", [](auto& r) { r.set_page_size(10'001); }, kInvalid, kField,
                "page_size"},
               {"bad token", [](auto& r) { r.set_page_token("\u00e9"); }, kInvalid, kField,
                "page_token"},
               {"no tier", [](auto& r) { r.set_tier(static_cast<v1::Tier>(7)); }, kInvalid, kField,
                "tier"},
               {"no layer", [](auto& r) { r.add_layers(2); }, kInvalid, kField, ""},
           });
  v1::SetLogLevelRequest level;
  v1::SetLogLevelResponse level_response;
  ExpectRefused(
      Invoke(*daemon.admin, &v1::AdminService::Stub::SetLogLevel, level, &level_response), kInvalid,
      kField, "level");
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
          {"twice", [](Put& r) {
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
  RunCases(*daemon.sequence, &Sequence::TruncateSequence, truncate,
           std::vector<Case<Truncate>>{
               {"none", [](Truncate& r) { r.set_sequence_id(7); }, kNotFound,
                Reason::kSequenceNotFound, ""},
               {"old", [](Truncate& r) { r.set_generation(4); }, kAborted, Reason::kStaleGeneration,
                ""},
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
          {"v of other head_dim", [](Request& r) {
             r.mutable_v()->set_shape(3, 16);
             r.mutable_v()->mutable_data()->resize(r.v().data().size() / 2);
           },
           kInvalid, Reason::kUnequalKv, ""},
          {"no predict mode",
           [](Request& r) { r.set_predict(static_cast<v1::PredictMode>(9)); }, kInvalid, kField,
           "predict"},
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
  RunCases(*daemon.swap, &Swap::DescribeBlocks, describe,
           std::vector<Case<Describe>>{
               {"no ids", [](auto& r) { r.mutable_blocks()->clear_block_ids(); }, kInvalid, kField,
                ""},
               {"no such id", [](auto& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid,
                kField, ""},
               {"twice", [](auto& r) { r.mutable_blocks()->add_block_ids(1); }, kInvalid, kField,
                ""},
               {"no layer", [](auto& r) { r.mutable_blocks()->add_layers(2); }, kInvalid, kField,
                ""},
           });
  using Find = v1::FindBlocksRequest;
  Find find = WithSession<Find>();
  find.add_tags("x");
  RunCases(*daemon.swap, &Swap::FindBlocks, find,
           std::vector<Case<Find>>{
               {"empty tag", [](auto& r) { r.add_tags(""); }, kInvalid, kField, ""},
               {"long tag", [](auto& r) { r.add_tags(std::string(33, 'x')); }, kInvalid, kField,
                ""},
               {"many tags", [](auto& r) {
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
  fetch([](Fetch& r) {
    for (const uint32_t layer : {0, 1, 0}) r.mutable_blocks()->add_layers(layer);
  },
        kInvalid, kField, "blocks.layers");
  // Reserved is not stored.
  fetch([](Fetch& r) { r.mutable_blocks()->add_block_ids(30); }, kNotFound, Reason::kBlockNotFound,
        "");
}

TEST_F(RefusalsTest, Scores) {
  using Score = v1::ScoreBlocksRequest;
  Score score = WithSession<Score>();
  score.mutable_blocks()->add_block_ids(1);
  *score.mutable_q() = model.RandomTensor({4, 32});
  RunCases(
      *daemon.attention, &Attention::ScoreBlocks, score,
      std::vector<Case<Score>>{
          {"no layer", [](auto& r) { r.set_layer(2); }, kInvalid, kField, "layer"},
          {"no target", [](auto& r) { r.clear_target(); }, kInvalid, kField, "target"},
          {"no blocks", [](auto& r) { r.mutable_blocks()->clear_block_ids(); }, kInvalid, kField,
           ""},
          {"no such id", [](auto& r) { r.mutable_blocks()->add_block_ids(64); }, kInvalid, kField,
           ""},
          {"absent block", [](auto& r) { r.mutable_blocks()->add_block_ids(50); }, kNotFound,
           Reason::kBlockNotFound, ""},
          {"no sequence", [](auto& r) { r.set_sequence_id(7); }, kNotFound,
           Reason::kSequenceNotFound, ""},
          {"sequence out of range", [](auto& r) { r.set_sequence_id(8); }, kInvalid, kField,
           "sequence_id"},
          {"no kind", [](auto& r) { r.set_kind(static_cast<v1::ScoreKind>(9)); }, kInvalid, kField,
           "kind"},
          {"no q", [](auto& r) { r.clear_q(); }, kInvalid, kField, "q"},
          {"q of another shape", [](auto& r) { r.mutable_q()->set_shape(0, 8); }, kInvalid, kField,
           "q.shape"},
          {"scale is no number",
           [](auto& r) { r.set_scale(std::numeric_limits<float>::quiet_NaN()); }, kInvalid, kField,
           "scale"},
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
          {"one block twice written", [this](Request& r) {
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
               {"q of odd length", [](Begin& r) {
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
  RunCases(*daemon.attention, &Attention::StepTile, step,
           std::vector<Case<Step>>{
               {"no run", [](Step& r) { r.set_run_id(999); }, kNotFound, Reason::kRunNotFound, ""},
               {"out of order", [](Step& r) { r.set_tile_index(1); }, kPrecondition,
                Reason::kTileOutOfOrder, ""},
               {"few rows", [](Step& r) { r.mutable_rows()->RemoveLast(); }, kInvalid, kField,
                "rows"},
               {"many blocks", [](Step& r) {
                  for (uint32_t id = 0; id < 9; ++id) r.mutable_rows(1)->add_block_ids(id);
                },
                kInvalid, kField, ""},
               {"no such id", [](Step& r) { r.mutable_rows(1)->add_block_ids(64); }, kInvalid,
                kField, ""},
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
  ExpectRefused(
      Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1, 2, 3, 4}), &stored),
      kExhausted, Reason::kHostMemory);
  EXPECT_TRUE(Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(0, {1, 2, 3}), &stored).ok());
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
    EXPECT_TRUE(Invoke(*daemon.admin, &v1::AdminService::Stub::GetUsage, v1::GetUsageRequest(),
                       &usage)
                    .ok());
    return usage.inflight_bytes();
  };
  // Replaced blocks keep their A_g until the new ones are there; with all ids in use, there is room for a second A_g
  // of each and for no third one.
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
  ASSERT_TRUE(Eventually([&] {
    return inflight() >= bytes + 2 * static_cast<int64_t>(score.ByteSizeLong());
  }));
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

// Every reason of server/base/error.h is met by a test above, or where is said. Runs when all tests have.
class EveryReasonIsMet : public ::testing::Environment {
 public:
  void TearDown() override {
    if (::testing::GTEST_FLAG(filter) != "*") return;
    const std::vector<std::string> met = ReasonsMet();
    // Of error.h; INTERNAL is the last one.
    for (int i = 0; i <= static_cast<int>(Reason::kInternal); ++i) {
      const auto reason = static_cast<Reason>(i);
      if (reason == Reason::kInflightBytes || reason == Reason::kMessageTooLarge) continue;  // limits_test
      if (reason == Reason::kDeadlineExceeded || reason == Reason::kShuttingDown) continue;  // stream_test
      EXPECT_NE(std::find(met.begin(), met.end(), std::string(ReasonName(reason))), met.end())
          << ReasonName(reason) << " is met by no test";
    }
  }
};
const auto* const kEveryReasonIsMet = ::testing::AddGlobalTestEnvironment(new EveryReasonIsMet);

}  // namespace
}  // namespace sluice
