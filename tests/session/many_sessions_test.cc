// 64 sessions at once, each with a geometry, a thread and references of its own: steps of mixed
// sizes, offloads and fetches, scores, cancellation, full budgets, and sessions that are closed
// while they work. And how evenly the device serves them.
//
// SLUICE_STRESS_SECONDS says for how long (3; ./dev gpu-test takes 120).

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/base/resident_bytes.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

constexpr int kSessions = 64;
constexpr uint32_t kSequences = 2;

absl::Duration StressTime() {
  const char* seconds = std::getenv("SLUICE_STRESS_SECONDS");
  return absl::Seconds(seconds == nullptr ? 3 : std::atoi(seconds));
}

// Memory that the device reaches, as K and V of a batch of blocks.
struct Wire {
  Wire(Device& device, int64_t half_bytes) : half_bytes(half_bytes) {
    memory = *device.Reserve(MemoryKind::kHost, 2 * half_bytes);
    EXPECT_TRUE(device.Commit(memory, 0, 2 * half_bytes).ok());
  }
  std::byte* k() const { return memory.data(); }
  std::byte* v() const { return memory.data() + half_bytes; }
  TensorView View(const std::byte* data) const {
    return {data, half_bytes, true, DType::kBf16, {}};
  }

  int64_t half_bytes;
  Buffer memory;
};

// One scheduler: what it stored, and what comes back.
class User {
 public:
  User(Device& device, SessionManager& manager, int number)
      : device_(device), manager_(manager), number_(number), random_(number * 7919 + 1) {}

  // Opens a session, works on it until `stop` or until it has had enough, and closes it under work.
  void Live(const std::atomic<bool>& stop) {
    Open();
    if (session_ == nullptr) return;
    Store();
    for (int step = 0; step < 60 && !stop && !::testing::Test::HasFailure(); ++step) {
      const uint32_t layer = Pick(0, spec_.num_layers - 1);
      Decode(layer, Pick(0, kSequences - 1));
      if (Chance(4)) Score(layer);
      if (Chance(5)) ReplaceAndFetch(layer);
      if (Chance(7)) Cancel(layer);
      if (Chance(20)) FillTheBudget(layer);
    }
    CloseUnderWork();
  }
  int64_t num_steps() const { return num_steps_; }

