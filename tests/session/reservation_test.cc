#include "server/session/reservation.h"

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"

namespace sluice {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

class ReservationTest : public SessionFixture {
 protected:
  static int64_t MetaInt(const absl::Status& status, absl::string_view key) {
    int64_t value = -1;
    EXPECT_TRUE(absl::SimpleAtoi(MetaOf(status, key), &value)) << key << " of " << status;
    return value;
  }
  bool Opens(SessionSpec spec) {
    spec.name = "";
    const auto opened = manager_->Open(spec);
    if (!opened.ok()) {
      EXPECT_EQ(ReasonOf(opened.status()), "DEVICE_MEMORY") << opened.status();
      return false;
    }
    EXPECT_TRUE(CloseSession(opened->info.name, opened->info.epoch, false).ok());
    return true;
  }
  static SessionSpec Extreme() {
    SessionSpec spec;
    spec.name = "extreme";
    spec.num_layers = 1024;
    spec.num_query_heads = 1024;
    spec.num_kv_heads = 256;
    spec.head_dim = 256;
    spec.block_tokens = 256;
    spec.rank = 128;
    spec.max_blocks = 1 << 24;
    spec.max_sequences = 65'536;
    spec.tile_blocks = 65'536;
    return spec;
  }
};

TEST_F(ReservationTest, ChecksTheBoundsOfEveryField) {
  const auto check = [&](const char* field, auto set, std::vector<int64_t> good,
                         std::vector<int64_t> bad) {
    for (const int64_t value : good) {
      SessionSpec spec = SmallSpec();
      set(spec, value);
      EXPECT_TRUE(NormalizeSpec(spec).ok())
          << field << " " << value << ": " << NormalizeSpec(spec).status();
    }
    for (const int64_t value : bad) {
      SessionSpec spec = SmallSpec();
      set(spec, value);
      const absl::Status status = NormalizeSpec(spec).status();
      EXPECT_REASON(status, StatusCode::kInvalidArgument, "INVALID_FIELD") << field << " " << value;
      EXPECT_EQ(MetaOf(status, "field"), std::string("spec.") + field);
      EXPECT_NE(MetaOf(status, "allowed"), "");
      EXPECT_NE(MetaOf(status, "value"), "");
    }
  };
  const int64_t kHuge = INT64_MAX, kLow = INT64_MIN;
#define FIELD(name) #name, [](SessionSpec & spec, int64_t value) { spec.name = value; }
  check(FIELD(num_layers), {1, 1024}, {0, -1, 1025, kHuge, kLow});
  check(FIELD(num_query_heads), {2, 6, 1024}, {0, -2, 1, 3, 1025, kHuge, kLow});
  check(FIELD(num_kv_heads), {1, 2, 4}, {0, -1, 257, kHuge, kLow});
  check(FIELD(head_dim), {16, 24, 256}, {0, 8, 15, 20, 257, 264, -16, kHuge, kLow});
  check(FIELD(block_tokens), {1, 2, 256}, {0, 3, 96, 257, 512, -1, kHuge, kLow});
  check(FIELD(rank), {0, 1, 32}, {33, 129, -1, kHuge, kLow});
  check(FIELD(max_blocks), {1, 1 << 24}, {0, (1 << 24) + 1, -1, kHuge, kLow});
  check(FIELD(max_sequences), {0, 1, 65'536}, {65'537, -1, kHuge, kLow});
  check(FIELD(tile_blocks), {0, 1, 65'536}, {65'537, -1, kHuge, kLow});
  check(FIELD(host_budget_bytes), {0, 1, kHuge}, {-1, kLow});
  check(FIELD(hbm_budget_bytes), {0, 1, kHuge}, {-1, kLow});
#undef FIELD
  check("lease", [](SessionSpec& spec, int64_t ms) { spec.lease = absl::Milliseconds(ms); },
        {0, 1000, 24 * 3600 * 1000}, {-1, 999, 24 * 3600 * 1000 + 1});
  check("retention", [](SessionSpec& spec, int64_t s) { spec.retention = absl::Seconds(s); },
        {0, 1, 30 * 24 * 3600}, {-1, 30 * 24 * 3600 + 1});
  check("name", [](SessionSpec& spec, int64_t n) { spec.name = std::string(n, 'x'); }, {0, 1, 128},
        {129});
  check("model_fingerprint",
        [](SessionSpec& spec, int64_t n) { spec.model_fingerprint = std::string(n, '\0'); },
        {0, 256}, {257});
  check("kv_dtype", [](SessionSpec& spec, int64_t n) { spec.kv_dtype = static_cast<DType>(n); },
        {0, 1}, {2});
  const std::string names[] = {"a b", "a\n", std::string("a\0b", 3), "ä", "a*", "\"", "a;b"};
  for (const std::string& name : names) {
    SessionSpec spec = SmallSpec();
    spec.name = name;
    EXPECT_EQ(MetaOf(NormalizeSpec(spec).status(), "field"), "spec.name") << name;
  }
  SessionSpec spec = SmallSpec();
  spec.name = "model/A-1_2.3:tp0";
  EXPECT_TRUE(NormalizeSpec(spec).ok());
}

TEST_F(ReservationTest, DefaultsAreFilledIn) {
  SessionSpec spec = SmallSpec();
  spec.rank = spec.max_sequences = spec.tile_blocks = 0;
  const SessionSpec filled = *NormalizeSpec(spec);
  EXPECT_EQ(filled.rank, 32);
  EXPECT_EQ(filled.max_sequences, 64);
  EXPECT_EQ(filled.tile_blocks, 256);
  EXPECT_EQ(filled.lease, absl::Seconds(60));
  EXPECT_EQ(filled.retention, absl::ZeroDuration());
  spec.head_dim = 16;
  EXPECT_EQ(NormalizeSpec(spec)->rank, 16) << "never above head_dim";
}

TEST_F(ReservationTest, ItemsAreNamedWithTheirFormulasAndSumUp) {
  Open(SmallSpec());
  const MemoryItem a_g = Item("a_g");
  EXPECT_EQ(a_g.reserved_bytes, int64_t{2} * 64 * 2 * 4 * 8 * 2);
  EXPECT_EQ(
      a_g.formula,
      "num_layers 2 x max_blocks 64 x num_kv_heads 2 x block_tokens 4 x rank 8 x 2 bytes = 16384");
  EXPECT_EQ(Item("projection").reserved_bytes, 32 * 8 * 2);
  EXPECT_EQ(Item("running_state").reserved_bytes, 16 * 4 * (32 * 2 + (32 + 3) * 4));
  int64_t total = 0;
  for (const MemoryItem& item : session_->Info().memory) {
    EXPECT_FALSE(item.formula.empty()) << item.name;
    if (item.name != "blocks.host") total += item.reserved_bytes;
  }
  EXPECT_EQ(total, DeviceBytes());
}

TEST_F(ReservationTest, TheLargestValidSpecDoesNotOverflow) {
  const SessionSpec spec = *NormalizeSpec(Extreme());
  const Reservation r = ComputeReservation(spec, INT64_MAX, device_->ops());
  EXPECT_EQ(r.a_g_bytes, int64_t{1} << 58);
  EXPECT_EQ(r.a_g_replacement_bytes, int64_t{1} << 58) << "no more rows than there are";
  for (const MemoryItem& item : r.items) EXPECT_GT(item.reserved_bytes, 0) << item.name;
  EXPECT_GT(r.total_bytes(), int64_t{1} << 59);
  EXPECT_LT(r.total_bytes(), int64_t{1} << 60);
  EXPECT_GE(r.split_workspace_bytes, int64_t{64} << 20);
}

TEST_F(ReservationTest, TheLargestValidSpecIsRefusedByTheBudgetOrByTheMachine) {
  const absl::Status budget = manager_->Open(Extreme()).status();
  EXPECT_REASON(budget, StatusCode::kResourceExhausted, "DEVICE_MEMORY");
  EXPECT_THAT(std::string(budget.message()), HasSubstr("no single setting would make it fit"));
  EXPECT_EQ(MetaOf(budget, "fits_rank"), "");
  EXPECT_EQ(MetaOf(budget, "fits_hbm_budget_bytes"), "") << "beyond the machine";
  MakeManager({.hbm_budget_bytes = INT64_MAX, .host_budget_bytes = 1 << 20});
  EXPECT_REASON(manager_->Open(Extreme()).status(), StatusCode::kResourceExhausted,
                "DEVICE_MEMORY");
  EXPECT_EQ(DeviceBytes(), 0);
}

TEST_F(ReservationTest, WhateverTheMachineRefusesNothingStaysReserved) {
  // A_g, P, split and score workspace: each in turn.
  for (int64_t allowed = 0; allowed < 4; ++allowed) {
    device_->reserves_left = allowed;
    EXPECT_REASON(manager_->Open(SmallSpec()).status(), StatusCode::kResourceExhausted,
                  "DEVICE_MEMORY");
    EXPECT_EQ(DeviceBytes(), 0);
  }
  device_->reserves_left = 1000;
  for (int64_t allowed = 0; allowed < 3; ++allowed) {
    device_->commits_left = allowed;
    EXPECT_REASON(manager_->Open(SmallSpec()).status(), StatusCode::kResourceExhausted,
                  "DEVICE_MEMORY");
    EXPECT_EQ(DeviceBytes(), 0);
  }
  device_->commits_left = 1000;
  EXPECT_TRUE(manager_->Open(SmallSpec()).ok());
}

// The refusal's advice is followed: each value makes the session fit, and one more does not.
TEST_F(ReservationTest, EachSettingThatWouldFitDoesAndOneMoreDoesNot) {
  SessionSpec spec = SmallSpec();
  spec.name = "";
  spec.num_layers = 20;
  spec.max_blocks = 5000;
  spec.rank = 32;
  spec.head_dim = 64;
  for (const bool beside_another : {false, true}) {
    MakeManager({.hbm_budget_bytes = 40'000'000});
    if (beside_another) {
      ASSERT_TRUE(manager_->Open(SmallSpec()).ok());
    }
    const int64_t used_bytes = DeviceBytes();
    const absl::Status status = manager_->Open(spec).status();
    EXPECT_REASON(status, StatusCode::kResourceExhausted, "DEVICE_MEMORY");
    EXPECT_EQ(DeviceBytes(), used_bytes);
    const int64_t need_bytes = MetaInt(status, "need_bytes");
    EXPECT_EQ(MetaInt(status, "budget_bytes"), 40'000'000);
    EXPECT_EQ(MetaInt(status, "free_bytes"), 38'000'000 - used_bytes) << "5 % stays free";
    EXPECT_EQ(MetaOf(status, "a_g_formula"),
              "num_layers 20 x max_blocks 5000 x num_kv_heads 2 x block_tokens 4 x rank 32 x 2 "
              "bytes = 51200000");
    EXPECT_EQ(MetaInt(status, "item_a_g"), 51'200'000);
    EXPECT_THAT(std::string(status.message()), HasSubstr(MetaOf(status, "a_g_formula")));

    const int64_t rank = MetaInt(status, "fits_rank");
    const int64_t max_blocks = MetaInt(status, "fits_max_blocks");
    const int64_t budget = MetaInt(status, "fits_hbm_budget_bytes");
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("rank ", rank, ", max_blocks ", max_blocks,
                                       ", --hbm_budget_bytes=", budget)));
    SessionSpec other = spec;
    for (const bool more : {false, true}) {
      other.rank = rank + more;
      EXPECT_EQ(Opens(other), !more) << "rank " << other.rank;
    }
    other = spec;
    for (const bool more : {false, true}) {
      other.max_blocks = max_blocks + more;
      EXPECT_EQ(Opens(other), !more) << "max_blocks " << other.max_blocks;
    }
    for (const bool less : {true, false}) {
      MakeManager({.hbm_budget_bytes = budget - less});
      if (beside_another) {
        ASSERT_TRUE(manager_->Open(SmallSpec()).ok());
      }
      EXPECT_EQ(Opens(spec), !less) << "budget " << budget - less;
      EXPECT_GE(UsableBytes(budget), need_bytes + used_bytes);
    }
  }
}

