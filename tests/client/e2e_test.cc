// The client library against a daemon: every RPC once at least, numbers against float64.

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>

#include "client/client.h"
#include "client/decode.h"
#include "client/fetch.h"
#include "client/offload.h"
#include "client/status.h"
#include "client/tensor.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"

namespace sluice::client {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kQueryHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kHeadDim = 32;
constexpr uint32_t kBlockTokens = 8;
constexpr int64_t kBlockElements = kBlockTokens * kKvHeads * kHeadDim;
constexpr int64_t kTokenElements = kKvHeads * kHeadDim;

v1::SessionSpec Spec(const std::string& name) {
  v1::SessionSpec spec;
  spec.set_name(name);
  spec.set_num_layers(kLayers);
  spec.set_num_query_heads(kQueryHeads);
  spec.set_num_kv_heads(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_block_tokens(kBlockTokens);
  spec.set_max_blocks(64);
  spec.mutable_retention()->set_seconds(60);
  return spec;
}

std::vector<uint16_t> RandomBits(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits(count);
  for (uint16_t& element : bits) element = FloatToBf16(normal(generator));
  return bits;
}

// One query head over `tokens` tokens of [token, kv_head, head_dim].
std::vector<double> Attend(absl::Span<const uint16_t> q, absl::Span<const uint16_t> k,
                           absl::Span<const uint16_t> v, int64_t tokens, uint32_t head) {
  const uint32_t kv_head = head / (kQueryHeads / kKvHeads);
  std::vector<double> weights(tokens);
  double sum = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    double dot = 0;
    for (uint32_t i = 0; i < kHeadDim; ++i) {
      dot += static_cast<double>(Bf16ToFloat(q[head * kHeadDim + i])) *
             Bf16ToFloat(k[(token * kKvHeads + kv_head) * kHeadDim + i]);
    }
    weights[token] = std::exp(dot / std::sqrt(kHeadDim));
    sum += weights[token];
  }
  std::vector<double> out(kHeadDim);
  for (int64_t token = 0; token < tokens; ++token) {
    for (uint32_t i = 0; i < kHeadDim; ++i) {
      out[i] += weights[token] / sum * Bf16ToFloat(v[(token * kKvHeads + kv_head) * kHeadDim + i]);
    }
  }
  return out;
}

void ExpectAttention(absl::Span<const uint16_t> out, absl::Span<const uint16_t> q,
                     absl::Span<const uint16_t> k, absl::Span<const uint16_t> v, int64_t tokens) {
  ASSERT_EQ(out.size(), kQueryHeads * kHeadDim);
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const std::vector<double> expected = Attend(q, k, v, tokens, head);
    for (uint32_t i = 0; i < kHeadDim; ++i) {
      ASSERT_NEAR(Bf16ToFloat(out[head * kHeadDim + i]), expected[i],
                  std::max(1e-3, std::abs(expected[i]) / 64))
          << "head " << head << " element " << i;
    }
  }
}

class E2eTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    daemon_ = new DaemonProcess({"--host_budget_bytes=268435456", "--hbm_budget_bytes=536870912"});
  }
  static void TearDownTestSuite() {
    EXPECT_EQ(daemon_->Stop(), 0);
    delete daemon_;
  }

  E2eTest() : client_(*Client::Create({.address = daemon_->address()})) {}

  Session Open() {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    absl::StatusOr<Session> session = client_.OpenSession(Spec(name));
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  }
  // Ids 0..count-1 in every layer, as a prompt; K of layer L is RandomBits(.., 100 + L), V 200 + L.
  void OffloadPrompt(const Session& session, uint32_t count) {
    OffloadWriter writer = session.OffloadStream({});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      OffloadBatch batch(session);
      for (uint32_t id = 0; id < count; ++id) {
        batch.AddBlock(layer, id, 0, absl::StrCat("tag-", id));
      }
      batch.SetKv(RandomBits(count * kBlockElements, 100 + layer),
                  RandomBits(count * kBlockElements, 200 + layer));
      ASSERT_TRUE(writer.Write(&batch).ok());
    }
    const absl::Status status = writer.Finish();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(writer.total().stored_blocks(), count * kLayers);
    EXPECT_EQ(writer.total().predicted_blocks(), count * kLayers);
  }
  void PutSequence(const Session& session, uint32_t id, std::vector<uint32_t> blocks) {
    auto put = session.PutSequence(id, /*generation=*/1, /*base_blocks=*/0, blocks);
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_blocks(), blocks.size());
  }

  static DaemonProcess* daemon_;
  Client client_;
};

