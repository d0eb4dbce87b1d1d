#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;

class Fetch : public SessionFixture {};

TEST_F(Fetch, ReturnsEveryBitPattern) {
  SessionSpec spec = SmallSpec();
  spec.num_query_heads = spec.num_kv_heads = 1;
  spec.max_blocks = 1024;
  Open(spec);
  // All 65,536 of them, NaNs, infinities and subnormals included, at other places in K and V.
  Tokens wire{Bits(65536), Bits(65536)};
  for (int i = 0; i < 65536; ++i) {
    wire.k[i] = static_cast<uint16_t>(i);
    wire.v[i] = static_cast<uint16_t>(i * 40503u + 77);
  }
  std::vector<OffloadBlock> blocks;
  for (uint32_t i = 0; i < 512; ++i) blocks.push_back({1, 1023 - i * 2, 0, ""});
  ASSERT_TRUE(OffloadBlocks(blocks, wire).ok());
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < 512; ++i) ids.push_back(1023 - i * 2);
  std::vector<BlockInfo> info;
  const auto back = SessionFixture::Fetch(1, ids, &info);
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(*back == wire);
  ASSERT_EQ(info.size(), 512u);
  EXPECT_EQ(info[3].block_id, 1017u);
  EXPECT_EQ(info[3].valid_tokens, 4u);
  // Tokens that a step wrote come back bit for bit as well.
  ASSERT_TRUE(Put(0, 1, 0, {0}).ok());
  const Tokens step{Bits(wire.k.begin() + 0x7f80, wire.k.begin() + 0x7f80 + 64),
                    Bits(wire.k.begin() + 0xff80, wire.k.begin() + 0xff80 + 64)};
  ASSERT_TRUE(Step(1, Seq(0, 2, 2), RandomQ(2), &step).ok());
  ASSERT_TRUE(call_.sequence_status[0].ok());
  const auto written = SessionFixture::Fetch(1, {0}, &info);
  EXPECT_EQ(Bits(written->k.begin(), written->k.begin() + 64), step.k);
  EXPECT_EQ(Bits(written->v.begin(), written->v.begin() + 64), step.v);
  EXPECT_EQ(Bits(written->v.begin() + 64, written->v.end()), Bits(64, 0));
  EXPECT_EQ(info[0].valid_tokens, 2u);
}