// The CPU device, taken for a GPU.
class DeviceWithHbm final : public Device {
 public:
  explicit DeviceWithHbm(Device* device) : device_(*device), info_(device->info()) {
    info_.has_hbm = true;
  }
  const DeviceInfo& info() const override { return info_; }
  absl::StatusOr<Buffer> Reserve(MemoryKind kind, int64_t bytes) override {
    return device_.Reserve(kind, bytes);
  }
  absl::Status Commit(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) override {
    return device_.Commit(buffer, offset_bytes, bytes);
  }
  std::unique_ptr<Stream> CreateStream(StreamPriority priority) override {
    return device_.CreateStream(priority);
  }
  Ops& ops() override { return device_.ops(); }

 private:
  Device& device_;
  DeviceInfo info_;
};

TEST_F(ReservationTest, HbmIsSplitAndHostMemoryIsNotMoreThanTheMachineHas) {
  DeviceWithHbm device(device_.get());
  SessionManagerOptions options;
  options.hbm_budget_bytes = 1 << 20;
  options.host_budget_bytes = 1 << 20;
  const auto manager = SessionManager::Create(options, &device);
  ASSERT_TRUE(manager.ok()) << manager.status();
  EXPECT_EQ((*manager)->options().hbm_block_budget_bytes, 3 << 18);
  EXPECT_EQ((*manager)->MemoryUsage()[0].budget_bytes, 1 << 18);
  options.host_budget_bytes = device.info().total_memory_bytes;
  const absl::Status refused = SessionManager::Create(options, &device).status();
  EXPECT_EQ(MetaOf(refused, "field"), "host_budget_bytes");
}

