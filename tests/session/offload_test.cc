#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Offload : public SessionFixture {
 protected:
  static std::vector<OffloadBlock> Blocks(uint32_t layer, uint32_t first, uint32_t count) {
    std::vector<OffloadBlock> blocks;
    for (uint32_t i = 0; i < count; ++i) blocks.push_back({layer, first + i, 0, ""});
    return blocks;
  }
  Tokens RandomBlocks(int64_t count) { return RandomTokens(count * session_->spec().block_tokens); }
};

TEST_F(Offload, PredictsAsAsked) {
  Open(SmallSpec());
  const Tokens wire = RandomBlocks(2);
  const int64_t block = 4 * 2 * 32;
  OffloadResult result;
  for (const PredictMode mode : {PredictMode::kRequired, PredictMode::kBestEffort}) {
    ASSERT_TRUE(OffloadBlocks({{0, 3, 0, ""}, {1, 9, 2, ""}}, wire, mode, &result).ok());
    EXPECT_EQ(result.stored_blocks, 2);
    EXPECT_EQ(result.predicted_blocks, 2);
    EXPECT_EQ(result.stored_bytes, 2 * 4096);
    ExpectProjected(*ReadProjected(0, {3}), 0, &wire.k[0], 4);
    ExpectProjected(*ReadProjected(1, {9}), 0, &wire.k[block], 2);
  }
  EXPECT_EQ(result.replaced_blocks, 2);
  ASSERT_TRUE(OffloadBlocks({{0, 3, 0, ""}, {1, 9, 2, ""}}, wire, PredictMode::kOff, &result).ok());
  EXPECT_EQ(result.predicted_blocks, 0);
  EXPECT_EQ(result.replaced_blocks, 2);
  EXPECT_FALSE(Describe(0, 3).predicted);
  WaitUntilQuiet();
  EXPECT_EQ(Item("a_g").used_bytes, 0) << "the rows went back";
  const auto keys = ReadProjected(0, {3});
  ASSERT_TRUE(keys.ok());
  EXPECT_EQ(keys->predicted[0], 0);
  EXPECT_EQ(keys->rows, Bits(keys->rows.size(), 0));
}

TEST_F(Offload, WithoutMemoryForAgRequiredIsRefusedAndBestEffortIsUnpredicted) {
  MakeManager({.max_message_bytes = 1});
  SessionSpec spec = SmallSpec();
  spec.num_layers = 1;
  spec.max_blocks = 4;
  Open(spec);
  EXPECT_EQ(Item("a_g_replacement").reserved_bytes, 2 * 2 * 4 * 8 * 2)
      << "two batches of one block";
  const Tokens wire = RandomBlocks(4);
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 0, 4), wire).ok());
  {
    StreamGate reader(*attention_stream_);
    ASSERT_TRUE(OffloadBlocks(Blocks(0, 0, 1), RandomBlocks(1)).ok());
    const Tokens other = RandomBlocks(2);
    const absl::Status status = OffloadBlocks(Blocks(0, 2, 2), other);
    EXPECT_REASON(status, StatusCode::kResourceExhausted, "PREDICTION_MEMORY");
    EXPECT_TRUE(status.GetPayload("sluice/retry_ms").has_value());
    EXPECT_EQ(MetaOf(status, "need_rows"), "2");
    EXPECT_EQ(MetaOf(status, "free_rows"), "1");
    EXPECT_TRUE(Describe(0, 2).predicted);
    ASSERT_TRUE(OffloadBlocks(Blocks(0, 1, 1), RandomBlocks(1)).ok())
        << "the one row was given back";
    OffloadResult result;
    ASSERT_TRUE(OffloadBlocks(Blocks(0, 2, 1), other, PredictMode::kBestEffort, &result).code() ==
                StatusCode::kInvalidArgument)
        << "two blocks of bytes for one block";
    ASSERT_TRUE(
        OffloadBlocks(Blocks(0, 2, 1), Slice(other, 0, 4), PredictMode::kBestEffort, &result).ok());
    EXPECT_EQ(result.predicted_blocks, 0);
    EXPECT_FALSE(Describe(0, 2).predicted);
  }
  WaitUntilQuiet();
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 2, 2), RandomBlocks(2)).ok()) << "the readers are gone";
  EXPECT_TRUE(Describe(0, 2).predicted);
}