 private:
  uint32_t Pick(int64_t low, int64_t high) {
    return static_cast<uint32_t>(std::uniform_int_distribution<int64_t>(low, high)(random_));
  }
  bool Chance(int one_in) { return Pick(1, one_in) == 1; }
  int64_t row_values() const { return spec_.num_kv_heads * spec_.head_dim; }
  void Append(Bits& bits, int64_t count) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) bits.push_back(Bf16FromFloat(normal(random_)));
  }
  void Expect(const absl::Status& status, const std::set<std::string>& allowed) {
    if (status.ok() || allowed.count(ReasonOf(status)) > 0) return;
    ADD_FAILURE() << "session " << number_ << ": " << status;
  }

  void Open() {
    const int64_t head_dims[] = {32, 64, 80, 128};
    const int64_t groups[] = {1, 2, 3, 4};
    spec_ = SessionSpec();
    spec_.name = absl::StrCat("many-", number_);
    spec_.num_layers = Pick(1, 2);
    spec_.num_kv_heads = Pick(1, 3);
    spec_.num_query_heads = spec_.num_kv_heads * groups[Pick(0, 3)];
    spec_.head_dim = head_dims[Pick(0, 3)];
    spec_.block_tokens = 1 << Pick(2, 5);
    spec_.rank = 8 * Pick(1, 4);
    spec_.max_blocks = 160;
    spec_.max_sequences = 4;
    // Room for the tables of every layer, what is replaced, and a little more.
    const int64_t stride =
        (SlotBytes(DType::kBf16, spec_.num_kv_heads, spec_.head_dim, spec_.block_tokens) + 4095) /
        4096 * 4096;
    // A third of the tables in HBM.
    const int64_t num_blocks = spec_.num_layers * kSequences * kTableBlocks;
    const int64_t in_hbm = num_blocks / 3;
    spec_.hbm_budget_bytes = in_hbm * stride;
    spec_.host_budget_bytes = (num_blocks - in_hbm + 20) * stride;
    const auto opened = manager_.Open(spec_);
    if (!opened.ok()) {
      ADD_FAILURE() << opened.status();
      return;
    }
    epoch_ = opened->info.epoch;
    session_ = *manager_.Find(spec_.name, epoch_);
  }

  // A context of random length for each sequence and layer, offloaded; tables with room for more.
  void Store() {
    for (uint32_t s = 0; s < kSequences; ++s) {
      context_[s] = Pick(1, kTableBlocks * spec_.block_tokens - 130);
      if (context_[s] < 1) context_[s] = 1;
      const int64_t num_blocks = (context_[s] + spec_.block_tokens - 1) / spec_.block_tokens;
      for (uint32_t layer = 0; layer < spec_.num_layers; ++layer) {
        Tokens& tokens = tokens_[layer][s];
        tokens = Tokens();
        Append(tokens.k, context_[s] * row_values());
        Append(tokens.v, context_[s] * row_values());
        length_[layer][s] = context_[s];
        Wire wire(device_, num_blocks * spec_.block_tokens * row_values() * 2);
        std::memset(wire.k(), 0xff, 2 * wire.half_bytes);
        std::memcpy(wire.k(), tokens.k.data(), tokens.k.size() * 2);
        std::memcpy(wire.v(), tokens.v.data(), tokens.v.size() * 2);
        std::vector<OffloadBlock> blocks;
        for (int64_t b = 0; b < num_blocks; ++b) {
          const int64_t valid = std::min(spec_.block_tokens, context_[s] - b * spec_.block_tokens);
          blocks.push_back({layer, s * kTableBlocks + static_cast<uint32_t>(b),
                            static_cast<uint32_t>(valid), ""});
        }
        Waitable<OffloadCall> call;
        call.blocks = blocks;
        call.k = wire.View(wire.k());
        call.v = wire.View(wire.v());
        session_->Offload(&call);
        Expect(call.Wait(), {});
      }
      std::vector<uint32_t> ids;
      for (uint32_t b = 0; b < kTableBlocks; ++b) ids.push_back(s * kTableBlocks + b);
      Expect(session_->PutSequence({s, 1, 0, ids}).status(), {});
    }
  }

  // New tokens, or none, and attention, checked against float64.
  void Decode(uint32_t layer, uint32_t s) {
    Tokens& tokens = tokens_[layer][s];
    const int64_t room = kTableBlocks * spec_.block_tokens - length_[layer][s];
    const bool writes = room >= 5 && !Chance(3);
    const int64_t query_tokens = std::min<int64_t>(Pick(1, 5), length_[layer][s]);
    Tokens added;
    if (writes) {
      Append(added.k, query_tokens * row_values());
      Append(added.v, query_tokens * row_values());
    }
    Bits q;
    Append(q, query_tokens * spec_.num_query_heads * spec_.head_dim);
    DecodeSequence sequence;
    sequence.sequence_id = s;
    sequence.query_tokens = static_cast<uint32_t>(query_tokens);
    sequence.context_tokens = length_[layer][s] + (writes ? query_tokens : 0);
    Waitable<DecodeCall> call;
    call.layer = layer;
    call.sequences = {&sequence, 1};
    call.q = View(q);
    if (writes) {
      call.k = View(added.k);
      call.v = View(added.v);
    }
    session_->Submit(&call);
    Expect(call.Wait(), {});
    if (!call.status().ok()) return;
    Expect(call.sequence_status[0], {});
    if (!call.sequence_status[0].ok()) return;
    if (writes) {
      tokens.k.insert(tokens.k.end(), added.k.begin(), added.k.end());
      tokens.v.insert(tokens.v.end(), added.v.begin(), added.v.end());
      length_[layer][s] += query_tokens;
    }
    const int64_t row = Pick(0, query_tokens - 1);
    ExpectAttention(call.out, q, row, tokens, sequence.context_tokens - query_tokens + 1 + row);
    ++num_steps_;
  }

  void ExpectAttention(absl::Span<const std::byte> out, const Bits& q, int64_t row,
                       const Tokens& tokens, int64_t context) {
    const int64_t d = spec_.head_dim;
    const int64_t head = Pick(0, spec_.num_query_heads - 1);
    const int64_t group = spec_.num_query_heads / spec_.num_kv_heads;
    const uint16_t* query = &q[(row * spec_.num_query_heads + head) * d];
    std::vector<double> weights(context);
    double most = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < context; ++t) {
      const uint16_t* key = &tokens.k[t * row_values() + head / group * d];
      double dot = 0;
      for (int64_t i = 0; i < d; ++i)
        dot += double{FloatFromBf16(query[i])} * FloatFromBf16(key[i]);
      most = std::max(most, weights[t] = dot / std::sqrt(static_cast<double>(d)));
    }
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - most);
    const auto* bits = reinterpret_cast<const uint16_t*>(out.data());
    for (int64_t i = 0; i < d; ++i) {
      double expected = 0;
      for (int64_t t = 0; t < context; ++t) {
        expected +=
            weights[t] / sum * FloatFromBf16(tokens.v[t * row_values() + head / group * d + i]);
      }
      const double value = FloatFromBf16(bits[(row * spec_.num_query_heads + head) * d + i]);
      ASSERT_NEAR(value, expected, std::max(1e-3, std::abs(expected) / 64))
          << "session " << number_ << " context " << context << " element " << i;
    }
  }

  void Score(uint32_t layer) {
    Bits q;
    Append(q, spec_.num_query_heads * spec_.head_dim);
    Waitable<ScoreCall> call;
    call.layer = layer;
    call.by_sequence = true;
    call.sequence_id = Pick(0, kSequences - 1);
    call.q = View(q);
    call.top_k = 4;
    session_->Submit(&call);
    Expect(call.Wait(), {});
    if (!call.status().ok()) return;
    double sum = 0;
    for (size_t i = 0; i < call.scores.size(); ++i) {
      if (call.predicted[i] != 0) sum += call.scores[i];
    }
    EXPECT_NEAR(sum, 1.0, 1e-3) << "the mass of all blocks, session " << number_;
  }

  // A block outside of the tables, back bit for bit.
  void ReplaceAndFetch(uint32_t layer) {
    Wire wire(device_, 2 * spec_.block_tokens * row_values() * 2);
    auto* words = reinterpret_cast<uint16_t*>(wire.k());
    for (int64_t i = 0; i < wire.half_bytes; ++i) words[i] = static_cast<uint16_t>(random_());
    const std::vector<OffloadBlock> blocks = {{layer, kSpareBlock, 0, "t"},
                                              {layer, kSpareBlock + 1, 0, ""}};
    Waitable<OffloadCall> offload;
    offload.blocks = blocks;
    offload.k = wire.View(wire.k());
    offload.v = wire.View(wire.v());
    session_->Offload(&offload);
    Expect(offload.Wait(), {"HOST_MEMORY", "PREDICTION_MEMORY"});
    if (!offload.status().ok()) return;
    Wire back(device_, wire.half_bytes);
    const std::vector<uint32_t> ids = {kSpareBlock, kSpareBlock + 1};
    Waitable<FetchCall> fetch;
    fetch.layer = layer;
    fetch.block_ids = ids;
    fetch.k = back.k();
    fetch.v = back.v();
    session_->Fetch(&fetch);
    Expect(fetch.Wait(), {});
    EXPECT_EQ(std::memcmp(wire.k(), back.k(), 2 * wire.half_bytes), 0) << "session " << number_;
  }

  // Several steps at once, of which some are cancelled.
  void Cancel(uint32_t layer) {
    Bits q;
    Append(q, spec_.num_query_heads * spec_.head_dim);
    DecodeSequence sequence;
    sequence.query_tokens = 1;
    sequence.context_tokens = length_[layer][0];
    Waitable<DecodeCall> calls[5];
    for (Waitable<DecodeCall>& call : calls) {
      call.layer = layer;
      call.sequences = {&sequence, 1};
      call.q = View(q);
      session_->Submit(&call);
    }
    for (int i : {1, 3, 4}) calls[i].Cancel();
    for (Waitable<DecodeCall>& call : calls) {
      Expect(call.Wait(), {"CANCELLED"});
      if (!call.status().ok()) continue;
      ExpectAttention(call.out, q, 0, tokens_[layer][0], sequence.context_tokens);
    }
  }

  // Offloads until there is no room; nothing is lost by it, and it is all given back.
  void FillTheBudget(uint32_t layer) {
    Wire wire(device_, spec_.block_tokens * row_values() * 2);
    std::memset(wire.k(), 0x3f, 2 * wire.half_bytes);
    absl::Status status;
    std::vector<uint32_t> ids;
    for (uint32_t id = kSpareBlock; id < spec_.max_blocks && status.ok(); ++id) {
      const OffloadBlock block = {layer, id, 0, ""};
      Waitable<OffloadCall> call;
      call.blocks = {&block, 1};
      call.k = wire.View(wire.k());
      call.v = wire.View(wire.v());
      call.predict = PredictMode::kBestEffort;
      session_->Offload(&call);
      status = call.Wait();
      ids.push_back(id);
    }
    EXPECT_EQ(ReasonOf(status), "HOST_MEMORY") << "session " << number_ << ": " << status;
    Decode(layer, 0);
    Expect(session_->DropBlocks({{}, ids}, true).status(), {});
  }

  void CloseUnderWork() {
    Bits q;
    Append(q, spec_.num_query_heads * spec_.head_dim);
    DecodeSequence sequence;
    sequence.query_tokens = 1;
    sequence.context_tokens = length_[0][0];
    Waitable<DecodeCall> calls[4];
    for (Waitable<DecodeCall>& call : calls) {
      call.sequences = {&sequence, 1};
      call.q = View(q);
      session_->Submit(&call);
    }
    Waitable<ClosedCall> closed;
    manager_.Close(spec_.name, epoch_, false, [&](const absl::StatusOr<int64_t>& freed_bytes) {
      closed.Ended(freed_bytes.status());
    });
    for (Waitable<DecodeCall>& call : calls) {
      Expect(call.Wait(), {});
      if (call.status().ok()) {
        ExpectAttention(call.out, q, 0, tokens_[0][0], sequence.context_tokens);
      }
    }
    Expect(closed.Wait(), {});
    session_.reset();
  }

  // What Waitable needs to be told of a close.
  struct ClosedCall {
    virtual ~ClosedCall() = default;
    virtual void Done() = 0;
    void Ended(absl::Status status) {
      status_ = std::move(status);
      Done();
    }
    const absl::Status& status() const { return status_; }

   private:
    absl::Status status_;
  };

  static constexpr uint32_t kTableBlocks = 48;
  static constexpr uint32_t kSpareBlock = kSequences * kTableBlocks;

  Device& device_;
  SessionManager& manager_;
  const int number_;
  std::mt19937 random_;
  SessionSpec spec_;
  std::shared_ptr<Session> session_;
  uint64_t epoch_ = 0;
  int64_t context_[kSequences] = {};
  Tokens tokens_[2][kSequences];
  int64_t length_[2][kSequences] = {};
  std::atomic<int64_t> num_steps_{0};
};