TEST_F(ReservationTest, OptionsOfAManagerAreChecked) {
  const auto field = [&](SessionManagerOptions options) {
    return MetaOf(SessionManager::Create(options, device_.get()).status(), "field");
  };
  EXPECT_EQ(field({.hbm_budget_bytes = -1}), "hbm_budget_bytes");
  EXPECT_EQ(field({.hbm_budget_bytes = 1000, .hbm_block_budget_bytes = 1000}),
            "hbm_block_budget_bytes");
  EXPECT_EQ(field({.host_budget_bytes = -1}), "host_budget_bytes");
  EXPECT_EQ(field({.max_sessions = 0}), "max_sessions");
  EXPECT_EQ(field({.max_queued_calls_per_session = 0}), "max_queued_calls_per_session");
  EXPECT_EQ(field({.max_tile_runs_per_session = 0}), "max_tile_runs_per_session");
  EXPECT_EQ(field({.max_message_bytes = 0}), "max_message_bytes");
  const auto defaults = SessionManager::Create({}, device_.get());
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ((*defaults)->options().hbm_budget_bytes, device_->info().total_memory_bytes / 4);
  EXPECT_EQ((*defaults)->options().hbm_block_budget_bytes, 0) << "the CPU has no HBM";
  EXPECT_EQ((*defaults)->options().host_budget_bytes, device_->info().total_memory_bytes / 2);
}

}  // namespace
}  // namespace sluice
