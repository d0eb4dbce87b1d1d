// Many threads on one session, mostly of use under --config=tsan and --config=asan. What is
// checked: nothing is torn, every error is one of those that a race can cause, and at the end
// everything is given back.

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

class Stress : public SessionFixture {
 protected:
  // Runs `once` on a thread of its own until the test's time is over.
  template <typename Once>
  void Loop(const Once& once) {
    threads_.emplace_back(
        [this, once, seed = static_cast<uint32_t>(threads_.size() + 1)]() mutable {
          std::mt19937 random(seed);
          while (!stop_) once(random);
        });
  }
  void RunFor(absl::Duration duration) {
    absl::SleepFor(duration);
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    stop_ = false;
  }
  void Expect(const absl::Status& status, const std::set<std::string>& allowed) {
    if (status.ok()) {
      ++successes_;
    } else if (allowed.count(ReasonOf(status)) == 0) {
      ADD_FAILURE() << status;
    }
  }
  // A block whose every element is `word`, so that a torn one shows.
  Tokens Uniform(int64_t blocks, uint16_t word) const {
    const int64_t count = blocks * 4 * 2 * 32;
    return {Bits(count, word), Bits(count, word)};
  }

  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> successes_ = 0;
  std::vector<std::thread> threads_;
};

TEST_F(Stress, ManyThreadsOnOneSession) {
  // Where there is staging (on a strict device), two transfers have room in it.
  MakeManager({.hbm_block_budget_bytes = 30 * 4096,
               .host_budget_bytes = 70 * 4096,
               .max_queued_calls_per_session = 24,
               .max_message_bytes = 2 * 4096,
               .transfer_staging_bytes = 2 * 4096});
  SessionSpec spec = SmallSpec();
  spec.retention = absl::Hours(1);
  Open(spec);
  const std::set<std::string> full = {"HOST_MEMORY", "PREDICTION_MEMORY", "QUEUE_FULL", "FENCED"};
  const auto with = [&](std::set<std::string> more) {
    more.insert(full.begin(), full.end());
    return more;
  };
  Session& session = *session_;
  // Offloads of blocks 0..39, some of them in tables of the decoders.
  for (int i = 0; i < 2; ++i) {
    Loop([&](std::mt19937& random) {
      Waitable<OffloadCall> call;
      const uint32_t first = random() % 38;
      const std::vector<OffloadBlock> blocks = {
          {0, first, 0, "t"},
          {static_cast<uint32_t>(random() % 2), first + 1, 0, ""},
          {1, first + 2, 0, ""}};
      const Tokens wire = Uniform(3, static_cast<uint16_t>(0x3f00 + random() % 64));
      call.blocks = blocks;
      call.k = View(wire.k);
      call.v = View(wire.v);
      call.predict = static_cast<PredictMode>(random() % 3);
      session.Offload(&call);
      Expect(call.Wait(), with({"BLOCK_SHARED"}));
    });
  }
  // Fetches: a block is one word over, except where a decoder wrote into it.
  Loop([&](std::mt19937& random) {
    Tokens wire = Uniform(2, 0xffff);
    Waitable<FetchCall> call;
    call.layer = random() % 2;
    const std::vector<uint32_t> ids = {static_cast<uint32_t>(random() % 20),
                                       static_cast<uint32_t>(random() % 20)};
    call.block_ids = ids;
    call.k = reinterpret_cast<std::byte*>(wire.k.data());
    call.v = reinterpret_cast<std::byte*>(wire.v.data());
    session.Fetch(&call);
    Expect(call.Wait(), with({"BLOCK_NOT_FOUND"}));
    if (!call.status().ok()) return;
    for (int b = 0; b < 2; ++b) {
      const auto begin = wire.k.begin() + b * 256;
      if (!std::all_of(begin, begin + 256, [&](uint16_t word) { return word == *begin; })) {
        ADD_FAILURE() << "a torn block";
      }
    }
  });
  // Decoders, each with a sequence of its own over blocks 20..39 and blocks 40 and up of its own.
  for (uint32_t id = 0; id < 3; ++id) {
    Loop([&, id](std::mt19937& random) {
      const uint32_t own = 40 + id * 6;
      std::vector<uint32_t> ids = {own, own + 1, own + 2, own + 3, own + 4, own + 5};
      // Asked once: the first sequence from this id on may be another's, which comes and goes.
      const std::vector<SequenceInfo> first = session.ListSequences(id, 1);
      const uint64_t generation =
          !first.empty() && first[0].sequence_id == id ? first[0].generation : 1;
      Expect(session.PutSequence({id, generation, 0, ids}).status(), with({"STALE_GENERATION"}));
      Waitable<DecodeCall> call;
      for (int64_t t = 0; t < 24; ++t) {
        const DecodeSequence step = Seq(id, 1, t + 1);
        const Bits q(4 * 32, 0x3f80), one(2 * 32, 0x3f80);
        call.layer = random() % 2 == 0 ? 0 : 1;
        call.sequences = {&step, 1};
        call.q = View(q);
        call.k = call.v = View(one);
        session.Submit(&call);
        if (t % 7 == 6) call.Cancel();
        Expect(call.Wait(), with({"CANCELLED"}));
        if (!call.status().ok()) continue;
        Expect(call.sequence_status[0],
               {"TOKENS_MISSING", "SEQUENCE_NOT_FOUND", "BLOCK_SHARED", "HOST_MEMORY"});
        if (call.sequence_status[0].ok() &&
            Bytes(call.out) !=
                Bytes({reinterpret_cast<const std::byte*>(q.data()), q.size() * 2})) {
          ADD_FAILURE() << "attention over equal values is that value";
        }
      }
      if (random() % 4 == 0) {
        const std::vector<uint32_t> released = {id};
        Expect(session.ReleaseSequence(released, random() % 2 == 0).status(),
               {"SEQUENCE_NOT_FOUND"});
      } else {
        Expect(session.TruncateSequence(id, generation + 1, 0).status(),
               {"SEQUENCE_NOT_FOUND", "STALE_GENERATION"});
      }
    });
  }
  // Sequences 4..7 come, fork and go over the offloaded blocks; blocks are dropped.
  Loop([&](std::mt19937& random) {
    const uint32_t id = 4 + random() % 3;
    const uint32_t first = 20 + random() % 16;
    Expect(session.PutSequence({id, 1, 0, Ids(first, 4)}).status(), full);
    Expect(session.ForkSequence(id, 1, 7, 1, 0).status(),
           with({"SEQUENCE_EXISTS", "SEQUENCE_NOT_FOUND"}));
    const std::vector<uint32_t> released = {id, 7};
    Expect(session.ReleaseSequence(released, random() % 2 == 0).status(), {"SEQUENCE_NOT_FOUND"});
  });
  Loop([&](std::mt19937& random) {
    const std::vector<uint32_t> ids = {static_cast<uint32_t>(random() % 40)};
    Expect(session.DropBlocks({{}, ids}, true).status(), {"BLOCK_IN_TABLE"});
    (void)session.Info();
    (void)session.FindBlocks(std::vector<std::string>{"t"}, {});
    (void)session.ListBlocks({}, Tier::kHost, {}, 10);
    std::this_thread::yield();
  });
  // Scores, keys and tile runs.
  Loop([&](std::mt19937& random) {
    const Bits q(4 * 32, 0x3f80);
    const std::vector<uint32_t> ids = {static_cast<uint32_t>(random() % 40),
                                       static_cast<uint32_t>(random() % 40)};
    Waitable<ScoreCall> score;
    score.layer = random() % 2;
    score.block_ids = ids;
    score.q = View(q);
    score.top_k = 2;
    session.Submit(&score);
    Expect(score.Wait(), with({"BLOCK_NOT_FOUND"}));
    Waitable<ReadProjectedKeysCall> read;
    read.block_ids = ids;
    session.Submit(&read);
    Expect(read.Wait(), with({"BLOCK_NOT_FOUND"}));
    Waitable<BeginTilesCall> begin;
    begin.q = View(q);
    session.Submit(&begin);
    Expect(begin.Wait(), with({"TOO_MANY_RUNS"}));
    if (!begin.status().ok()) return;
    const TileRow row{ids, 0};
    Waitable<StepTileCall> step;
    step.run_id = begin.run_id;
    step.rows = {&row, 1};
    session.Submit(&step);
    Expect(step.Wait(), with({"BLOCK_NOT_FOUND", "TOKENS_MISSING"}));
    Waitable<FinalizeTilesCall> finalize;
    finalize.run_id = begin.run_id;
    session.Submit(&finalize);
    if (!finalize.Wait().ok()) {
      Waitable<AbortTilesCall> abort;
      abort.run_id = begin.run_id;
      do session.Submit(&abort);
      while (!abort.Wait().ok());
    }
  });
  // The manager, all the while.
  Loop([&](std::mt19937& random) {
    SessionSpec same = SmallSpec();
    same.retention = absl::Hours(1);
    same.host_budget_bytes = (60 + random() % 60) * 4096;
    Expect(manager_->Open(same).status(), {});
    manager_->Sweep();
    (void)manager_->List("", 10);
    absl::SleepFor(absl::Milliseconds(1));
  });
  RunFor(absl::Seconds(3));
  EXPECT_GT(successes_, 1000);
  EXPECT_FALSE(HasFailure());

  for (const SequenceInfo& sequence : session.ListSequences(0, 100)) {
    const std::vector<uint32_t> id = {sequence.sequence_id};
    ASSERT_TRUE(session.ReleaseSequence(id, true).ok());
  }
  ASSERT_TRUE(session.DropBlocks({{}, Ids(0, 64)}, true).ok());
  WaitUntilQuiet();
  for (const char* name :
       {"a_g", "a_g_replacement", "running_state", "blocks.hbm", "blocks.host"}) {
    EXPECT_EQ(Item(name).used_bytes, 0) << name;
  }
  EXPECT_EQ(HostBytes(), 0);
}