DaemonProcess* E2eTest::daemon_ = nullptr;

TEST_F(E2eTest, ServerAndUsage) {
  ASSERT_TRUE(client_.WaitReady(absl::Seconds(10)).ok());
  auto server = client_.GetServer();
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_FALSE(server->version().empty());
  EXPECT_EQ(server->device().kind(), "cpu");
  EXPECT_GT(server->rss_bytes(), 0);
  const Session session = Open();
  auto usage = client_.GetUsage(session.handle().name());
  ASSERT_TRUE(usage.ok()) << usage.status();
  ASSERT_EQ(usage->sessions_size(), 1);
  EXPECT_GT(usage->sessions(0).items_size(), 0);
  EXPECT_TRUE(*client_.CheckHealth("sluice.v1.AttentionService"));
  auto level = client_.SetLogLevel("warning");
  ASSERT_TRUE(level.ok()) << level.status();
  EXPECT_EQ(client_.SetLogLevel(level->previous_level())->previous_level(), "warning");
  EXPECT_EQ(ReasonOf(client_.SetLogLevel("loud").status()), "INVALID_FIELD");
}

TEST_F(E2eTest, UnixSocket) {
  const Client client = *Client::Create({.address = daemon_->unix_address()});
  EXPECT_TRUE(client.GetServer().ok());
}

TEST_F(E2eTest, SessionLifeCycle) {
  const Session session = Open();
  EXPECT_FALSE(session.attached());
  EXPECT_EQ(session.spec().kv_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(session.block_elements(), kBlockElements);
  EXPECT_TRUE(session.GetSession().ok());
  EXPECT_TRUE(session.RenewSession().ok());
  auto sessions = client_.ListAllSessions();
  ASSERT_TRUE(sessions.ok()) << sessions.status();

  const Session again = Open();
  EXPECT_TRUE(again.attached());
  const absl::Status fenced = session.GetSession().status();
  EXPECT_EQ(fenced.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(fenced), "FENCED");

  v1::SessionSpec other = again.spec();
  other.set_head_dim(64);
  EXPECT_EQ(ReasonOf(client_.OpenSession(other).status()), "SESSION_MISMATCH");
  EXPECT_TRUE(again.CloseSession(v1::CLOSE_MODE_DELETE_DATA).ok());
  const absl::Status gone = again.GetSession().status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(gone), "SESSION_NOT_FOUND");
  EXPECT_FALSE(DetailsOf(gone).resource_name.empty());
}

TEST_F(E2eTest, InvalidFieldNamesTheField) {
  v1::SessionSpec spec = Spec("bad");
  spec.set_rank(200);
  const absl::Status status = client_.OpenSession(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
  EXPECT_EQ(MetadataOf(status, "value"), "200") << status;
  EXPECT_NE(MetadataOf(status, "field").find("rank"), std::string::npos) << status;
}

TEST_F(E2eTest, FetchIsBitExact) {
  const Session session = Open();
  OffloadPrompt(session, 3);
  v1::BlockSet blocks;
  for (uint32_t id : {2, 0}) blocks.add_block_ids(id);
  FetchReader reader = session.FetchBlocks(blocks);
  int count = 0;
  while (const FetchedBlock* block = reader.Next()) {
    const uint32_t layer = block->info.layer();
    const std::vector<uint16_t> k = RandomBits(3 * kBlockElements, 100 + layer);
    const std::vector<uint16_t> v = RandomBits(3 * kBlockElements, 200 + layer);
    const int64_t offset = block->info.block_id() * kBlockElements;
    EXPECT_EQ(layer, static_cast<uint32_t>(count / 2));
    EXPECT_EQ(block->info.block_id(), count % 2 == 0 ? 2u : 0u);
    EXPECT_EQ(block->k, absl::MakeConstSpan(k).subspan(offset, kBlockElements));
    EXPECT_EQ(block->v, absl::MakeConstSpan(v).subspan(offset, kBlockElements));
    ++count;
  }
  EXPECT_TRUE(reader.Finish().ok());
  EXPECT_EQ(count, 4);

  blocks.add_block_ids(9);
  FetchReader missing = session.FetchBlocks(blocks);
  EXPECT_EQ(missing.Next(), nullptr);
  const absl::Status status = missing.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "BLOCK_NOT_FOUND");
}