TEST_F(Offload, AMachineThatGivesNoMemoryForAgIsTold) {
  SessionSpec spec = SmallSpec();
  spec.num_kv_heads = 4;
  spec.block_tokens = 256;
  spec.rank = 32;
  spec.num_layers = 1;
  Open(spec);
  // Rows are of 64 KiB, committed 2 MiB at a time.
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 0, 32), RandomBlocks(32)).ok());
  const Tokens wire = RandomBlocks(2);
  const int64_t host_bytes = HostBytes();
  device_->commits_left = 0;
  EXPECT_REASON(OffloadBlocks(Blocks(0, 32, 2), wire), StatusCode::kResourceExhausted,
                "DEVICE_MEMORY");
  EXPECT_EQ(HostBytes(), host_bytes);
  EXPECT_EQ(Describe(0, 32).state, BlockState::kAbsent);
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 32, 2), wire, PredictMode::kBestEffort).ok());
  EXPECT_FALSE(Describe(0, 32).predicted);
  device_->commits_left = 100;
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 32, 2), wire).ok());
  EXPECT_TRUE(Describe(0, 33).predicted);
}

TEST_F(Offload, ABatchBecomesVisibleAtOnePoint) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadBlocks(Blocks(0, 0, 2), RandomBlocks(2)).ok());
  const uint64_t old_version = Describe(0, 1).version;
  Waitable<OffloadCall> call;
  const Tokens wire = RandomBlocks(3);
  const std::vector<OffloadBlock> blocks = {{1, 5, 0, "t"}, {0, 1, 0, "t"}, {0, 7, 0, "t"}};
  call.blocks = blocks;
  call.k = View(wire.k);
  call.v = View(wire.v);
  StreamGate gate(*ingest_stream_);
  session_->Offload(&call);
  EXPECT_FALSE(call.IsDoneWithin(absl::Milliseconds(20)));
  EXPECT_EQ(Describe(1, 5).state, BlockState::kAbsent);
  EXPECT_EQ(Describe(0, 1).version, old_version);
  EXPECT_TRUE(session_->FindBlocks(std::vector<std::string>{"t"}, {})->empty());
  gate.Open();
  ASSERT_TRUE(call.Wait().ok());
  EXPECT_EQ(Describe(1, 5).state, BlockState::kStored);
  EXPECT_GT(Describe(0, 1).version, old_version);
  EXPECT_EQ(session_->FindBlocks(std::vector<std::string>{"t"}, {})->size(), 3u);
  EXPECT_EQ(call.result.replaced_blocks, 1);
}