class ManySessions : public SessionFixture {};

TEST_F(ManySessions, MixedWorkAgainstReferences) {
  MakeManager({.hbm_budget_bytes = int64_t{64} << 30,
               .hbm_block_budget_bytes = int64_t{2} << 30,
               .host_budget_bytes = int64_t{4} << 30});
  std::vector<std::unique_ptr<User>> users;
  for (int i = 0; i < kSessions; ++i) {
    users.push_back(std::make_unique<User>(*device_, *manager_, i));
  }
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (const auto& user : users) {
    threads.emplace_back([&stop, &user] {
      while (!stop && !::testing::Test::HasFailure()) user->Live(stop);
    });
  }
  const absl::Time end = absl::Now() + StressTime();
  // On a slow machine, until everybody has had a turn.
  const absl::Time last = end + absl::Minutes(2);
  const auto all_stepped = [&] {
    return std::all_of(users.begin(), users.end(),
                       [](const auto& user) { return user->num_steps() > 0; });
  };
  while (!HasFailure() && (absl::Now() < end || (absl::Now() < last && !all_stepped()))) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  int64_t num_steps = 0;
  for (const auto& user : users) {
    EXPECT_GT(user->num_steps(), 0);
    num_steps += user->num_steps();
  }
  std::printf("%lld steps of 64 sessions, each against its reference\n",
              static_cast<long long>(num_steps));
  EXPECT_EQ(HostBytes(), 0);
  EXPECT_EQ(DeviceBytes(), 0);
}

