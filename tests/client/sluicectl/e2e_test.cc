// sluicectl against a daemon: every command, its table, its JSON, its exit code.

#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/client.h"
#include "client/sluicectl/app.h"
#include "client/sluicectl/npy.h"
#include "client/tensor.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "sluice/v1/admin.pb.h"
#include "sluice/v1/attention.pb.h"
#include "sluice/v1/sequence.pb.h"
#include "sluice/v1/swap.pb.h"
#include "tests/client/daemon_process.h"

namespace sluice::ctl {
namespace {

constexpr char kOpen[] =
    "--num-layers 2 --num-query-heads 4 --num-kv-heads 2 --head-dim 16 --block-tokens 4 "
    "--max-blocks 32 --retention 1m";

struct Result {
  int exit_code = -1;
  std::string out;
  std::string err;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class SluicectlE2eTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { daemon_ = new client::DaemonProcess(); }
  static void TearDownTestSuite() {
    EXPECT_EQ(daemon_->Stop(), 0);
    delete daemon_;
  }

  // {s} in `words` stands for the name of this test's session.
  Result Try(absl::string_view words) {
    std::vector<std::string> split = absl::StrSplit(words, ' ', absl::SkipEmpty());
    for (std::string& word : split) {
      if (word == "{s}") word = SessionName();
    }
    split.push_back(absl::StrCat("--address=", daemon_->address()));
    std::ostringstream out;
    std::ostringstream err;
    Result result;
    result.exit_code = RunSluicectl(split, out, err);
    result.out = out.str();
    result.err = err.str();
    return result;
  }
  std::string Do(absl::string_view words) {
    const Result result = Try(words);
    EXPECT_EQ(result.exit_code, 0) << words << "\n" << result.err;
    EXPECT_EQ(result.err, "") << words;
    return result.out;
  }
  template <typename Message>
  Message Json(absl::string_view words) {
    Message message;
    const std::string json = Do(absl::StrCat(words, " --output json"));
    const auto status = google::protobuf::util::JsonStringToMessage(json, &message);
    EXPECT_TRUE(status.ok()) << json;
    return message;
  }
  std::string SessionName() {
    return ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void Open() { Do(absl::StrCat("sessions open {s} ", kOpen)); }
  std::string Path(const std::string& name) {
    return absl::StrCat(::testing::TempDir(), "/", SessionName(), "-", name);
  }
  std::string WriteNpy(const std::string& name, const std::vector<int64_t>& shape, v1::Dtype dtype,
                       bool raw_bits = false) {
    NpyHeader header = {dtype, shape};
    std::vector<uint16_t> bits(header.num_elements());
    for (size_t i = 0; i < bits.size(); ++i) {
      bits[i] = client::FloatToBf16(0.01f * static_cast<float>(i % 97) - 0.4f);
    }
    auto writer = NpyWriter::Create(Path(name), header, raw_bits);
    EXPECT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE(writer->Append(v1::DTYPE_BF16, bits).ok());
    EXPECT_TRUE(writer->Close().ok());
    return Path(name);
  }
  // Blocks 0-3 of both layers.
  void OffloadPrompt() {
    const std::string k = WriteNpy("k.npy", {2, 4, 4, 2, 16}, v1::DTYPE_BF16);
    const std::string v = WriteNpy("v.npy", {2, 4, 4, 2, 16}, v1::DTYPE_F32);
    EXPECT_EQ(Do(absl::StrCat("offload --session {s} --blocks 0-3 --tags a,b,c,0xff --k ", k,
                              " --v ", v)),
              "stored 8 blocks (32 KiB), 8 predicted, 0 replaced\n");
  }

  static client::DaemonProcess* daemon_;
};

client::DaemonProcess* SluicectlE2eTest::daemon_ = nullptr;

TEST_F(SluicectlE2eTest, Daemon) {
  EXPECT_TRUE(absl::StrContains(Do("server"), "device"));
  EXPECT_FALSE(Json<v1::GetServerResponse>("server").version().empty());
  EXPECT_EQ(Do("health"), "SERVING\n");
  EXPECT_EQ(Do("health sluice.v1.SwapService"), "SERVING\n");
  EXPECT_EQ(Try("health sluice.v1.NoService").exit_code, 4);
  EXPECT_EQ(Do("wait-ready --timeout 10s"), "SERVING\n");
  EXPECT_EQ(Do("log-level debug"), "log level is debug (was info)\n");
  EXPECT_EQ(Do("log-level info"), "log level is info (was debug)\n");
  const Result bad = Try("log-level loud");
  EXPECT_EQ(bad.exit_code, 7);
  EXPECT_TRUE(absl::StrContains(bad.err, "INVALID_ARGUMENT INVALID_FIELD: ")) << bad.err;
  EXPECT_TRUE(absl::StrContains(bad.err, "\n  allowed: ")) << bad.err;
}

TEST_F(SluicectlE2eTest, Sessions) {
  Open();
  EXPECT_TRUE(absl::StrContains(Do("sessions list"), "Sessions"));
  const auto list = Json<v1::ListSessionsResponse>("sessions list");
  EXPECT_GE(list.sessions_size(), 1);
  EXPECT_TRUE(absl::StrContains(Do("sessions get {s}"), "2 layers, 4/2 heads of 16"));
  EXPECT_EQ(Json<v1::GetSessionResponse>("sessions get {s}").session().spec().head_dim(), 16u);
  EXPECT_TRUE(absl::StrContains(Do("usage"), "Sessions"));
  EXPECT_EQ(Json<v1::GetUsageResponse>("usage --session {s}").sessions_size(), 1);
  EXPECT_EQ(Try("usage --session absent").exit_code, 4);
  const Result mismatch =
      Try("sessions open {s} --num-layers 3 --num-query-heads 4 --num-kv-heads 2 --head-dim 16 "
          "--block-tokens 4 --max-blocks 32");
  EXPECT_EQ(mismatch.exit_code, 5);
  EXPECT_TRUE(absl::StrContains(mismatch.err, "SESSION_MISMATCH")) << mismatch.err;
  EXPECT_TRUE(absl::StrContains(mismatch.err, "hint: ")) << mismatch.err;
  EXPECT_TRUE(absl::StrContains(Do(absl::StrCat("sessions open {s} ", kOpen)), "attached to"));
  EXPECT_TRUE(absl::StrContains(Do("sessions close {s} --keep-data"), "closed"));
  EXPECT_TRUE(absl::StrContains(Do("sessions get {s}"), "detached"));
  EXPECT_EQ(Try("sessions close {s} --keep-data").exit_code, 5);
  EXPECT_TRUE(absl::StrContains(Do("sessions close {s} --delete-data"), "closed"));
  const Result gone = Try("sessions get {s}");
  EXPECT_EQ(gone.exit_code, 4);
  EXPECT_TRUE(absl::StrContains(gone.err, "NOT_FOUND SESSION_NOT_FOUND")) << gone.err;
}

TEST_F(SluicectlE2eTest, TooLargeASessionIsSix) {
  const Result result = Try(
      "sessions open {s} --num-layers 1024 --num-query-heads 256 --num-kv-heads 256 --head-dim 128 "
      "--block-tokens 256 --max-blocks 16777216 --rank 128");
  EXPECT_EQ(result.exit_code, 6) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "DEVICE_MEMORY")) << result.err;
}

TEST_F(SluicectlE2eTest, LookingFencesNobody) {
  auto client = client::Client::Create({.address = daemon_->address()});
  ASSERT_TRUE(client.ok());
  v1::SessionSpec spec;
  spec.set_name(SessionName());
  spec.set_num_layers(1);
  spec.set_num_query_heads(1);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(16);
  spec.set_block_tokens(4);
  spec.set_max_blocks(4);
  auto scheduler = client->OpenSession(spec);
  ASSERT_TRUE(scheduler.ok()) << scheduler.status();
  for (const char* words : {"sessions get {s}", "sequences list --session {s}",
                            "blocks list --session {s}", "usage --session {s}"}) {
    Do(words);
  }
  EXPECT_TRUE(scheduler->GetSession().ok());
}

TEST_F(SluicectlE2eTest, Sequences) {
  Open();
  EXPECT_EQ(Do("sequences list --session {s}"), "no sequences\n");
  EXPECT_EQ(Do("sequences put 1 --session {s} --blocks 0-2,7"),
            "sequence 1 has 4 blocks; 8 slots newly reserved\n");
  EXPECT_EQ(Do("sequences fork 1 2 --session {s} --tokens 5"), "sequence 2 has 2 blocks\n");
  EXPECT_EQ(Do("sequences truncate 1 --session {s} --tokens 0 --generation 2"),
            "sequence 1 has 0 blocks\n");
  EXPECT_EQ(Do("sequences list --session {s}"),
            "SEQUENCE  GENERATION  TOKENS  BLOCKS  TABLE\n"
            "       1           2       0       0  -\n"
            "       2           1       0       2  0-1\n");
  EXPECT_EQ(Json<v1::ListSequencesResponse>("sequences list --session {s}").sequences_size(), 2);
  const Result stale = Try("sequences put 1 --session {s} --blocks 3 --generation 1");
  EXPECT_EQ(stale.exit_code, 5);
  EXPECT_TRUE(absl::StrContains(stale.err, "STALE_GENERATION")) << stale.err;
  EXPECT_EQ(Try("sequences release 1,9 --session {s}").exit_code, 4);
  Do("sequences release 1-2 --session {s} --drop-blocks");
  EXPECT_EQ(Try("sequences list --session absent").exit_code, 4);
}

TEST_F(SluicectlE2eTest, Blocks) {
  Open();
  EXPECT_EQ(Do("blocks list --session {s}"), "no blocks\n");
  OffloadPrompt();
  const std::string list = Do("blocks list --session {s} --layers 0");
  EXPECT_TRUE(absl::StrContains(list, "stored")) << list;
  EXPECT_TRUE(absl::StrContains(list, "0xff")) << list;
  EXPECT_EQ(Json<v1::ListBlocksResponse>("blocks list --session {s}").blocks_size(), 8);
  EXPECT_EQ(Json<v1::ListBlocksResponse>("blocks list --session {s} --tier disk").blocks_size(), 0);
  EXPECT_TRUE(absl::StrContains(Do("blocks describe 9 --session {s} --layers 1"), "absent"));
  EXPECT_EQ(Json<v1::FindBlocksResponse>("blocks find a 0xff --session {s}").blocks_size(), 4);
  EXPECT_EQ(Do("blocks drop 3 --session {s}"), "dropped 2 blocks; 8 KiB given back\n");
  const Result missing = Try("blocks drop 3 --session {s}");
  EXPECT_EQ(missing.exit_code, 4);
  EXPECT_TRUE(absl::StrContains(missing.err, "BLOCK_NOT_FOUND")) << missing.err;
  EXPECT_TRUE(absl::StrContains(missing.err, "block_id: 3")) << missing.err;
  EXPECT_TRUE(absl::StrContains(Do("blocks drop 3 --session {s} --allow-missing"), "dropped 0"));
  Do("sequences put 0 --session {s} --blocks 0");
  const Result held = Try("blocks drop 0 --session {s}");
  EXPECT_EQ(held.exit_code, 5);
  EXPECT_TRUE(absl::StrContains(held.err, "BLOCK_IN_TABLE")) << held.err;
  EXPECT_EQ(Try("blocks describe 32 --session {s}").exit_code, 7);
}

TEST_F(SluicectlE2eTest, FetchGivesTheFilesBack) {
  Open();
  OffloadPrompt();
  const std::string k = Path("k-back.npy");
  const std::string v = Path("v-back.npy");
  EXPECT_TRUE(
      absl::StrContains(Do(absl::StrCat("fetch --session {s} --blocks 0-3 --k ", k, " --v ", v)),
                        "fetched 8 blocks (4 KiB) to"));
  EXPECT_EQ(ReadFile(k), ReadFile(Path("k.npy")));
  // V went in as floats, rounded from BF16 to begin with: as floats it comes back the same.
  const auto info = Json<v1::FetchBlocksResponse>(
      absl::StrCat("fetch --session {s} --blocks 0-3 --as float32 --k ", k, " --v ", v));
  EXPECT_EQ(info.blocks_size(), 8);
  EXPECT_EQ(ReadFile(v), ReadFile(Path("v.npy")));
  Do(absl::StrCat("fetch --session {s} --blocks 2 --layers 1 --as uint16 --k ", k, " --v ", v));
  EXPECT_TRUE(absl::StrContains(ReadFile(k), "'<u2'"));
  EXPECT_TRUE(absl::StrContains(ReadFile(k), "(1, 4, 2, 16)"));
}

TEST_F(SluicectlE2eTest, FetchThatFailsLeavesNoFile) {
  Open();
  const std::string k = Path("none-k.npy");
  const Result result =
      Try(absl::StrCat("fetch --session {s} --blocks 0 --k ", k, " --v ", Path("none-v.npy")));
  EXPECT_EQ(result.exit_code, 4) << result.err;
  EXPECT_FALSE(std::ifstream(k).good());
  EXPECT_FALSE(std::ifstream(k + ".part").good());
}

TEST_F(SluicectlE2eTest, OffloadChecksItsFiles) {
  Open();
  const std::string good = WriteNpy("good.npy", {2, 4, 4, 2, 16}, v1::DTYPE_BF16, true);
  const std::string flat = WriteNpy("flat.npy", {8, 4, 2, 16}, v1::DTYPE_BF16);
  const std::string bad = WriteNpy("bad.npy", {4, 2, 4, 16}, v1::DTYPE_BF16);
  const std::string fp16 = WriteNpy("fp16.npy", {2, 4, 4, 2, 16}, v1::DTYPE_FP16);
  const auto offload = [&](const std::string& k, const std::string& v, const std::string& more) {
    return Try(absl::StrCat("offload --session {s} --blocks 0-3 --k ", k, " --v ", v, " ", more));
  };
  EXPECT_EQ(offload(good, flat, "--last-valid-tokens 3 --batch-bytes 1KiB").exit_code, 0);
  EXPECT_EQ(
      Json<v1::DescribeBlocksResponse>("blocks describe 3 --session {s}").blocks(1).valid_tokens(),
      3u);
  EXPECT_EQ(offload(good, flat, "--predict off").exit_code, 0);
  EXPECT_TRUE(absl::StrContains(Do("blocks describe 3 --session {s}"), "  no  "));
  for (const Result& result :
       {offload(good, bad, ""), offload(good, fp16, ""), offload(good, "/nope.npy", ""),
        offload(good, good, "--tags a,b"), offload(good, good, "--predict maybe"),
        offload(good, good, "--layers 0"), offload(good, good, "--last-valid-tokens 5")}) {
    EXPECT_EQ(result.exit_code, 2) << result.err;
  }
}

TEST_F(SluicectlE2eTest, Score) {
  Open();
  OffloadPrompt();
  Do("sequences put 0 --session {s} --blocks 2,0,1");
  const std::string q = WriteNpy("q.npy", {4, 16}, v1::DTYPE_F32);
  const std::string text = Do(absl::StrCat("score --session {s} --layer 1 --sequence 0 --q ", q));
  EXPECT_TRUE(absl::StrContains(text, "3 blocks scored")) << text;
  const auto response = Json<v1::ScoreBlocksResponse>(
      absl::StrCat("score --session {s} --blocks 0-3 --kind max-dot --top 2 --scale 1 --q ", q));
  EXPECT_EQ(response.scores_size(), 4);
  EXPECT_EQ(response.top_size(), 2);
  const std::string bad = WriteNpy("bad-q.npy", {16, 4}, v1::DTYPE_F32);
  EXPECT_EQ(Try(absl::StrCat("score --session {s} --blocks 0 --q ", bad)).exit_code, 2);
  EXPECT_EQ(Try(absl::StrCat("score --session {s} --sequence 9 --q ", q)).exit_code, 4);
}

}  // namespace
}  // namespace sluice::ctl