TEST_F(E2eTest, BlocksAreDescribedFoundAndDropped) {
  const Session session = Open();
  OffloadPrompt(session, 3);
  v1::DescribeBlocksRequest describe;
  for (uint32_t id : {1, 5}) describe.mutable_blocks()->add_block_ids(id);
  describe.mutable_blocks()->add_layers(1);
  auto described = session.DescribeBlocks(describe);
  ASSERT_TRUE(described.ok()) << described.status();
  ASSERT_EQ(described->blocks_size(), 2);
  EXPECT_EQ(described->blocks(0).state(), v1::BLOCK_STATE_STORED);
  EXPECT_EQ(described->blocks(0).tag(), "tag-1");
  EXPECT_EQ(described->blocks(1).state(), v1::BLOCK_STATE_ABSENT);
  EXPECT_EQ(session.ListAllBlocks({})->size(), 6u);
  v1::ListBlocksRequest one;
  one.set_page_size(1);
  EXPECT_FALSE(session.ListBlocks(one)->next_page_token().empty());
  v1::FindBlocksRequest find;
  find.add_tags("tag-2");
  EXPECT_EQ(session.FindBlocks(find)->blocks_size(), 2);
  v1::DropBlocksRequest drop;
  drop.mutable_blocks()->add_block_ids(2);
  auto dropped = session.DropBlocks(drop);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(dropped->dropped_blocks(), 2);
  EXPECT_EQ(ReasonOf(session.DropBlocks(drop).status()), "BLOCK_NOT_FOUND");
  drop.set_allow_missing(true);
  EXPECT_EQ(session.DropBlocks(drop)->dropped_blocks(), 0);
}

TEST_F(E2eTest, Sequences) {
  const Session session = Open();
  OffloadPrompt(session, 3);
  PutSequence(session, 0, {0, 1, 2});
  v1::ForkSequenceRequest fork;
  fork.set_source_sequence_id(0);
  fork.set_source_generation(1);
  fork.set_target_sequence_id(5);
  fork.set_target_generation(1);
  fork.set_context_tokens(kBlockTokens + 1);
  auto forked = session.ForkSequence(fork);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_EQ(forked->num_blocks(), 2u);
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(0);
  truncate.set_generation(2);
  truncate.set_context_tokens(kBlockTokens);
  EXPECT_EQ(session.TruncateSequence(truncate)->num_blocks(), 1u);
  EXPECT_EQ(ReasonOf(session.PutSequence(0, /*generation=*/1, 0, {0}).status()),
            "STALE_GENERATION");
  auto sequences = session.ListAllSequences();
  ASSERT_TRUE(sequences.ok()) << sequences.status();
  ASSERT_EQ(sequences->size(), 2u);
  EXPECT_EQ((*sequences)[1].sequence_id(), 5u);
  v1::ListSequencesRequest page;
  page.set_page_size(1);
  EXPECT_FALSE(session.ListSequences(page)->next_page_token().empty());
  v1::ReleaseSequenceRequest release;
  release.add_sequence_ids(0);
  release.add_sequence_ids(5);
  EXPECT_TRUE(session.ReleaseSequence(release).ok());
  EXPECT_EQ(ReasonOf(session.ReleaseSequence(release).status()), "SEQUENCE_NOT_FOUND");
}

