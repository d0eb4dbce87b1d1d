#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;

class Manager : public SessionFixture {
 protected:
  // Until the manager's thread has ended what is to end.
  bool Gone(const std::string& name) {
    for (int i = 0; i < 500; ++i) {
      if (!manager_->Describe(name).ok()) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }
  static SessionSpec Kept(absl::Duration retention = absl::Hours(1)) {
    SessionSpec spec = SmallSpec();
    spec.retention = retention;
    return spec;
  }
  absl::Status Find(const std::string& name, uint64_t epoch) {
    return manager_->Find(name, epoch).status();
  }
};

TEST_F(Manager, AttachingAgainKeepsAllAndFencesTheOlderHandle) {
  Open(Kept());
  const Tokens tokens = RandomTokens(8);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  ASSERT_TRUE(Put(2, 5, 0, {0, 1}).ok());
  const uint64_t old_epoch = epoch_;
  const std::shared_ptr<Session> old_session = session_;
  SessionSpec again = Kept();
  again.lease = absl::Seconds(30);
  again.retention = absl::Seconds(7);
  again.host_budget_bytes = 5 * 4096;
  again.hbm_budget_bytes = 99;
  const auto opened = manager_->Open(again);
  ASSERT_TRUE(opened.ok());
  EXPECT_TRUE(opened->attached);
  EXPECT_GT(opened->info.epoch, old_epoch);
  EXPECT_EQ(opened->info.num_blocks, 2);
  EXPECT_EQ(opened->info.num_sequences, 1);
  EXPECT_EQ(opened->info.spec.lease, absl::Seconds(30));
  EXPECT_EQ(opened->info.spec.retention, absl::Seconds(7));
  const absl::Status fenced = Find("test", old_epoch);
  EXPECT_REASON(fenced, StatusCode::kAborted, "FENCED");
  EXPECT_EQ(MetaOf(fenced, "epoch"), std::to_string(old_epoch));
  EXPECT_EQ(MetaOf(fenced, "current_epoch"), std::to_string(opened->info.epoch));
  EXPECT_REASON(old_session->CheckHandle(old_epoch), StatusCode::kAborted, "FENCED");
  EXPECT_REASON(CloseSession("test", old_epoch, false).status(), StatusCode::kAborted, "FENCED");
  EXPECT_REASON(Find("test", opened->info.epoch + 1), StatusCode::kAborted, "FENCED");
  Open(again);
  EXPECT_EQ(*Fetch(0, {0, 1}), tokens);
  EXPECT_EQ(session_->ListSequences(0, 9)[0].generation, 5u);
  // The budget is that of the last opening: 3 slots are used.
  EXPECT_TRUE(OffloadTokens(0, 2, RandomTokens(4)).ok());
  EXPECT_REASON(OffloadTokens(0, 3, RandomTokens(4)), StatusCode::kResourceExhausted,
                "HOST_MEMORY");
}

TEST_F(Manager, AnythingFixedThatDiffersIsAMismatchAndChangesNothing) {
  SessionSpec spec = Kept();
  spec.model_fingerprint = "model 1";
  Open(spec);
  const auto mismatch = [&](const char* field, auto change) {
    SessionSpec other = spec;
    change(other);
    const absl::Status status = manager_->Open(other).status();
    EXPECT_REASON(status, StatusCode::kFailedPrecondition, "SESSION_MISMATCH");
    EXPECT_EQ(MetaOf(status, "field"), std::string("spec.") + field);
    EXPECT_TRUE(session_->CheckHandle(epoch_).ok()) << "the handle still counts";
  };
  mismatch("num_layers", [](SessionSpec& s) { s.num_layers = 3; });
  mismatch("num_query_heads", [](SessionSpec& s) { s.num_query_heads = 8; });
  mismatch("num_kv_heads", [](SessionSpec& s) { s.num_kv_heads = 4; });
  mismatch("head_dim", [](SessionSpec& s) { s.head_dim = 40; });
  mismatch("block_tokens", [](SessionSpec& s) { s.block_tokens = 8; });
  mismatch("kv_dtype", [](SessionSpec& s) { s.kv_dtype = DType::kFp16; });
  mismatch("rank", [](SessionSpec& s) { s.rank = 0; });
  mismatch("projection_seed", [](SessionSpec& s) { s.projection_seed = 8; });
  mismatch("max_blocks", [](SessionSpec& s) { s.max_blocks = 65; });
  mismatch("max_sequences", [](SessionSpec& s) { s.max_sequences = 9; });
  mismatch("tile_blocks", [](SessionSpec& s) { s.tile_blocks = 9; });
  mismatch("model_fingerprint", [](SessionSpec& s) { s.model_fingerprint = "model 2"; });
  SessionSpec same = spec;
  same.tile_blocks = 256;  // the default, said
  EXPECT_TRUE(manager_->Open(same)->attached);
}

TEST_F(Manager, SessionsDoNotSeeEachOther) {
  Open(SmallSpec());
  const Tokens mine = RandomTokens(4);
  ASSERT_TRUE(OffloadBlocks({{0, 1, 0, "tag"}}, mine).ok());
  ASSERT_TRUE(Put(0, 1, 0, {1}).ok());
  const std::shared_ptr<Session> first = session_;
  const uint64_t first_epoch = epoch_;
  SessionSpec spec = SmallSpec();
  spec.name = "other";
  Open(spec);
  EXPECT_EQ(Describe(0, 1).state, BlockState::kAbsent);
  EXPECT_TRUE(session_->ListSequences(0, 9).empty());
  EXPECT_TRUE(session_->FindBlocks(std::vector<std::string>{"tag"}, {})->empty());
  ASSERT_TRUE(OffloadTokens(0, 1, RandomTokens(4)).ok());
  const std::vector<uint32_t> id = {1};
  ASSERT_TRUE(session_->DropBlocks({{}, id}, true).ok());
  EXPECT_REASON(Find("other", first_epoch), StatusCode::kAborted, "FENCED");
  EXPECT_REASON(Find("nobody", first_epoch), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  ASSERT_TRUE(CloseSession("other", epoch_, false).ok());
  session_ = first;
  EXPECT_EQ(*Fetch(0, {1}), mine);
}

TEST_F(Manager, ListsByNameInPagesAndDescribes) {
  for (const char* name : {"c", "a", "b"}) {
    SessionSpec spec = SmallSpec();
    spec.name = name;
    ASSERT_TRUE(manager_->Open(spec).ok());
  }
  const auto names = [&](const std::string& first, int64_t limit) {
    std::vector<std::string> found;
    for (const SessionInfo& info : manager_->List(first, limit)) found.push_back(info.name);
    return found;
  };
  EXPECT_THAT(names("", 9), ElementsAre("a", "b", "c"));
  EXPECT_THAT(names("", 2), ElementsAre("a", "b"));
  EXPECT_THAT(names("aa", 9), ElementsAre("b", "c"));
  EXPECT_EQ(manager_->Describe("b")->spec.num_layers, 2);
  EXPECT_REASON(manager_->Describe("d").status(), StatusCode::kNotFound, "SESSION_NOT_FOUND");
}

TEST_F(Manager, ASessionWithoutANameGetsOneOfItsOwn) {
  SessionSpec spec = SmallSpec();
  spec.name = "";
  const auto one = manager_->Open(spec), two = manager_->Open(spec);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_NE(one->info.name, two->info.name);
  EXPECT_NE(one->info.epoch, two->info.epoch);
  EXPECT_TRUE(Find(one->info.name, one->info.epoch).ok());
}

TEST_F(Manager, SessionsAreCounted) {
  MakeManager({.max_sessions = 2});
  SessionSpec spec = SmallSpec();
  spec.name = "";
  const auto one = manager_->Open(spec);
  ASSERT_TRUE(manager_->Open(spec).ok());
  const absl::Status full = manager_->Open(spec).status();
  EXPECT_REASON(full, StatusCode::kResourceExhausted, "TOO_MANY_SESSIONS");
  EXPECT_EQ(MetaOf(full, "allowed"), "2");
  ASSERT_TRUE(CloseSession(one->info.name, one->info.epoch, false).ok());
  EXPECT_TRUE(manager_->Open(spec).ok());
}

TEST_F(Manager, ALeaseRunsOutThenTheRetention) {
  SessionSpec spec = Kept(absl::Seconds(100));
  spec.lease = absl::Seconds(10);
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  clock_offset_ = absl::Seconds(9);
  manager_->Sweep();
  EXPECT_TRUE(Find("test", epoch_).ok()) << "which renews it";
  clock_offset_ = absl::Seconds(18);
  manager_->Sweep();
  EXPECT_TRUE(session_->Info().attached);
  clock_offset_ = absl::Seconds(20);
  manager_->Sweep();
  EXPECT_FALSE(session_->Info().attached);
  EXPECT_REASON(Find("test", epoch_), StatusCode::kFailedPrecondition, "SESSION_DETACHED");
  EXPECT_REASON(CloseSession("test", epoch_, false).status(), StatusCode::kFailedPrecondition,
                "SESSION_DETACHED");
  // Detached since 9 + 10 s by the clock; kept for 100 s more.
  clock_offset_ = absl::Seconds(118);
  manager_->Sweep();
  ASSERT_TRUE(manager_->Describe("test").ok());
  EXPECT_EQ(manager_->Describe("test")->num_blocks, 1);
  const auto opened = manager_->Open(spec);
  ASSERT_TRUE(opened.ok());
  EXPECT_TRUE(opened->attached);
  EXPECT_EQ(opened->info.num_blocks, 1);
  clock_offset_ = absl::Seconds(118 + 111);
  manager_->Sweep();
  EXPECT_TRUE(Gone("test"));
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(DeviceBytes(), 0);
  EXPECT_REASON(session_->CheckHandle(epoch_), StatusCode::kNotFound, "SESSION_NOT_FOUND");
}

TEST_F(Manager, CompletedWorkAndOpenStreamsKeepASessionAlive) {
  SessionSpec spec = SmallSpec();
  spec.lease = absl::Seconds(10);
  Open(spec);
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  clock_offset_ = absl::Seconds(9);
  ASSERT_TRUE(Step(0, Seq(0, 1, 1), RandomQ(1), nullptr).ok());
  clock_offset_ = absl::Seconds(18);
  manager_->Sweep();
  EXPECT_TRUE(session_->Info().attached);
  session_->EnterStream();
  session_->EnterStream();
  clock_offset_ = absl::Seconds(1000);
  manager_->Sweep();
  session_->LeaveStream();
  manager_->Sweep();
  EXPECT_TRUE(session_->Info().attached) << "one stream is open";
  clock_offset_ = absl::Seconds(2000);
  session_->LeaveStream();
  clock_offset_ = absl::Seconds(2009);
  manager_->Sweep();
  EXPECT_TRUE(session_->Info().attached) << "leaving renewed the lease";
  EXPECT_LE(session_->LeaseExpiry() - absl::Now() - absl::Seconds(2000), absl::Seconds(10));
  {
    // Work in flight keeps it as well.
    StreamGate gate(*attention_stream_);
    Fill(call_, 0, RandomQ(1), nullptr);
    const Bits q = RandomQ(1);
    call_.q = View(q);
    session_->Submit(&call_);
    clock_offset_ = absl::Seconds(3000);
    manager_->Sweep();
    EXPECT_TRUE(session_->Info().attached);
  }
  EXPECT_TRUE(call_.Wait().ok());
  clock_offset_ = absl::Seconds(3011);
  manager_->Sweep();
  EXPECT_TRUE(Gone("test")) << "volatile: no retention";
}

TEST_F(Manager, CloseKeepingDetachesAndTheDataComesBack) {
  Open(Kept());
  const Tokens tokens = RandomTokens(4);
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  const auto freed = CloseSession("test", epoch_, true);
  ASSERT_TRUE(freed.ok());
  EXPECT_EQ(*freed, 0);
  EXPECT_REASON(Find("test", epoch_), StatusCode::kFailedPrecondition, "SESSION_DETACHED");
  EXPECT_EQ(HostBytes(), 4096);
  Open(Kept());
  EXPECT_EQ(*Fetch(0, {0}), tokens);
  EXPECT_EQ(*CloseSession("test", epoch_, false), 4096);
  EXPECT_REASON(Find("test", epoch_), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(DeviceBytes(), 0);
  Open(SmallSpec());
  EXPECT_EQ(session_->Info().num_blocks, 0) << "the name is free, and nothing is left of it";
  ASSERT_TRUE(OffloadTokens(0, 0, tokens).ok());
  EXPECT_EQ(*CloseSession("test", epoch_, true), 4096)
      << "without a retention there is nothing to keep";
}

TEST_F(Manager, CloseWaitsForWorkAndRefusesMore) {
  Open(Kept());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  const Bits q = RandomQ(1);
  sequences_ = {Seq(0, 1, 1)};
  Fill(call_, 0, q, nullptr);
  std::thread closer;
  {
    StreamGate gate(*attention_stream_);
    session_->Submit(&call_);
    std::atomic<bool> closed = false;
    closer = std::thread([&] {
      EXPECT_EQ(*CloseSession("test", epoch_, false), 2 * 4096);
      closed = true;
    });
    while (Find("test", epoch_).ok()) absl::SleepFor(absl::Milliseconds(1));
    const absl::Status closing = Find("test", epoch_);
    EXPECT_REASON(closing, StatusCode::kFailedPrecondition, "SESSION_CLOSING");
    EXPECT_REASON(manager_->Open(Kept()).status(), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    EXPECT_REASON(Put(0, 1, 1, {1}), StatusCode::kFailedPrecondition, "SESSION_CLOSING");
    EXPECT_REASON(OffloadTokens(0, 1, RandomTokens(4)), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    EXPECT_REASON(Fetch(0, {0}).status(), StatusCode::kFailedPrecondition, "SESSION_CLOSING");
    const std::vector<uint32_t> ids = {0};
    EXPECT_REASON(session_->DropBlocks({{}, ids}, true).status(), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    EXPECT_REASON(session_->ReleaseSequence(ids, true).status(), StatusCode::kFailedPrecondition,
                  "SESSION_CLOSING");
    EXPECT_TRUE(session_->DescribeBlocks({{}, ids}).ok()) << "looking is allowed";
    manager_->Sweep();
    EXPECT_FALSE(closed);
  }
  ASSERT_TRUE(call_.Wait().ok());
  EXPECT_TRUE(call_.sequence_status[0].ok());
  closer.join();
  // The session that is held here is an empty shell now.
  EXPECT_REASON(Step(0, q, nullptr), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  EXPECT_REASON(OffloadTokens(0, 1, RandomTokens(4)), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  EXPECT_REASON(Fetch(0, {0}).status(), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  EXPECT_REASON(Put(0, 1, 0, {1}), StatusCode::kNotFound, "SESSION_NOT_FOUND");
  EXPECT_REASON(session_->DescribeBlocks({{}, Ids(0, 1)}).status(), StatusCode::kNotFound,
                "SESSION_NOT_FOUND");
  EXPECT_REASON(session_->ListBlocks({}, Tier::kNone, {}, 1).status(), StatusCode::kNotFound,
                "SESSION_NOT_FOUND");
  EXPECT_TRUE(session_->ListSequences(0, 9).empty());
  EXPECT_EQ(session_->Info().num_blocks, 0);
}

TEST_F(Manager, UsageComesBackItemByItem) {
  Open(SmallSpec());
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(OffloadTokens(1, 0, RandomTokens(30)).ok());
    ASSERT_TRUE(Put(0, round * 2 + 1, 0, Ids(4, 8)).ok());
    Waitable<BeginTilesCall> begin;
    const Bits q = RandomQ(3);
    begin.q = View(q);
    session_->Submit(&begin);
    ASSERT_TRUE(begin.Wait().ok());
    for (const char* name : {"a_g", "running_state", "blocks.host"})
      EXPECT_GT(Item(name).used_bytes, 0) << name;
    Waitable<AbortTilesCall> abort;
    abort.run_id = begin.run_id;
    session_->Submit(&abort);
    ASSERT_TRUE(abort.Wait().ok());
    ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{0}, true).ok());
    ASSERT_TRUE(session_->DropBlocks({{}, Ids(0, 64)}, true).ok());
    attention_stream_->Synchronize();
    for (const char* name : {"a_g", "a_g_replacement", "running_state", "blocks.host"}) {
      EXPECT_EQ(Item(name).used_bytes, 0) << name;
    }
    EXPECT_EQ(HostBytes(), 0);
    EXPECT_EQ(session_->Info().num_blocks, 0);
    EXPECT_EQ(session_->Info().num_predicted_blocks, 0);
  }
  ASSERT_TRUE(CloseSession("test", epoch_, false).ok());
  EXPECT_EQ(DeviceBytes(), 0);
}

// What is dropped while its last reader is on the way out comes back without another call.
TEST_F(Manager, ASweepFreesWhatWaitsForNobody) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  StreamGate reader(*fetch_stream_);
  ASSERT_TRUE(
      session_->DropBlocks({std::vector<uint32_t>{0}, std::vector<uint32_t>{0}}, false).ok());
  EXPECT_EQ(HostBytes(), 4096);
  reader.WaitUntilPassed();
  attention_stream_->Synchronize();
  manager_->Sweep();
  EXPECT_EQ(HostBytes(), 0);
}

TEST_F(Manager, TheQueueOfASessionIsBounded) {
  MakeManager({.max_queued_calls_per_session = 4});
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  sequences_ = {Seq(0, 1, 1)};
  const Bits q = RandomQ(1);
  Waitable<DecodeCall> calls[4];
  for (DecodeCall& call : calls) Fill(call, 0, q, nullptr);
  {
    StreamGate gate(*attention_stream_);
    for (DecodeCall& call : calls) session_->Submit(&call);
    const absl::Status full = Step(0, q, nullptr);
    EXPECT_REASON(full, StatusCode::kResourceExhausted, "QUEUE_FULL");
    EXPECT_TRUE(full.GetPayload("sluice/retry_ms").has_value());
    EXPECT_EQ(MetaOf(full, "allowed"), "4");
    EXPECT_REASON(OffloadTokens(0, 1, RandomTokens(4)), StatusCode::kResourceExhausted,
                  "QUEUE_FULL");
    EXPECT_REASON(Fetch(0, {0}).status(), StatusCode::kResourceExhausted, "QUEUE_FULL");
    // Two are started; the others can still be dropped.
    calls[2].Cancel();
  }
  EXPECT_TRUE(calls[0].Wait().ok());
  EXPECT_TRUE(calls[1].Wait().ok());
  EXPECT_REASON(calls[2].Wait(), StatusCode::kCancelled, "CANCELLED");
  EXPECT_TRUE(calls[3].Wait().ok());
  EXPECT_TRUE(Step(0, q, nullptr).ok());
}

// The holder of a call may let go of the session in Done, and of the call, whoever holds what else.
TEST_F(Manager, DoneMayLetGoOfTheSessionAndTheCall) {
  struct Last final : DecodeCall {
    void Done() override {
      std::atomic<int>& count = *counter;
      session.reset();
      delete this;
      ++count;
    }
    std::shared_ptr<Session> session;
    std::atomic<int>* counter = nullptr;
  };
  std::atomic<int> count = 0;
  const Bits q(4 * 32);
  for (int round = 0; round < 50; ++round) {
    Open(SmallSpec());
    ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
    ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
    sequences_ = {Seq(0, 1, 1)};
    for (int i = 0; i < 4; ++i) {
      auto* call = new Last;
      call->session = session_;
      call->counter = &count;
      Fill(*call, 0, q, nullptr);
      session_->Submit(call);
    }
    session_.reset();
    ASSERT_TRUE(CloseSession("test", epoch_, false).ok());
  }
  EXPECT_EQ(count, 200);
}

TEST_F(Manager, ShutdownRefusesAndWaits) {
  Open(Kept());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  sequences_ = {Seq(0, 1, 1)};
  const Bits q = RandomQ(1);
  Fill(call_, 0, q, nullptr);
  std::atomic<bool> down = false;
  std::thread stopper;
  {
    StreamGate gate(*attention_stream_);
    session_->Submit(&call_);
    stopper = std::thread([&] {
      manager_->Shutdown();
      down = true;
    });
    while (Find("test", epoch_).ok()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_REASON(Find("test", epoch_), StatusCode::kUnavailable, "SHUTTING_DOWN");
    EXPECT_REASON(manager_->Open(Kept()).status(), StatusCode::kUnavailable, "SHUTTING_DOWN");
    EXPECT_FALSE(down);
  }
  stopper.join();
  EXPECT_TRUE(call_.Wait().ok());
}

}  // namespace
}  // namespace sluice