// Equal sessions, each stepping as fast as it is answered: the slowest gets half of the mean.
TEST_F(ManySessions, TheSlowestHasHalfOfTheMean) {
  if (Sanitized()) GTEST_SKIP() << "who is slow is the sanitizer's doing";
  MakeManager({.hbm_budget_bytes = int64_t{64} << 30,
               .hbm_block_budget_bytes = int64_t{2} << 30,
               .host_budget_bytes = int64_t{4} << 30});
  constexpr int64_t kContext = 256;
  std::vector<std::shared_ptr<Session>> sessions;
  for (int i = 0; i < kSessions; ++i) {
    SessionSpec spec = SmallSpec();
    spec.name = absl::StrCat("fair-", i);
    spec.block_tokens = 16;
    Open(spec);
    sessions.push_back(session_);
    const int64_t row_bytes = spec.num_kv_heads * spec.head_dim * 2;
    Wire wire(*device_, kContext * row_bytes);
    std::memset(wire.k(), 0x3f, 2 * wire.half_bytes);
    std::vector<OffloadBlock> blocks;
    for (uint32_t b = 0; b < kContext / 16; ++b) blocks.push_back({0, b, 0, ""});
    Waitable<OffloadCall> call;
    call.blocks = blocks;
    call.k = wire.View(wire.k());
    call.v = wire.View(wire.v());
    session_->Offload(&call);
    ASSERT_TRUE(call.Wait().ok()) << call.status();
    ASSERT_TRUE(Put(0, 1, 0, Ids(0, kContext / 16)).ok());
  }
  const Bits q = RandomQ(1);
  std::atomic<bool> stop{false};
  std::vector<int64_t> counts(kSessions);
  std::vector<std::thread> threads;
  for (int i = 0; i < kSessions; ++i) {
    threads.emplace_back([&, i] {
      const DecodeSequence sequence = Seq(0, 1, kContext);
      Waitable<DecodeCall> call;
      call.sequences = {&sequence, 1};
      call.q = View(q);
      while (!stop) {
        sessions[i]->Submit(&call);
        ASSERT_TRUE(call.Wait().ok()) << call.status();
        ++counts[i];
      }
    });
  }
  absl::SleepFor(std::min(StressTime() / 3, absl::Seconds(10)));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  const int64_t slowest = *std::min_element(counts.begin(), counts.end());
  std::printf("%lld steps, the slowest session %lld, the mean %lld\n", static_cast<long long>(sum),
              static_cast<long long>(slowest), static_cast<long long>(sum / kSessions));
  EXPECT_GE(slowest * 2, sum / kSessions);
}

}  // namespace
}  // namespace sluice
