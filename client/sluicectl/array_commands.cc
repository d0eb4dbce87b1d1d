// Commands that read or write .npy files: offload, fetch, score.

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/fetch.h"
#include "client/offload.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/format.h"
#include "client/sluicectl/npy.h"
#include "client/tensor.h"

namespace sluice::ctl {
namespace {

constexpr int64_t kDefaultBatchBytes = int64_t{16} << 20;
constexpr int64_t kDefaultTop = 10;
constexpr absl::string_view kArrayDetails =
    "K and V are .npy files of shape [layers, blocks, block_tokens, num_kv_heads, head_dim], or "
    "without\n"
    "the first extent for one layer. Elements are bfloat16 (as ml_dtypes stores it, '<V2', or the "
    "raw\n"
    "bits as uint16), float16 or float32. ";

// Every id of every layer, as FetchBlocks orders them.
struct Selection {
  std::vector<uint32_t> layers;
  std::vector<uint32_t> block_ids;

  int64_t num_blocks() const { return static_cast<int64_t>(layers.size() * block_ids.size()); }
};

absl::StatusOr<Selection> ReadSelection(const Args& args, const v1::SessionSpec& spec) {
  Selection selection;
  auto block_ids = args.GetIds("blocks");
  if (!block_ids.ok()) return block_ids.status();
  selection.block_ids = *std::move(block_ids);
  auto layers = args.GetIds("layers");
  if (!layers.ok()) return layers.status();
  selection.layers = *std::move(layers);
  if (selection.layers.empty()) {
    selection.layers.resize(spec.num_layers());
    std::iota(selection.layers.begin(), selection.layers.end(), 0);
  }
  return selection;
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Whether the last extents of `shape` are `inner`, and the others' product is `outer`.
absl::Status CheckShape(const std::string& path, const std::vector<int64_t>& shape, int64_t outer,
                        const std::vector<int64_t>& inner) {
  std::vector<int64_t> allowed = inner;
  if (outer > 1) allowed.insert(allowed.begin(), outer);
  const auto bad = [&] {
    return UsageError(absl::StrCat(
        path, " has the shape ", ShapeText(shape), "; allowed: ", ShapeText(allowed),
        outer > 1 ? absl::StrCat(", or that with ", outer,
                                 " split into leading extents, such as [layers, ids, ...]")
                  : ""));
  };
  if (shape.size() < inner.size()) return bad();
  const auto split = shape.end() - static_cast<std::ptrdiff_t>(inner.size());
  if (!std::equal(inner.begin(), inner.end(), split)) return bad();
  const int64_t product =
      std::accumulate(shape.begin(), split, int64_t{1}, std::multiplies<int64_t>());
  return product == outer ? absl::OkStatus() : bad();
}

std::vector<int64_t> BlockShape(const v1::SessionSpec& spec) {
  return {spec.block_tokens(), spec.num_kv_heads(), spec.head_dim()};
}

absl::StatusOr<v1::PredictMode> ReadPredictMode(const Args& args) {
  const std::string mode = args.Has("predict") ? args.Get("predict") : "required";
  if (mode == "required") return v1::PREDICT_MODE_REQUIRED;
  if (mode == "best-effort") return v1::PREDICT_MODE_BEST_EFFORT;
  if (mode == "off") return v1::PREDICT_MODE_OFF;
  return UsageError(absl::StrCat("--predict is '", mode, "'; allowed: required, best-effort, off"));
}

// A tag per block id, or none at all.
absl::StatusOr<std::vector<std::string>> ReadTags(const Args& args, size_t num_ids) {
  std::vector<std::string> tags(num_ids);
  if (!args.Has("tags")) return tags;
  const std::vector<std::string> texts = absl::StrSplit(args.Get("tags"), ',');
  if (texts.size() != num_ids) {
    return UsageError(absl::StrCat("--tags has ", texts.size(), " tags for ", num_ids,
                                   " block ids; allowed: one for each"));
  }
  for (size_t i = 0; i < num_ids; ++i) {
    auto tag = ParseTag(texts[i]);
    if (!tag.ok()) return tag.status();
    tags[i] = *std::move(tag);
  }
  return tags;
}

struct OffloadPlan {
  Selection selection;
  std::vector<std::string> tags;
  v1::PredictMode predict = v1::PREDICT_MODE_REQUIRED;
  uint32_t last_valid_tokens = 0;
  int64_t blocks_per_batch = 1;
};

absl::StatusOr<OffloadPlan> ReadOffloadPlan(const Args& args, const client::Session& session) {
  OffloadPlan plan;
  auto selection = ReadSelection(args, session.spec());
  if (!selection.ok()) return selection.status();
  plan.selection = *std::move(selection);
  auto tags = ReadTags(args, plan.selection.block_ids.size());
  if (!tags.ok()) return tags.status();
  plan.tags = *std::move(tags);
  auto predict = ReadPredictMode(args);
  if (!predict.ok()) return predict.status();
  plan.predict = *predict;
  auto valid = args.GetInt("last-valid-tokens", 0, 1, session.spec().block_tokens());
  if (!valid.ok()) return valid.status();
  plan.last_valid_tokens = static_cast<uint32_t>(*valid);
  auto batch_bytes = args.GetBytes("batch-bytes", kDefaultBatchBytes);
  if (!batch_bytes.ok()) return batch_bytes.status();
  const int64_t block_bytes = 2 * session.block_elements() * int64_t{sizeof(uint16_t)};
  plan.blocks_per_batch = std::max<int64_t>(1, *batch_bytes / block_bytes);
  return plan;
}

// Sends the arrays in batches. Every batch is all or nothing; one that fails stops the rest.
absl::StatusOr<v1::OffloadBlocksResponse> Send(const client::Session& session,
                                               const OffloadPlan& plan, NpyReader& k, NpyReader& v,
                                               const client::CallOptions& options) {
  client::OffloadWriter writer = session.OffloadStream({}, options);
  client::OffloadBatch batch(session);
  std::vector<uint16_t> k_bits;
  std::vector<uint16_t> v_bits;
  const auto num_ids = static_cast<int64_t>(plan.selection.block_ids.size());
  const int64_t num_blocks = plan.selection.num_blocks();
  for (int64_t first = 0; first < num_blocks; first += plan.blocks_per_batch) {
    const int64_t last = std::min(first + plan.blocks_per_batch, num_blocks);
    batch.Clear();
    batch.set_predict(plan.predict);
    for (int64_t i = first; i < last; ++i) {
      const int64_t id_index = i % num_ids;
      const uint32_t valid = id_index == num_ids - 1 ? plan.last_valid_tokens : 0;
      batch.AddBlock(plan.selection.layers[i / num_ids], plan.selection.block_ids[id_index], valid,
                     plan.tags[id_index]);
    }
    k_bits.resize((last - first) * session.block_elements());
    v_bits.resize(k_bits.size());
    const v1::Dtype dtype = session.spec().kv_dtype();
    if (absl::Status status = k.Read(dtype, absl::MakeSpan(k_bits)); !status.ok()) return status;
    if (absl::Status status = v.Read(dtype, absl::MakeSpan(v_bits)); !status.ok()) return status;
    batch.SetKv(k_bits, v_bits);
    auto batch_id = writer.Write(&batch);
    if (!batch_id.ok()) return batch_id.status();
  }
  if (absl::Status status = writer.Finish(); !status.ok()) return status;
  return writer.total();
}

absl::Status RunOffload(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  const Args& args = invocation.args();
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto plan = ReadOffloadPlan(args, *session);
  if (!plan.ok()) return plan.status();
  auto k = NpyReader::Open(args.Get("k"));
  if (!k.ok()) return k.status();
  auto v = NpyReader::Open(args.Get("v"));
  if (!v.ok()) return v.status();
  for (const auto& [path, reader] :
       {std::pair(args.Get("k"), &*k), std::pair(args.Get("v"), &*v)}) {
    absl::Status status = CheckShape(path, reader->header().shape, plan->selection.num_blocks(),
                                     BlockShape(session->spec()));
    if (!status.ok()) return status;
  }
  auto response = Send(*session, *plan, *k, *v, invocation.stream_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("stored ", response->stored_blocks(), " blocks (",
                        HumanBytes(response->stored_bytes()), "), ", response->predicted_blocks(),
                        " predicted, ", response->replaced_blocks(), " replaced\n");
  });
}

// The element type that --as asks for; the session's own where it does not.
absl::StatusOr<NpyHeader> FetchHeader(const Args& args, const Selection& selection,
                                      const v1::SessionSpec& spec) {
  NpyHeader header;
  const std::string as = args.Has("as") ? args.Get("as") : "native";
  if (as != "native" && as != "uint16" && as != "float32") {
    return UsageError(absl::StrCat("--as is '", as, "'; allowed: native, uint16, float32"));
  }
  if (as == "uint16" && spec.kv_dtype() != v1::DTYPE_BF16) {
    return UsageError("--as uint16 is for sessions of bf16");
  }
  header.dtype = as == "float32" ? v1::DTYPE_F32 : spec.kv_dtype();
  if (selection.layers.size() > 1) {
    header.shape.push_back(static_cast<int64_t>(selection.layers.size()));
  }
  header.shape.push_back(static_cast<int64_t>(selection.block_ids.size()));
  for (int64_t extent : BlockShape(spec)) header.shape.push_back(extent);
  return header;
}

absl::Status RunFetch(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  const Args& args = invocation.args();
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  const v1::Dtype dtype = session->spec().kv_dtype();
  auto selection = ReadSelection(args, session->spec());
  if (!selection.ok()) return selection.status();
  auto header = FetchHeader(args, *selection, session->spec());
  if (!header.ok()) return header.status();
  const bool raw_bits = args.Get("as") == "uint16";
  auto k = NpyWriter::Create(args.Get("k"), *header, raw_bits);
  if (!k.ok()) return k.status();
  auto v = NpyWriter::Create(args.Get("v"), *header, raw_bits);
  if (!v.ok()) return v.status();

  v1::BlockSet blocks;
  blocks.mutable_layers()->Assign(selection->layers.begin(), selection->layers.end());
  blocks.mutable_block_ids()->Assign(selection->block_ids.begin(), selection->block_ids.end());
  v1::FetchBlocksResponse fetched;  // the blocks alone, for what is printed
  client::FetchReader reader = session->FetchBlocks(blocks, invocation.stream_options());
  while (const client::FetchedBlock* block = reader.Next()) {
    if (absl::Status status = k->Append(dtype, block->k); !status.ok()) return status;
    if (absl::Status status = v->Append(dtype, block->v); !status.ok()) return status;
    *fetched.add_blocks() = block->info;
  }
  if (absl::Status status = reader.Finish(); !status.ok()) return status;
  if (absl::Status status = k->Close(); !status.ok()) return status;
  if (absl::Status status = v->Close(); !status.ok()) return status;
  return invocation.Print(fetched, [&] {
    const int64_t bytes = 2 * header->num_elements() * client::DtypeBytes(header->dtype);
    return absl::StrCat("fetched ", fetched.blocks_size(), " blocks (", HumanBytes(bytes), ") to ",
                        args.Get("k"), " and ", args.Get("v"), "\n");
  });
}

absl::Status ReadScoreTarget(const Args& args, v1::ScoreBlocksRequest* request) {
  if (args.Has("blocks") == args.Has("sequence")) {
    return UsageError("say what to score: --blocks IDS or --sequence ID");
  }
  if (args.Has("sequence")) {
    auto id = ParseId("--sequence", args.Get("sequence"));
    if (!id.ok()) return id.status();
    request->set_sequence_id(*id);
    return absl::OkStatus();
  }
  auto ids = args.GetIds("blocks");
  if (!ids.ok()) return ids.status();
  request->mutable_blocks()->mutable_block_ids()->Assign(ids->begin(), ids->end());
  return absl::OkStatus();
}

absl::StatusOr<v1::ScoreBlocksRequest> ReadScoreRequest(const Args& args) {
  v1::ScoreBlocksRequest request;
  if (absl::Status status = ReadScoreTarget(args, &request); !status.ok()) return status;
  auto layer = args.GetInt("layer", 0, 0, std::numeric_limits<uint32_t>::max());
  if (!layer.ok()) return layer.status();
  request.set_layer(static_cast<uint32_t>(*layer));
  const std::string kind = args.Has("kind") ? args.Get("kind") : "mass";
  if (kind != "mass" && kind != "max-dot") {
    return UsageError(absl::StrCat("--kind is '", kind, "'; allowed: mass, max-dot"));
  }
  request.set_kind(kind == "mass" ? v1::SCORE_KIND_MASS : v1::SCORE_KIND_MAX_DOT);
  if (args.Has("scale")) {
    float scale = 0;
    if (!absl::SimpleAtof(args.Get("scale"), &scale)) {
      return UsageError(absl::StrCat("--scale is '", args.Get("scale"), "'; allowed: a number"));
    }
    request.set_scale(scale);
  }
  return request;
}

std::string ScoreText(float score, bool predicted) {
  return predicted ? absl::StrFormat("%.6g", score) : "-";
}

std::string TopTable(const v1::ScoreBlocksResponse& response) {
  Table table({"RANK", "BLOCK", "INDEX", "SCORE", "PREDICTED"});
  int64_t rank = 0;
  for (const v1::TopBlock& block : response.top()) {
    table.Add({absl::StrCat(++rank), absl::StrCat(block.block_id()), absl::StrCat(block.index()),
               ScoreText(block.score(), block.predicted()), block.predicted() ? "yes" : "no"});
  }
  return absl::StrCat(table.Render(), "\n", response.scores_size(), " blocks scored\n");
}

// The daemon refuses to name more blocks than it scores, and how many a sequence has only the
// daemon knows: so the first call asks for none.
absl::StatusOr<v1::ScoreBlocksResponse> ScoreTop(const client::Session& session,
                                                 v1::ScoreBlocksRequest request,
                                                 absl::Span<const uint16_t> q, int64_t top,
                                                 const client::CallOptions& options) {
  auto response = session.ScoreBlocks(request, q, options);
  if (!response.ok() || top == 0) return response;
  request.set_top_k(static_cast<uint32_t>(std::min<int64_t>(top, response->scores_size())));
  return session.ScoreBlocks(std::move(request), q, options);
}

absl::Status RunScore(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  const Args& args = invocation.args();
  auto request = ReadScoreRequest(args);
  if (!request.ok()) return request.status();
  auto top = args.GetInt("top", kDefaultTop, 0, std::numeric_limits<uint32_t>::max());
  if (!top.ok()) return top.status();
  auto q_file = NpyReader::Open(args.Get("q"));
  if (!q_file.ok()) return q_file.status();
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  const v1::SessionSpec& spec = session->spec();
  absl::Status shape_status = CheckShape(args.Get("q"), q_file->header().shape, 1,
                                         {spec.num_query_heads(), spec.head_dim()});
  if (!shape_status.ok()) return shape_status;
  std::vector<uint16_t> q(q_file->header().num_elements());
  absl::Status read_status = q_file->Read(spec.kv_dtype(), absl::MakeSpan(q));
  if (!read_status.ok()) return read_status;
  auto response = ScoreTop(*session, *std::move(request), q, *top, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] { return TopTable(*response); });
}

}  // namespace