TEST_F(E2eTest, DecodeStepAppendsAndAttends) {
  const Session session = Open();
  OffloadPrompt(session, 2);
  PutSequence(session, 0, {0, 1, 2});
  DecodeBatch step(session);
  step.AddSequence(0, 2 * kBlockTokens + 1);
  step.mutable_output()->set_return_lse(true);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<uint16_t> k = RandomBits(2 * kBlockElements, 100 + layer);
    std::vector<uint16_t> v = RandomBits(2 * kBlockElements, 200 + layer);
    const std::vector<uint16_t> q = RandomBits(kQueryHeads * kHeadDim, 300 + layer);
    const std::vector<uint16_t> new_k = RandomBits(kTokenElements, 400 + layer);
    const std::vector<uint16_t> new_v = RandomBits(kTokenElements, 500 + layer);
    step.set_layer(layer);
    step.SetQ(q);
    step.SetKv(new_k, new_v);
    absl::Status status = session.DecodeStep(&step);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(step.SequenceStatus(0).ok()) << step.SequenceStatus(0);
    k.insert(k.end(), new_k.begin(), new_k.end());
    v.insert(v.end(), new_v.begin(), new_v.end());
    ExpectAttention(step.out(), q, k, v, 2 * kBlockTokens + 1);
    EXPECT_EQ(step.lse().size(), kQueryHeads);
    EXPECT_GT(step.response().stats().host_blocks() + step.response().stats().hbm_blocks(), 0);
  }
}

TEST_F(E2eTest, MissingTokensAreTheSequencesOwnError) {
  const Session session = Open();
  OffloadPrompt(session, 1);
  PutSequence(session, 0, {0, 1});
  DecodeBatch step(session);
  step.AddSequence(0, kBlockTokens + 1);
  step.SetQ(RandomBits(kQueryHeads * kHeadDim, 1));
  ASSERT_TRUE(session.DecodeStep(&step).ok());
  const absl::Status status = step.FirstSequenceError();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "TOKENS_MISSING") << status;
  EXPECT_FALSE(MetadataOf(status, "position").empty());
}

TEST_F(E2eTest, DecodeStreamGivesTheBytesOfDecodeStep) {
  const Session session = Open();
  OffloadPrompt(session, 2);
  PutSequence(session, 0, {0, 1});
  DecodeBatch step(session);
  step.AddSequence(0, 2 * kBlockTokens);
  step.mutable_output()->set_dtype(v1::DTYPE_F32);
  std::vector<std::string> unary;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    step.set_layer(layer);
    step.SetQ(RandomBits(kQueryHeads * kHeadDim, layer));
    ASSERT_TRUE(session.DecodeStep(&step).ok());
    ASSERT_TRUE(step.FirstSequenceError().ok()) << step.FirstSequenceError();
    EXPECT_EQ(step.out_f32().size(), kQueryHeads * kHeadDim);
    EXPECT_TRUE(step.out().empty());
    unary.push_back(step.response().out().data());
  }
  DecodeStream stream = session.OpenDecodeStream();
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    step.set_layer(layer);
    step.SetQ(RandomBits(kQueryHeads * kHeadDim, layer));
    ASSERT_TRUE(stream.Send(layer, &step).ok());
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    absl::StatusOr<DecodeReply> reply = stream.Receive(&step);
    ASSERT_TRUE(reply.ok()) << reply.status();
    ASSERT_TRUE(reply->status.ok()) << reply->status;
    EXPECT_EQ(reply->request_id, layer);
    EXPECT_EQ(step.response().out().data(), unary[layer]);
  }
  // A step that fails whole leaves the stream as it was.
  step.set_layer(kLayers);
  ASSERT_TRUE(stream.Send(7, &step).ok());
  absl::StatusOr<DecodeReply> reply = stream.Receive(&step);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(ReasonOf(reply->status), "INVALID_FIELD");
  EXPECT_TRUE(stream.Finish().ok());
}

