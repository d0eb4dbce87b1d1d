#include "server/session/reservation.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxQueryHeads = 1024;
constexpr int64_t kMaxKvHeads = 256;
constexpr int64_t kMinHeadDim = 16;
constexpr int64_t kMaxBlocks = int64_t{1} << 24;
constexpr int64_t kMaxSequences = 65'536;
constexpr int64_t kMaxTileBlocks = 65'536;
constexpr int64_t kMaxNameBytes = 128;
constexpr int64_t kMaxFingerprintBytes = 256;
constexpr int64_t kDefaultRank = 32;
constexpr int64_t kDefaultMaxSequences = 64;
constexpr int64_t kDefaultTileBlocks = 256;
constexpr absl::Duration kDefaultLease = absl::Seconds(60);
constexpr absl::Duration kMaxLease = absl::Hours(24);
constexpr absl::Duration kMaxRetention = absl::Hours(24 * 30);

// A step's partial states may take this much, or what one query token over the whole context needs.
constexpr int64_t kSplitWorkspaceBytes = int64_t{64} << 20;
// Tile runs may hold this many rows for each sequence of the session.
constexpr int64_t kRunRowsPerSequence = 2;
// Batches of replaced blocks that may be under way at once.
constexpr int64_t kReplacementBatches = 2;

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t min, int64_t max,
                        absl::string_view more = "") {
  if (value >= min && value <= max) return absl::OkStatus();
  return InvalidField(absl::StrCat("spec.", field), value, absl::StrCat(min, "..", max, more));
}

bool NameIsValid(absl::string_view name) {
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           absl::string_view("._-/:").find(c) != absl::string_view::npos;
  });
}

absl::Status CheckGeometry(const SessionSpec& spec) {
  SLUICE_RETURN_IF_ERROR(CheckRange("num_layers", spec.num_layers, 1, kMaxLayers));
  SLUICE_RETURN_IF_ERROR(CheckRange("num_kv_heads", spec.num_kv_heads, 1, kMaxKvHeads));
  SLUICE_RETURN_IF_ERROR(CheckRange("num_query_heads", spec.num_query_heads, 1, kMaxQueryHeads));
  if (spec.num_query_heads % spec.num_kv_heads != 0) {
    return InvalidField("spec.num_query_heads", spec.num_query_heads,
                        absl::StrCat("a multiple of num_kv_heads (", spec.num_kv_heads, ")"));
  }
  SLUICE_RETURN_IF_ERROR(
      CheckRange("head_dim", spec.head_dim, kMinHeadDim, kMaxHeadDim, ", a multiple of 8"));
  if (spec.head_dim % 8 != 0) {
    return InvalidField("spec.head_dim", spec.head_dim, "16..256, a multiple of 8");
  }
  SLUICE_RETURN_IF_ERROR(
      CheckRange("block_tokens", spec.block_tokens, 1, kMaxBlockTokens, ", a power of two"));
  if ((spec.block_tokens & (spec.block_tokens - 1)) != 0) {
    return InvalidField("spec.block_tokens", spec.block_tokens, "1..256, a power of two");
  }
  if (spec.kv_dtype == DType::kF32) {
    return InvalidField("spec.kv_dtype", "DTYPE_F32", "DTYPE_BF16 or DTYPE_FP16");
  }
  return CheckRange("rank", spec.rank, 1, std::min<int64_t>(kMaxRank, spec.head_dim),
                    absl::StrCat(" (at most 128 and at most head_dim, ", spec.head_dim, ")"));
}

}  // namespace