TEST_F(Offload, WhatIsMalformedIsRefusedWholeAndStoresNothing) {
  Open(SmallSpec());
  const Tokens wire = RandomBlocks(2);
  const auto refused = [&](std::vector<OffloadBlock> blocks, const char* field,
                           const char* value = nullptr) {
    const absl::Status status = OffloadBlocks(blocks, wire);
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    EXPECT_EQ(MetaOf(status, "field"), field) << status;
    if (value != nullptr) {
      EXPECT_EQ(MetaOf(status, "value"), value);
    }
  };
  refused({}, "blocks");
  refused({{0, 0, 0, ""}, {2, 0, 0, ""}}, "blocks.layer", "2");
  refused({{0, 0, 0, ""}, {0, 64, 0, ""}}, "blocks.block_id", "64");
  refused({{0, 0, 0, ""}, {0, 1, 5, ""}}, "blocks.valid_tokens", "5");
  refused({{0, 0, 0, ""}, {0, 1, 0, "123456789012345678901234567890123"}}, "blocks.tag");
  refused({{0, 0, 0, ""}}, "k.data");
  refused(std::vector<OffloadBlock>(65'537, OffloadBlock{}), "blocks");
  const absl::Status twice = OffloadBlocks({{1, 3, 0, ""}, {1, 3, 0, ""}}, wire);
  EXPECT_REASON(twice, StatusCode::kInvalidArgument, "DUPLICATE_BLOCK");
  EXPECT_EQ(MetaOf(twice, "layer"), "1");
  EXPECT_EQ(MetaOf(twice, "block_id"), "3");

  Waitable<OffloadCall> call;
  const std::vector<OffloadBlock> blocks = Blocks(0, 0, 2);
  call.blocks = blocks;
  const auto with = [&](TensorView k, TensorView v) {
    call.k = k;
    call.v = v;
    session_->Offload(&call);
    return call.Wait();
  };
  const auto field = [&](TensorView k, TensorView v) {
    const absl::Status status = with(k, v);
    EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD");
    return MetaOf(status, "field");
  };
  TensorView k = View(wire.k), v = View(wire.v);
  EXPECT_EQ(field({}, v), "k");
  EXPECT_EQ(field(k, {}), "v");
  TensorView odd = k;
  odd.dtype = DType::kFp16;
  EXPECT_EQ(field(odd, v), "k.dtype");
  odd.dtype_known = false;
  EXPECT_EQ(field(odd, v), "k.dtype");
  odd = v;
  odd.bytes -= 2;
  EXPECT_EQ(field(k, odd), "v.data");
  const int64_t right[] = {2, 4, 2, 32}, narrow[] = {2, 4, 2, 16}, swapped[] = {2, 2, 4, 32};
  k.shape = right;
  v.shape = swapped;
  EXPECT_EQ(field(k, v), "v.shape");
  v.shape = narrow;
  const absl::Status unequal = with(k, v);
  EXPECT_REASON(unequal, StatusCode::kInvalidArgument, "UNEQUAL_KV");
  EXPECT_EQ(MetaOf(unequal, "value"), "16");
  EXPECT_EQ(MetaOf(unequal, "allowed"), "32");
  k.shape = narrow;
  EXPECT_EQ(field(k, v), "k.shape");
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(session_->Info().num_blocks, 0);
  k.shape = v.shape = right;
  EXPECT_TRUE(with(k, v).ok()) << "the call can be used again";
}

TEST_F(Offload, TokensBehindTheValidOnesAreZeroAndNeverCount) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(3);
  // OffloadTokens fills the rest of the block with NaN.
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  const auto back = Fetch(0, {0});
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(Slice(*back, 0, 3), tokens);
  EXPECT_EQ(Slice(*back, 3, 4), (Tokens{Bits(64, 0), Bits(64, 0)}));
  ExpectProjected(*ReadProjected(0, {0}), 0, back->k.data(), 3);
  EXPECT_EQ(Describe(0, 0).valid_tokens, 3u);
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  const Bits q = RandomQ(1);
  ASSERT_TRUE(Step(0, Seq(0, 1, 3), q, nullptr).ok());
  ExpectNear(call_.out, 0, Reference(q, 0, tokens, 3));
}

TEST_F(Offload, TagsAreFoundReplacedAndDropped) {
  Open(SmallSpec());
  const std::string binary("\0\xff tag of thirty-two bytes, yes!", 32);
  ASSERT_TRUE(
      OffloadBlocks({{1, 5, 0, "a"}, {0, 9, 0, "a"}, {0, 2, 0, binary}}, RandomBlocks(3)).ok());
  const auto find = [&](std::vector<std::string> tags, std::vector<uint32_t> layers) {
    std::vector<std::pair<uint32_t, uint32_t>> found;
    const auto blocks = session_->FindBlocks(tags, layers);
    EXPECT_TRUE(blocks.ok()) << blocks.status();
    if (!blocks.ok()) return found;
    for (const BlockInfo& block : *blocks) found.emplace_back(block.layer, block.block_id);
    return found;
  };
  using P = std::pair<uint32_t, uint32_t>;
  EXPECT_THAT(find({"a"}, {}), ElementsAre(P{0, 9}, P{1, 5}));
  EXPECT_THAT(find({binary, "a", "none"}, {0}), ElementsAre(P{0, 2}, P{0, 9}));
  EXPECT_THAT(find({"a", "a"}, {1, 1}), ElementsAre(P{1, 5}, P{1, 5}));
  EXPECT_EQ(Describe(0, 2).tag, binary);
  ASSERT_TRUE(OffloadBlocks({{0, 9, 0, "b"}, {0, 2, 0, ""}}, RandomBlocks(2)).ok());
  EXPECT_THAT(find({"a"}, {}), ElementsAre(P{1, 5}));
  EXPECT_THAT(find({"b"}, {}), ElementsAre(P{0, 9}));
  EXPECT_THAT(find({binary}, {}), ElementsAre());
  const std::vector<uint32_t> five = {5};
  ASSERT_TRUE(session_->DropBlocks({{}, five}, true).ok());
  EXPECT_THAT(find({"a"}, {}), ElementsAre());
  const auto reason = [&](std::vector<std::string> tags, std::vector<uint32_t> layers) {
    return MetaOf(session_->FindBlocks(tags, layers).status(), "field");
  };
  EXPECT_EQ(reason({}, {}), "tags");
  EXPECT_EQ(reason({""}, {}), "tags");
  EXPECT_EQ(reason({std::string(33, 'x')}, {}), "tags");
  EXPECT_EQ(reason(std::vector<std::string>(4097, "x"), {}), "tags");
  EXPECT_EQ(reason({"a"}, {2}), "layers");
}

TEST_F(Offload, FindAndListAreBoundedHoweverManyBlocksThereAre) {
  SessionSpec spec = SmallSpec();
  spec.num_layers = 3;
  spec.num_query_heads = spec.num_kv_heads = 1;
  spec.head_dim = 16;
  spec.block_tokens = 1;
  spec.rank = 1;
  spec.max_blocks = 40'000;
  Open(spec);
  std::vector<OffloadBlock> blocks;
  for (uint32_t id = 0; id < 40'000; ++id) blocks.push_back({0, id, 0, "all"});
  const Tokens wire = RandomBlocks(40'000);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (OffloadBlock& block : blocks) block.layer = layer;
    ASSERT_TRUE(OffloadBlocks(blocks, wire).ok());
  }
  const std::vector<std::string> tags = {"all"};
  EXPECT_REASON(session_->FindBlocks(tags, {}).status(), StatusCode::kResourceExhausted,
                "MESSAGE_TOO_LARGE");
  EXPECT_EQ(session_->FindBlocks(tags, std::vector<uint32_t>{1})->size(), 40'000u);
  EXPECT_EQ(session_->FindBlocks(tags, std::vector<uint32_t>{2})->size(), 0u);
  // A tier that no block is in: pages may be empty, and end.
  Session::BlockCursor cursor;
  int pages = 0;
  for (bool more = true; more; ++pages) {
    ASSERT_LT(pages, 10);
    const auto page = session_->ListBlocks({}, Tier::kDisk, cursor, 100);
    ASSERT_TRUE(page.ok());
    EXPECT_TRUE(page->blocks.empty());
    more = page->more;
    cursor = page->next;
  }
  EXPECT_EQ(pages, 2);
  int64_t seen = 0;
  cursor = {};
  for (bool more = true; more;) {
    const auto page = session_->ListBlocks(std::vector<uint32_t>{1, 2}, Tier::kHost, cursor, 999);
    ASSERT_TRUE(page.ok());
    for (const BlockInfo& block : page->blocks) {
      EXPECT_EQ(block.layer, 1u);
      EXPECT_EQ(block.block_id, seen++);
    }
    more = page->more;
    cursor = page->next;
  }
  EXPECT_EQ(seen, 40'000);
  EXPECT_FALSE(session_->ListBlocks({}, Tier::kNone, {UINT32_MAX, UINT32_MAX}, 10)->more);
}

TEST_F(Offload, AFullStoreRefusesAndLosesNothing) {
  for (const bool daemon : {false, true}) {
    SCOPED_TRACE(daemon ? "the daemon's budget" : "the session's budget");
    MakeManager({.host_budget_bytes = daemon ? 8 * 4096 : 1 << 30});
    SessionSpec spec = SmallSpec();
    if (!daemon) spec.host_budget_bytes = 8 * 4096;
    Open(spec);
    const Tokens tokens = RandomBlocks(8);
    ASSERT_TRUE(OffloadBlocks(Blocks(0, 0, 6), Slice(tokens, 0, 24)).ok());
    const absl::Status status = OffloadBlocks(Blocks(0, 6, 3), RandomBlocks(3));
    EXPECT_REASON(status, StatusCode::kResourceExhausted, "HOST_MEMORY");
    EXPECT_EQ(MetaOf(status, "need_bytes"), "12288");
    EXPECT_EQ(MetaOf(status, "free_bytes"), "8192");
    EXPECT_EQ(MetaOf(status, "budget_bytes"), "32768");
    EXPECT_FALSE(status.GetPayload("sluice/retry_ms").has_value()) << "a retry would not help";
    EXPECT_EQ(HostBytes(), 6 * 4096);
    EXPECT_EQ(Item("a_g").used_bytes, 6 * 128);
    ASSERT_TRUE(OffloadBlocks(Blocks(0, 6, 2), Slice(tokens, 24, 32)).ok()) << "to the last slot";
    EXPECT_REASON(OffloadBlocks(Blocks(0, 0, 1), RandomBlocks(1)), StatusCode::kResourceExhausted,
                  "HOST_MEMORY")
        << "replacing takes a second slot";
    EXPECT_REASON(Put(0, 1, 0, Ids(0, 1)), StatusCode::kResourceExhausted, "HOST_MEMORY")
        << "layer 1 has no slot";
    EXPECT_EQ(*Fetch(0, Ids(0, 8)), tokens) << "all is as it was";
    const std::vector<uint32_t> layer = {0}, id = {7};
    {
      StreamGate reader(*fetch_stream_);
      ASSERT_TRUE(session_->DropBlocks({layer, id}, false).ok());
      const absl::Status limbo = OffloadBlocks(Blocks(0, 9, 1), RandomBlocks(1));
      EXPECT_REASON(limbo, StatusCode::kResourceExhausted, "HOST_MEMORY");
      EXPECT_TRUE(limbo.GetPayload("sluice/retry_ms").has_value()) << "free once it is read";
      reader.WaitUntilPassed();
    }
    WaitUntilQuiet();
    EXPECT_TRUE(OffloadBlocks(Blocks(0, 9, 1), RandomBlocks(1)).ok());
  }
}

TEST_F(Offload, AReservedBlockLendsItsSlotWhenTheStoreIsExactlyFull) {
  SessionSpec spec = SmallSpec();
  spec.host_budget_bytes = 4 * 4096;
  Open(spec);
  ASSERT_TRUE(Put(0, 1, 0, {10, 11}).ok());
  EXPECT_EQ(HostBytes(), 4 * 4096);
  const Tokens tokens = RandomTokens(6);
  StreamGate gate(*ingest_stream_);
  Waitable<OffloadCall> offload;
  Tokens wire = tokens;
  wire.k.resize(8 * 64);
  wire.v.resize(8 * 64);
  const std::vector<OffloadBlock> blocks = {{0, 10, 4, ""}, {0, 11, 2, ""}};
  offload.blocks = blocks;
  offload.k = View(wire.k);
  offload.v = View(wire.v);
  session_->Offload(&offload);
  EXPECT_EQ(Describe(0, 11).state, BlockState::kReserved);
  // A step that writes the block waits for the offload; one of another layer need not.
  const Tokens next = RandomTokens(1);
  const Bits q = RandomQ(1);
  sequences_ = {Seq(0, 1, 7)};
  Fill(call_, 0, q, &next);
  ASSERT_TRUE(Put(1, 1, 0, {10, 11}).ok()) << "the block is there, and shared";
  ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{1}, true).ok());
  session_->Submit(&call_);
  EXPECT_FALSE(call_.IsDoneWithin(absl::Milliseconds(30)));
  gate.Open();
  ASSERT_TRUE(offload.Wait().ok());
  EXPECT_EQ(offload.result.replaced_blocks, 0);
  EXPECT_EQ(offload.result.predicted_blocks, 2);
  ASSERT_TRUE(call_.Wait().ok());
  ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
  Tokens all = tokens;
  all.k.insert(all.k.end(), next.k.begin(), next.k.end());
  all.v.insert(all.v.end(), next.v.begin(), next.v.end());
  ExpectNear(call_.out, 0, Reference(q, 0, all, 7));
  const auto back = Fetch(0, {11});
  ExpectProjected(*ReadProjected(0, {11}), 0, back->k.data(), 3);
  EXPECT_EQ(HostBytes(), 4 * 4096);
}

// A step waits for no offload of blocks that it does not touch, be it behind another step's.
TEST_F(Offload, StepsOfOtherSequencesPassAStepThatWaits) {
  Open(SmallSpec());
  const Tokens tokens = RandomTokens(8);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(1, 1, 0, {0, 1}).ok());
  ASSERT_TRUE(Put(0, 1, 0, {10}).ok());
  const Bits q = RandomQ(1);
  const Tokens one = RandomTokens(1), filled = RandomBlocks(1);
  Waitable<OffloadCall> offload;
  const std::vector<OffloadBlock> blocks = {{0, 10, 2, ""}};
  offload.blocks = blocks;
  offload.k = View(filled.k);
  offload.v = View(filled.v);
  StreamGate gate(*ingest_stream_);
  session_->Offload(&offload);
  const DecodeSequence third = Seq(0, 1, 3), fourth = Seq(0, 1, 4), other = Seq(1, 1, 8);
  Waitable<DecodeCall> waits, behind, passes, cancelled;
  const auto submit = [&](Waitable<DecodeCall>& call, const DecodeSequence& sequence, bool writes) {
    Fill(call, 0, q, writes ? &one : nullptr);
    call.sequences = {&sequence, 1};
    session_->Submit(&call);
  };
  submit(waits, third, true);
  // Reads what the step before it writes: out of its turn it would find no third token.
  submit(behind, third, false);
  for (int i = 0; i < 3; ++i) {
    submit(passes, other, false);
    ASSERT_TRUE(passes.Wait().ok());
    ASSERT_TRUE(passes.sequence_status[0].ok()) << passes.sequence_status[0];
    ExpectNear(passes.out, 0, Reference(q, 0, tokens, 8));
  }
  // What is not a step, or changes tables, keeps its place, and holds those behind it.
  Waitable<ScoreCall> score;
  score.block_ids = {&blocks[0].block_id, 1};
  score.q = View(q);
  session_->Submit(&score);
  submit(passes, other, true);
  submit(cancelled, fourth, true);
  EXPECT_FALSE(passes.IsDoneWithin(absl::Milliseconds(20)));
  EXPECT_FALSE(waits.IsDoneWithin(absl::ZeroDuration()));
  EXPECT_FALSE(behind.IsDoneWithin(absl::ZeroDuration()));
  EXPECT_FALSE(score.IsDoneWithin(absl::ZeroDuration()));
  cancelled.Cancel();
  gate.Open();
  ASSERT_TRUE(offload.Wait().ok());
  for (Waitable<DecodeCall>* call : {&waits, &behind, &passes}) {
    ASSERT_TRUE(call->Wait().ok());
    EXPECT_TRUE(call->sequence_status[0].ok()) << call->sequence_status[0];
  }
  EXPECT_EQ(cancelled.Wait().code(), StatusCode::kCancelled);
  ASSERT_TRUE(score.Wait().ok());
  EXPECT_EQ(score.predicted[0], 1) << "scored after the offload, in its turn";
  EXPECT_EQ(Describe(0, 10).valid_tokens, 3u);
}

TEST_F(Offload, TwoOffloadsIntoOneReservedBlockAndAReleaseMeanwhile) {
  Open(SmallSpec());
  ASSERT_TRUE(Put(0, 1, 0, {1}).ok());
  const Tokens first = RandomBlocks(1), second = RandomBlocks(1);
  const std::vector<OffloadBlock> blocks = {{0, 1, 0, ""}};
  Waitable<OffloadCall> a, b;
  StreamGate gate(*ingest_stream_);
  for (auto [call, wire] : {std::pair(&a, &first), std::pair(&b, &second)}) {
    call->blocks = blocks;
    call->k = View(wire->k);
    call->v = View(wire->v);
    session_->Offload(call);
  }
  ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{0}, true).ok());
  EXPECT_EQ(Describe(1, 1).state, BlockState::kAbsent);
  ASSERT_TRUE(Put(0, 1, 0, {1}).ok()) << "in the table again while it is being filled";
  gate.Open();
  ASSERT_TRUE(a.Wait().ok());
  ASSERT_TRUE(b.Wait().ok());
  EXPECT_EQ(*Fetch(0, {1}), second) << "in the order in which they came";
  ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{0}, true).ok());
  WaitUntilQuiet();
  EXPECT_EQ(Item("blocks.host").used_bytes, 0);
  EXPECT_EQ(Item("a_g").used_bytes, 0);
}

// A call that hands itself in again from Done must not count against itself.
TEST_F(Offload, DoneMayHandInTheNext) {
  struct Chain final : OffloadCall {
    void Done() override {
      if (status().ok() && ++count < 50) {
        session->Offload(this);
      } else {
        std::lock_guard<std::mutex> lock(mutex);
        over = true;
        wake.notify_all();
      }
    }
    Session* session = nullptr;
    int count = 0;
    bool over = false;
    std::mutex mutex;
    std::condition_variable wake;
  } chain;
  MakeManager({.max_queued_calls_per_session = 1});
  Open(SmallSpec());
  const Tokens wire = RandomBlocks(1);
  const std::vector<OffloadBlock> blocks = {{0, 1, 0, ""}};
  chain.session = session_.get();
  chain.blocks = blocks;
  chain.k = View(wire.k);
  chain.v = View(wire.v);
  session_->Offload(&chain);
  std::unique_lock<std::mutex> lock(chain.mutex);
  chain.wake.wait(lock, [&] { return chain.over; });
  EXPECT_TRUE(chain.status().ok()) << chain.status();
  EXPECT_EQ(chain.count, 50);
}

}  // namespace
}  // namespace sluice