TEST_F(E2eTest, ScoresAndProjectedKeys) {
  const Session session = Open();
  OffloadPrompt(session, 4);
  v1::ScoreBlocksRequest request;
  for (uint32_t id = 0; id < 4; ++id) request.mutable_blocks()->add_block_ids(id);
  request.set_top_k(2);
  auto scores = session.ScoreBlocks(request, RandomBits(kQueryHeads * kHeadDim, 1));
  ASSERT_TRUE(scores.ok()) << scores.status();
  ASSERT_EQ(scores->scores_size(), 4);
  EXPECT_EQ(scores->top_size(), 2);
  double sum = 0;
  for (float score : scores->scores()) sum += score;
  EXPECT_NEAR(sum, 1.0, 1e-4);  // MASS, the default
  v1::ReadProjectedKeysRequest read;
  read.add_block_ids(3);
  auto keys = session.ReadProjectedKeys(read);
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(Bits(keys->projected_keys()).size(), kKvHeads * kBlockTokens * session.spec().rank());
  EXPECT_TRUE(keys->predicted(0));
}

TEST_F(E2eTest, TilesAgreeWithDecode) {
  const Session session = Open();
  OffloadPrompt(session, 3);
  const std::vector<uint16_t> q = RandomBits(kQueryHeads * kHeadDim, 1);
  auto begun = session.BeginTiles({}, q);
  ASSERT_TRUE(begun.ok()) << begun.status();
  for (uint64_t tile = 0; tile < 3; ++tile) {
    v1::StepTileRequest step;
    step.set_run_id(begun->run_id());
    step.set_tile_index(tile);
    step.add_rows()->add_block_ids(static_cast<uint32_t>(tile));
    EXPECT_TRUE(session.StepTile(step)->folded());
    EXPECT_FALSE(session.StepTile(step)->folded());
  }
  v1::StepTileRequest late;
  late.set_run_id(begun->run_id());
  late.set_tile_index(7);
  late.add_rows();
  EXPECT_EQ(ReasonOf(session.StepTile(late).status()), "TILE_OUT_OF_ORDER");
  v1::FinalizeTilesRequest finalize;
  finalize.set_run_id(begun->run_id());
  finalize.set_return_state(true);
  auto result = session.FinalizeTiles(finalize);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectAttention(Bits(result->out()), q, RandomBits(3 * kBlockElements, 100),
                  RandomBits(3 * kBlockElements, 200), 3 * kBlockTokens);
  EXPECT_EQ(Floats(result->state_m()).size(), kQueryHeads);
  EXPECT_EQ(ReasonOf(session.FinalizeTiles(finalize).status()), "RUN_NOT_FOUND");
  v1::AbortTilesRequest abort;
  abort.set_run_id(begun->run_id());
  EXPECT_TRUE(session.AbortTiles(abort).ok());
}

TEST_F(E2eTest, OffloadUnaryReplacesAndRefusesWhole) {
  const Session session = Open();
  OffloadBatch batch(session);
  batch.AddBlock(0, 1);
  batch.SetKv(RandomBits(kBlockElements, 1), RandomBits(kBlockElements, 2));
  EXPECT_EQ(session.OffloadBlocks(batch)->replaced_blocks(), 0);
  EXPECT_EQ(session.OffloadBlocks(batch)->replaced_blocks(), 1);
  batch.AddBlock(0, 1);
  const absl::Status status = session.OffloadBlocks(batch).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(E2eTest, FullMemoryIsToldInTheAck) {
  v1::SessionSpec spec = Spec("full");
  spec.set_host_budget_bytes(2 * 4096);
  const Session session = *client_.OpenSession(spec);
  OffloadBatch batch(session);
  for (uint32_t id = 0; id < 3; ++id) batch.AddBlock(0, id);
  batch.SetKv(RandomBits(3 * kBlockElements, 1), RandomBits(3 * kBlockElements, 2));
  OffloadWriter writer = session.OffloadStream({});
  ASSERT_TRUE(writer.Write(&batch).ok());
  const absl::Status status = writer.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "HOST_MEMORY") << status;
  EXPECT_TRUE(session.ListAllBlocks({})->empty());
}

}  // namespace
}  // namespace sluice::client