absl::StatusOr<SessionSpec> NormalizeSpec(const SessionSpec& given) {
  SessionSpec spec = given;
  if (spec.rank == 0) spec.rank = std::min(kDefaultRank, spec.head_dim);
  if (spec.max_sequences == 0) spec.max_sequences = kDefaultMaxSequences;
  if (spec.tile_blocks == 0) spec.tile_blocks = kDefaultTileBlocks;
  if (spec.lease == absl::ZeroDuration()) spec.lease = kDefaultLease;

  if (std::ssize(spec.name) > kMaxNameBytes || !NameIsValid(spec.name)) {
    return InvalidField("spec.name", spec.name,
                        "1 to 128 of letters, digits, '.', '_', '-', '/', ':'; or empty");
  }
  if (std::ssize(spec.model_fingerprint) > kMaxFingerprintBytes) {
    return InvalidField("spec.model_fingerprint",
                        absl::StrCat(spec.model_fingerprint.size(), " bytes long"),
                        "at most 256 bytes");
  }
  SLUICE_RETURN_IF_ERROR(CheckGeometry(spec));
  SLUICE_RETURN_IF_ERROR(CheckRange("max_blocks", spec.max_blocks, 1, kMaxBlocks));
  SLUICE_RETURN_IF_ERROR(CheckRange("max_sequences", spec.max_sequences, 1, kMaxSequences));
  SLUICE_RETURN_IF_ERROR(CheckRange("tile_blocks", spec.tile_blocks, 1, kMaxTileBlocks));
  if (spec.host_budget_bytes < 0) {
    return InvalidField("spec.host_budget_bytes", spec.host_budget_bytes, "0 or more");
  }
  if (spec.hbm_budget_bytes < 0) {
    return InvalidField("spec.hbm_budget_bytes", spec.hbm_budget_bytes, "0 or more");
  }
  if (spec.lease < absl::Seconds(1) || spec.lease > kMaxLease) {
    return InvalidField("spec.lease", absl::FormatDuration(spec.lease), "1 s .. 24 h");
  }
  if (spec.retention < absl::ZeroDuration() || spec.retention > kMaxRetention) {
    return InvalidField("spec.retention", absl::FormatDuration(spec.retention), "0 s .. 30 days");
  }
  return spec;
}

Reservation ComputeReservation(const SessionSpec& spec, int64_t max_message_bytes, const Ops& ops) {
  Reservation r;
  const int64_t num_entries = spec.num_layers * spec.max_blocks;
  const int64_t row_bytes = spec.num_kv_heads * spec.block_tokens * spec.rank * 2;
  const int64_t slot_bytes =
      SlotBytes(spec.kv_dtype, spec.num_kv_heads, spec.head_dim, spec.block_tokens);
  const int64_t batch_blocks = std::max<int64_t>(1, max_message_bytes / slot_bytes);
  const int64_t replacement_rows = std::min(num_entries, kReplacementBatches * batch_blocks);
  r.total_rows = num_entries + replacement_rows;
  r.run_rows = kRunRowsPerSequence * spec.max_sequences;

  r.a_g_bytes = num_entries * row_bytes;
  r.a_g_replacement_bytes = replacement_rows * row_bytes;
  r.projection_bytes = spec.head_dim * spec.rank * 2;
  const int64_t state_row_bytes =
      spec.num_query_heads * (spec.head_dim * 2 + 4 + (2 + spec.head_dim) * 4);
  r.running_state_bytes = r.run_rows * state_row_bytes;

  AttendSequence longest;
  longest.context_tokens = spec.max_blocks * spec.block_tokens;
  longest.query_tokens = 1;
  AttendParams attend;
  attend.layout =
      SlotLayout(spec.kv_dtype, static_cast<int32_t>(spec.num_kv_heads),
                 static_cast<int32_t>(spec.head_dim), static_cast<int32_t>(spec.block_tokens));
  attend.num_query_heads = static_cast<int32_t>(spec.num_query_heads);
  attend.sequences = &longest;
  attend.num_sequences = 1;
  attend.num_rows = 1;
  const int64_t longest_row_bytes = ops.AttendWorkspaceBytes(attend);
  // Divided, not multiplied: a row over 2^32 tokens times 2^22 rows does not fit into 64 bits.
  const int64_t most_rows =
      std::min(spec.max_sequences * kMaxQueryTokens, kSplitWorkspaceBytes / longest_row_bytes + 1);
  r.split_workspace_bytes =
      std::max(longest_row_bytes, std::min(kSplitWorkspaceBytes, longest_row_bytes * most_rows));

  ScoreParams score;
  score.kind = ScoreKind::kMass;
  score.num_query_heads = static_cast<int32_t>(spec.num_query_heads);
  score.num_kv_heads = static_cast<int32_t>(spec.num_kv_heads);
  score.head_dim = static_cast<int32_t>(spec.head_dim);
  score.block_tokens = static_cast<int32_t>(spec.block_tokens);
  score.rank = static_cast<int32_t>(spec.rank);
  score.num_blocks = spec.max_blocks;
  score.top_k = spec.max_blocks;
  r.score_workspace_bytes = ops.ScoreWorkspaceBytes(score);

  r.items = {
      {"a_g", r.a_g_bytes, 0,
       absl::StrCat("num_layers ", spec.num_layers, " x max_blocks ", spec.max_blocks,
                    " x num_kv_heads ", spec.num_kv_heads, " x block_tokens ", spec.block_tokens,
                    " x rank ", spec.rank, " x 2 bytes = ", r.a_g_bytes)},
      {"a_g_replacement", r.a_g_replacement_bytes, 0,
       absl::StrCat("blocks being replaced at once ", replacement_rows, " x num_kv_heads ",
                    spec.num_kv_heads, " x block_tokens ", spec.block_tokens, " x rank ", spec.rank,
                    " x 2 bytes")},
      {"projection", r.projection_bytes, r.projection_bytes,
       absl::StrCat("head_dim ", spec.head_dim, " x rank ", spec.rank, " x 2 bytes")},
      {"running_state", r.running_state_bytes, 0,
       absl::StrCat("rows of tile runs ", r.run_rows, " x num_query_heads ", spec.num_query_heads,
                    " x (head_dim ", spec.head_dim, " x 2 bytes of q + (head_dim + 3) x 4 bytes)")},
      {"split_workspace", r.split_workspace_bytes, 0,
       absl::StrCat("partial states of one query token over max_blocks x block_tokens = ",
                    longest.context_tokens, " tokens: ", longest_row_bytes, " bytes; more, up to ",
                    kSplitWorkspaceBytes, ", for batches")},
      {"score_workspace", r.score_workspace_bytes, 0,
       absl::StrCat("partial states of scoring max_blocks ", spec.max_blocks, " blocks")},
  };
  return r;
}