// Sessions are opened, used and closed by several threads at once; every call ends, and nothing is
// left.
TEST_F(Stress, SessionsAreClosedUnderWork) {
  MakeManager({.hbm_block_budget_bytes = 1 << 18,
               .host_budget_bytes = 1 << 20,
               .max_sessions = 4,
               .max_message_bytes = 2 * 4096,
               .transfer_staging_bytes = 2 * 4096});
  const std::set<std::string> closing = {"SESSION_CLOSING", "SESSION_NOT_FOUND", "SESSION_DETACHED",
                                         "FENCED"};
  for (int i = 0; i < 3; ++i) {
    Loop([&, i](std::mt19937& random) {
      SessionSpec spec = SmallSpec();
      spec.name = i < 2 ? "shared" : "own";
      spec.retention = random() % 2 == 0 ? absl::ZeroDuration() : absl::Hours(1);
      const auto opened = manager_->Open(spec);
      Expect(opened.status(), {"SESSION_CLOSING"});
      if (!opened.ok()) return;
      const auto found = manager_->Find(spec.name, opened->info.epoch);
      Expect(found.status(), closing);
      if (!found.ok()) return;
      Session& session = **found;
      std::thread worker([&] {
        for (int round = 0; round < 4; ++round) {
          Waitable<OffloadCall> offload;
          const Tokens wire = Uniform(2, 0x3f80);
          const std::vector<OffloadBlock> blocks = {{0, 1, 0, ""}, {1, 2, 3, ""}};
          offload.blocks = blocks;
          offload.k = View(wire.k);
          offload.v = View(wire.v);
          session.Offload(&offload);
          Expect(offload.Wait(), {"SESSION_CLOSING", "SESSION_NOT_FOUND", "PREDICTION_MEMORY"});
          Expect(session.PutSequence({0, 1, 0, Ids(1, 2)}).status(),
                 {"SESSION_CLOSING", "SESSION_NOT_FOUND", "STALE_GENERATION"});
          Waitable<DecodeCall> decode;
          const DecodeSequence step = Seq(0, 1, 1);
          const Bits q(4 * 32, 0x3f80);
          decode.sequences = {&step, 1};
          decode.q = View(q);
          session.Submit(&decode);
          Expect(decode.Wait(), {"SESSION_CLOSING", "SESSION_NOT_FOUND"});
          Waitable<FetchCall> fetch;
          Tokens back = Uniform(1, 0);
          const std::vector<uint32_t> ids = {1};
          fetch.block_ids = ids;
          fetch.k = reinterpret_cast<std::byte*>(back.k.data());
          fetch.v = reinterpret_cast<std::byte*>(back.v.data());
          session.Fetch(&fetch);
          Expect(fetch.Wait(), {"SESSION_CLOSING", "SESSION_NOT_FOUND", "BLOCK_NOT_FOUND"});
        }
      });
      if (random() % 2 == 0) absl::SleepFor(absl::Microseconds(random() % 500));
      Expect(CloseSession(spec.name, opened->info.epoch, random() % 2 == 0).status(), closing);
      worker.join();
    });
  }
  RunFor(absl::Seconds(2));
  EXPECT_GT(successes_, 100);
  for (const SessionInfo& info : manager_->List("", 10)) {
    const auto opened = manager_->Open(info.spec);
    ASSERT_TRUE(opened.ok()) << opened.status();
    ASSERT_TRUE(CloseSession(info.name, opened->info.epoch, false).ok());
  }
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(DeviceBytes(), 0);
}

}  // namespace
}  // namespace sluice