std::vector<Command> ArrayCommands() {
  return {
      {.path = "offload",
       .operands = "",
       .summary = "Store blocks from .npy files",
       .details = absl::StrCat(kArrayDetails,
                               "float32 is rounded to the session's type.\n"
                               "Goes out in batches; each is stored whole or not at all."),
       .options = {SessionOption(),
                   {"blocks", "IDS", "the blocks' ids, such as 0-7", true},
                   {"k", "FILE", "K", true},
                   {"v", "FILE", "V", true},
                   {"layers", "IDS",
                    "the layers that the file's blocks are of, such as 0-3,8 (default all)"},
                   {"last-valid-tokens", "N",
                    "tokens that count in the last of the ids (default all)"},
                   {"tags", "TAG,...", "one tag per id: text, or 0x and hexadecimal digits"},
                   {"predict", "required|best-effort|off",
                    "whether projected keys are made (default required)"},
                   {"batch-bytes", "BYTES", "bytes of K and V in a batch (default 16MiB)"}},
       .examples = {"sluicectl offload --session demo --blocks 0-7 --layers 0 --k k.npy --v v.npy",
                    "sluicectl offload --session demo --blocks 0-7 --k k.npy --v v.npy "
                    "--last-valid-tokens 3"},
       .run = &RunOffload},
      {.path = "fetch",
       .operands = "",
       .summary = "Write blocks to .npy files, bit for bit",
       .details = absl::StrCat(kArrayDetails,
                               "\nnp.load gives bfloat16 back as '<V2'; .view(ml_dtypes.bfloat16) "
                               "makes numbers of it.\n"
                               "A fetch that fails leaves no file."),
       .options = {SessionOption(),
                   {"blocks", "IDS", "the blocks' ids, such as 0-7", true},
                   {"k", "FILE", "K goes here", true},
                   {"v", "FILE", "V goes here", true},
                   LayersOption(),
                   {"as", "native|uint16|float32",
                    "elements: the session's (default), its bf16 as raw bits, or floats"}},
       .examples = {"sluicectl fetch --session demo --blocks 0-7 --layers 0 --k k.npy --v v.npy",
                    "sluicectl fetch --session demo --blocks 0-7 --k k.npy --v v.npy --as float32"},
       .run = &RunFetch},
      {.path = "score",
       .operands = "",
       .summary = "Score blocks against a query by their projected keys",
       .details =
           "q is a .npy file of shape [num_query_heads, head_dim]; its elements as for offload.",
       .options = {SessionOption(),
                   {"q", "FILE", "the query", true},
                   {"layer", "N", "the layer (default 0)"},
                   {"sequence", "ID", "score the blocks of this sequence"},
                   {"blocks", "IDS", "score these blocks"},
                   {"kind", "mass|max-dot",
                    "share of the softmax, or greatest dot product (default mass)"},
                   {"scale", "X", "logits are X times q.k (default 1 / sqrt(head_dim))"},
                   {"top", "N", "best blocks to show (default 10)"}},
       .examples =
           {"sluicectl score --session demo --layer 3 --sequence 0 --q q.npy",
            "sluicectl score --session demo --blocks 0-63 --q q.npy --kind max-dot --top 5"},
       .run = &RunScore},
  };
}

}  // namespace sluice::ctl