TEST_F(Fetch, RefusesWhatIsNotThere) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {1}).ok());
  const absl::Status absent = SessionFixture::Fetch(0, {0, 2}).status();
  EXPECT_REASON(absent, StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(absent, "block_id"), "2");
  EXPECT_EQ(absent.GetPayload("sluice/resource_name"), absl::Cord("0/2"));
  EXPECT_REASON(SessionFixture::Fetch(0, {1}).status(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_REASON(SessionFixture::Fetch(1, {0}).status(), StatusCode::kNotFound, "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(SessionFixture::Fetch(2, {0}).status(), "field"), "layer");
  EXPECT_EQ(MetaOf(SessionFixture::Fetch(0, {0, 64}).status(), "field"), "blocks.block_ids");
  EXPECT_TRUE(SessionFixture::Fetch(0, {}).ok());
  EXPECT_TRUE(SessionFixture::Fetch(0, {0, 0}).ok());
}

// Readers of block 0 (and 1, always replaced together) see one version or the other, whole.
TEST_F(Fetch, ReadersSeeAReplacedBatchWhollyOldOrWhollyNew) {
  Open(SmallSpec());
  const Tokens versions[2] = {RandomTokens(8), RandomTokens(8)};
  const Bits q = RandomQ(1);
  const std::vector<uint32_t> ids = {0, 1};
  struct Seen {
    std::string decoded, scores;
    ProjectedKeys keys;
  } expected[2];
  const auto decode = [&](Waitable<DecodeCall>& call) {
    const DecodeSequence sequence = Seq(0, 1, 8);
    call.sequences = {&sequence, 1};
    call.q = View(q);
    session_->Submit(&call);
    EXPECT_TRUE(call.Wait().ok());
    EXPECT_TRUE(call.sequence_status[0].ok()) << call.sequence_status[0];
    return Bytes(call.out);
  };
  const auto score = [&](Waitable<ScoreCall>& call) {
    call.block_ids = ids;
    call.q = View(q);
    call.kind = ScoreKind::kMaxDot;
    session_->Submit(&call);
    EXPECT_TRUE(call.Wait().ok());
    return std::string(reinterpret_cast<const char*>(call.scores.data()), call.scores.size() * 4);
  };
  ASSERT_TRUE(Put(0, 1, 0, ids).ok());
  Waitable<DecodeCall> decode_call;
  Waitable<ScoreCall> score_call;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(OffloadTokens(0, 0, versions[i]).ok());
    expected[i] = {decode(decode_call), score(score_call), *ReadProjected(0, ids)};
  }
  ASSERT_NE(expected[0].decoded, expected[1].decoded);
  ASSERT_NE(expected[0].scores, expected[1].scores);

  std::atomic<bool> stop = false;
  std::atomic<int> seen[2] = {0, 0};
  std::vector<std::thread> readers;
  const auto read = [&](auto&& once) {
    readers.emplace_back([&, once] {
      while (!stop) {
        const int version = once();
        ASSERT_TRUE(version == 0 || version == 1) << "neither the old nor the new content";
        ++seen[version];
      }
    });
  };
  const auto which = [](const auto& value, const auto& zero, const auto& one) {
    return value == zero ? 0 : value == one ? 1 : -1;
  };
  read([&] { return which(decode(decode_call), expected[0].decoded, expected[1].decoded); });
  read([&] { return which(score(score_call), expected[0].scores, expected[1].scores); });
  read([&] {
    Tokens wire{Bits(8 * 64), Bits(8 * 64)};
    Waitable<FetchCall> call;
    call.block_ids = ids;
    call.k = reinterpret_cast<std::byte*>(wire.k.data());
    call.v = reinterpret_cast<std::byte*>(wire.v.data());
    session_->Fetch(&call);
    EXPECT_TRUE(call.Wait().ok());
    return which(wire, versions[0], versions[1]);
  });
  read([&] {
    return which(ReadProjected(0, ids)->rows, expected[0].keys.rows, expected[1].keys.rows);
  });
  for (int i = 0; i < 600; ++i) {
    ASSERT_TRUE(OffloadTokens(0, 0, versions[i % 2]).ok());
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
}

// A block that steps append to and rewrite: what is fetched is some state that a step left behind.
TEST_F(Fetch, ReadersSeeAnAppendedBlockAsOfOneStep) {
  SessionSpec spec = SmallSpec();
  spec.block_tokens = 16;
  Open(spec);
  ASSERT_TRUE(Put(0, 1, 0, {3}).ok());
  const int64_t row = 2 * 32;
  // Token t of round r is the number 100 r + t in every element, which BF16 holds by its bits.
  const auto word = [](int round, int64_t token) {
    return static_cast<uint16_t>(round * 16 + token);
  };
  std::atomic<bool> stop = false;
  std::atomic<int> fetched = 0;
  std::thread reader([&] {
    uint64_t version = 0;
    while (!stop) {
      Tokens wire{Bits(16 * row, 0xabcd), Bits(16 * row, 0xabcd)};
      const uint32_t id = 3;
      Waitable<FetchCall> call;
      call.block_ids = {&id, 1};
      call.k = reinterpret_cast<std::byte*>(wire.k.data());
      call.v = reinterpret_cast<std::byte*>(wire.v.data());
      session_->Fetch(&call);
      if (!call.Wait().ok()) continue;  // nothing written yet
      ASSERT_GE(call.info[0].version, version);
      version = call.info[0].version;
      const int64_t valid = call.info[0].valid_tokens;
      ASSERT_EQ(wire.k, wire.v);
      const int round = wire.k[0] / 16;
      for (int64_t i = 0; i < 16 * row; ++i) {
        const int64_t token = i / row;
        ASSERT_EQ(wire.k[i], token < valid ? word(round, token) : 0) << "token " << token;
      }
      ++fetched;
    }
  });
  Bits q = Bits(4 * 32);
  uint64_t generation = 1;
  for (int round = 1; round < 120; ++round) {
    for (int64_t t = 0; t < 16; t += t == 0 ? 3 : 1) {
      // The first step of a round overwrites tokens 0..2 of the last one, truncated to one token
      // before.
      const int64_t tokens = t == 0 ? 3 : 1;
      Tokens step;
      for (int64_t i = 0; i < tokens; ++i) step.k.insert(step.k.end(), row, word(round, t + i));
      step.v = step.k;
      q.resize(tokens * 4 * 32);
      if (t == 0 && round > 1) {
        // One token of the old round stays until the step; the reader must not see it beside new
        // ones.
        ASSERT_TRUE(session_->TruncateSequence(0, ++generation, 1).ok());
      }
      ASSERT_TRUE(Step(0, Seq(0, static_cast<uint32_t>(tokens), t + tokens), q, &step).ok());
      ASSERT_TRUE(call_.sequence_status[0].ok()) << call_.sequence_status[0];
    }
  }
  stop = true;
  reader.join();
  EXPECT_GT(fetched, 0);
}

TEST_F(Fetch, AWriteWaitsForAFetchThatHasBegunAndAFetchForWritesBeforeIt) {
  Open(SmallSpec());
  ASSERT_TRUE(OffloadTokens(0, 0, RandomTokens(4)).ok());
  ASSERT_TRUE(Put(0, 1, 0, {0, 1}).ok());
  const Tokens before = *SessionFixture::Fetch(0, {0});
  const Tokens again = RandomTokens(1);
  const Bits q = RandomQ(1);
  Tokens wire{Bits(4 * 64), Bits(4 * 64)};
  const uint32_t id = 0;
  Waitable<FetchCall> fetch;
  fetch.block_ids = {&id, 1};
  fetch.k = reinterpret_cast<std::byte*>(wire.k.data());
  fetch.v = reinterpret_cast<std::byte*>(wire.v.data());
  sequences_ = {Seq(0, 1, 4)};
  {
    StreamGate gate(*fetch_stream_);
    session_->Fetch(&fetch);
    Fill(call_, 0, q, &again);
    session_->Submit(&call_);
    EXPECT_FALSE(call_.IsDoneWithin(absl::Milliseconds(20)));
  }
  ASSERT_TRUE(fetch.Wait().ok());
  ASSERT_TRUE(call_.Wait().ok());
  EXPECT_EQ(wire, before);
  {
    StreamGate gate(*attention_stream_);
    Fill(call_, 0, q, &again);
    session_->Submit(&call_);
    session_->Fetch(&fetch);
    EXPECT_FALSE(fetch.IsDoneWithin(absl::Milliseconds(20)));
  }
  ASSERT_TRUE(fetch.Wait().ok());
  ASSERT_TRUE(call_.Wait().ok());
  EXPECT_EQ(Slice(wire, 3, 4), again);
}

}  // namespace
}  // namespace sluice