namespace {

// The largest value in 1..high for which `fits` holds (it must be monotonic), or 0.
int64_t LargestThatFits(int64_t high, const std::function<bool(int64_t)>& fits) {
  int64_t low = 0;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

absl::Status DoesNotFit(const SessionSpec& spec, const Reservation& reservation,
                        const DeviceBudget& budget, int64_t used_bytes, int64_t machine_bytes,
                        int64_t max_message_bytes, const Ops& ops) {
  const int64_t budget_bytes = budget.session_bytes();
  const int64_t free_bytes = std::max<int64_t>(0, UsableBytes(budget_bytes) - used_bytes);
  const int64_t need_bytes = reservation.total_bytes();
  const auto fits = [&](const SessionSpec& other) {
    return ComputeReservation(other, max_message_bytes, ops).total_bytes() <= free_bytes;
  };
  const int64_t fits_rank = LargestThatFits(spec.rank - 1, [&](int64_t rank) {
    SessionSpec other = spec;
    other.rank = rank;
    return fits(other);
  });
  const int64_t fits_blocks = LargestThatFits(spec.max_blocks - 1, [&](int64_t max_blocks) {
    SessionSpec other = spec;
    other.max_blocks = max_blocks;
    return fits(other);
  });
  // The least budget whose usable part holds what is used and what is needed.
  int64_t fits_budget = need_bytes + used_bytes;
  fits_budget += fits_budget / (kReservedShareDivisor - 1);
  while (UsableBytes(fits_budget) - used_bytes < need_bytes) ++fits_budget;
  while (UsableBytes(fits_budget - 1) - used_bytes >= need_bytes) --fits_budget;
  fits_budget = budget.TotalFor(fits_budget);

  Error error(absl::StatusCode::kResourceExhausted, Reason::kDeviceMemory, [&] {
    std::vector<std::string> helps;
    if (fits_rank > 0) helps.push_back(absl::StrCat("rank ", fits_rank));
    if (fits_blocks > 0) helps.push_back(absl::StrCat("max_blocks ", fits_blocks));
    if (fits_budget <= machine_bytes) {
      helps.push_back(absl::StrCat("--hbm_budget_bytes=", fits_budget));
    }
    return absl::StrCat(
        "the session needs ", need_bytes, " bytes of device memory, ", free_bytes,
        " are free (5 % of the budget stays free); A_g: ", reservation.items[0].formula, "; ",
        helps.empty() ? "no single setting would make it fit"
                      : absl::StrCat("any one of these would fit: ", absl::StrJoin(helps, ", ")),
        "; kv_dtype would not help, A_g is BF16 for each");
  }());
  error.AddMeta("need_bytes", need_bytes);
  error.AddMeta("free_bytes", free_bytes);
  error.AddMeta("budget_bytes", budget_bytes);
  error.AddMeta("a_g_formula", reservation.items[0].formula);
  if (fits_rank > 0) error.AddMeta("fits_rank", fits_rank);
  if (fits_blocks > 0) error.AddMeta("fits_max_blocks", fits_blocks);
  if (fits_budget <= machine_bytes) error.AddMeta("fits_hbm_budget_bytes", fits_budget);
  for (const MemoryItem& item : reservation.items) {
    error.AddMeta(absl::StrCat("item_", item.name), item.reserved_bytes);
  }
  return error;
}

}  // namespace sluice
