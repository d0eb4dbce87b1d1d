// Attention driven tile by tile by the scheduler: begin, step, finalize, abort.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {
namespace {

constexpr int64_t kMaxRows = 4'096;
constexpr absl::Duration kDefaultTimeout = absl::Seconds(60);
constexpr absl::Duration kMinTimeout = absl::Milliseconds(1);
constexpr absl::Duration kMaxTimeout = absl::Hours(1);
constexpr absl::Duration kRunsRetry = absl::Milliseconds(50);

int64_t Align64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

absl::StatusOr<std::shared_ptr<TileRun>> SessionImpl::FindRun(uint64_t run_id) {
  ExpireRuns(now_());
  const auto it = runs_.find(run_id);
  if (it == runs_.end()) {
    return Error(absl::StatusCode::kNotFound, Reason::kRunNotFound,
                 absl::StrCat("no tile run ", run_id,
                              ": never begun, finalized, aborted or timed out"))
        .Meta("run_id", run_id)
        .Resource("tile_run", absl::StrCat(run_id));
  }
  return it->second;
}

void SessionImpl::FreeRun(uint64_t run_id) {
  const auto it = runs_.find(run_id);
  if (it == runs_.end()) return;
  run_rows_ -= it->second->num_rows;
  runs_.erase(it);
}

void SessionImpl::ExpireRuns(absl::Time now) {
  std::vector<uint64_t> expired;
  for (const auto& [run_id, run] : runs_) {
    if (now >= run->deadline) expired.push_back(run_id);
  }
  for (const uint64_t run_id : expired) FreeRun(run_id);
}

BeginTilesCall::BeginTilesCall() = default;
BeginTilesCall::~BeginTilesCall() = default;

absl::Status BeginTilesCall::Start(SessionImpl& session) {
  const SessionSpec& spec = session.spec_;
  SLUICE_RETURN_IF_ERROR(session.CheckLayer(layer));
  const int64_t q_row_bytes = spec.num_query_heads * spec.head_dim * 2;
  const int64_t rows = num_rows > 0      ? num_rows
                       : q.shape.empty() ? q.bytes / q_row_bytes
                                         : q.shape[0];
  // More could never begin, however many other runs end.
  const int64_t most_rows = std::min(kMaxRows, session.reservation_.run_rows);
  if (q.given() && (rows < 1 || rows > most_rows)) {
    return InvalidField(
        "q.shape", absl::StrCat(rows, " rows"),
        absl::StrCat("1..", most_rows, " rows (2 x max_sequences, at most ", kMaxRows, ")"));
  }
  const int64_t q_dims[] = {rows, spec.num_query_heads, spec.head_dim};
  SLUICE_RETURN_IF_ERROR(CheckTensor(q, "q", spec.kv_dtype, q_dims));
  auto run = std::make_shared<TileRun>();
  SLUICE_RETURN_IF_ERROR(session.CheckAttention(attention, &run->options));
  if (attention.window_tokens != 0 || attention.sink_tokens != 0) {
    return InvalidField(
        attention.window_tokens != 0 ? "options.window_tokens" : "options.sink_tokens",
        std::max(attention.window_tokens, attention.sink_tokens),
        "0 with tiles: which blocks are seen is the caller's choice");
  }
  const absl::Duration run_timeout = timeout == absl::ZeroDuration() ? kDefaultTimeout : timeout;
  if (run_timeout < kMinTimeout || run_timeout > kMaxTimeout) {
    return InvalidField("timeout", absl::FormatDuration(timeout), "1 ms .. 1 h");
  }
  session.ExpireRuns(session.now_());
  if (std::ssize(session.runs_) >= session.max_tile_runs_ ||
      session.run_rows_ + rows > session.reservation_.run_rows) {
    return Error(
               absl::StatusCode::kResourceExhausted, Reason::kTooManyRuns,
               absl::StrCat(
                   session.runs_.size(), " tile runs with ", session.run_rows_,
                   " rows are open; allowed: --max_tile_runs_per_session=", session.max_tile_runs_,
                   " and 2 x max_sequences = ", session.reservation_.run_rows, " rows in all"))
        .Meta("open_runs", session.runs_.size())
        .Meta("open_rows", session.run_rows_)
        .Meta("allowed_rows", session.reservation_.run_rows)
        .Retry(kRunsRetry);
  }

  const int64_t sinks_bytes = std::ssize(attention.sink_logits) * 4;
  const int64_t ml_bytes = rows * spec.num_query_heads * 4;
  const int64_t o_bytes = ml_bytes * spec.head_dim;
  const int64_t bytes =
      Align64(q.bytes) + Align64(sinks_bytes) + 2 * Align64(ml_bytes) + Align64(o_bytes);
  absl::StatusOr<Buffer> memory = session.device_->Reserve(MemoryKind::kHost, bytes);
  absl::Status got = memory.status();
  if (got.ok()) got = session.device_->Commit(*memory, 0, bytes);
  if (!got.ok()) return session.NoMemory(got, Reason::kHostMemory);
  run->memory = *std::move(memory);
  std::byte* next = run->memory.data();
  run->q = std::exchange(next, next + Align64(q.bytes));
  std::memcpy(run->q, q.data, q.bytes);
  if (sinks_bytes > 0) {
    std::memcpy(next, attention.sink_logits.data(), sinks_bytes);
    run->sink_logits = reinterpret_cast<const float*>(next);
    next += Align64(sinks_bytes);
  }
  run->state.m = reinterpret_cast<float*>(std::exchange(next, next + Align64(ml_bytes)));
  run->state.l = reinterpret_cast<float*>(std::exchange(next, next + Align64(ml_bytes)));
  run->state.o = reinterpret_cast<float*>(next);
  run->layer = layer;
  run->num_rows = rows;
  run->deadline = session.now_() + run_timeout;
  session.ops_.BeginStates({rows, static_cast<int32_t>(spec.num_query_heads),
                            static_cast<int32_t>(spec.head_dim), run->state},
                           *session.attention_stream_);
  run_id = session.next_run_id_++;
  session.run_rows_ += rows;
  // Held until the call is complete, so that an expiry meanwhile does not free what the device
  // writes.
  run_ = run;
  session.runs_.emplace(run_id, std::move(run));
  return absl::OkStatus();
}

void BeginTilesCall::Collect(SessionImpl&) { run_.reset(); }

struct StepTileCall::Work {
  std::shared_ptr<TileRun> run;
  std::vector<AttendSequence> attend;
  std::vector<AttendSequence> pieces;
  std::vector<const std::byte*> addresses;
};

StepTileCall::StepTileCall() : work_(std::make_unique<Work>()) {}
StepTileCall::~StepTileCall() = default;

// Appends a row's addresses and its entry in `attend`, or says what is wrong with it.
absl::Status StepTileCall::PlanRow(SessionImpl& session, const TileRow& row, int64_t index) {
  const SessionSpec& spec = session.spec_;
  // What is set aside for splits is enough for max_blocks blocks.
  if (std::ssize(row.block_ids) > std::min(spec.tile_blocks, spec.max_blocks)) {
    return InvalidField("rows.block_ids", absl::StrCat(row.block_ids.size(), " ids"),
                        absl::StrCat("at most tile_blocks (", spec.tile_blocks,
                                     ") and at most max_blocks (", spec.max_blocks, ")"));
  }
  if (row.last_block_valid_tokens > spec.block_tokens) {
    return InvalidField("rows.last_block_valid_tokens", row.last_block_valid_tokens,
                        absl::StrCat("0 (all) .. ", spec.block_tokens));
  }
  int64_t tokens = 0;
  int64_t host_blocks = 0;
  for (size_t i = 0; i < row.block_ids.size(); ++i) {
    const uint32_t block_id = row.block_ids[i];
    SLUICE_RETURN_IF_ERROR(session.CheckBlockId(block_id, "rows.block_ids"));
    const BlockEntry& entry = session.blocks_->at(work_->run->layer, block_id);
    if (!entry.stored()) return BlockNotFound(work_->run->layer, block_id);
    const bool last = i + 1 == row.block_ids.size();
    const int64_t need = !last                             ? spec.block_tokens
                         : row.last_block_valid_tokens > 0 ? row.last_block_valid_tokens
                                                           : entry.valid_tokens;
    if (entry.valid_tokens < need) {
      return Error(absl::StatusCode::kFailedPrecondition, Reason::kTokensMissing,
                   absl::StrCat("block ", block_id, " of layer ", work_->run->layer, " has ",
                                entry.valid_tokens, " tokens, ", need, " are to be read"))
          .Meta("layer", work_->run->layer)
          .Meta("block_id", block_id)
          .Meta("position", entry.valid_tokens);
    }
    tokens += need;
    work_->addresses.push_back(entry.slot);
    host_blocks += session.blocks_->InHbm(entry.slot) ? 0 : 1;
  }
  if (tokens == 0) return absl::OkStatus();
  AttendSequence attend;
  attend.context_tokens = tokens;
  attend.first_row = index;
  attend.query_tokens = 1;
  attend.causal = false;
  attend.host_blocks = host_blocks;
  work_->attend.push_back(attend);
  return absl::OkStatus();
}

absl::Status StepTileCall::Start(SessionImpl& session) {
  SLUICE_ASSIGN_OR_RETURN(work_->run, session.FindRun(run_id));
  TileRun& run = *work_->run;
  folded = false;
  if (std::ssize(rows) != run.num_rows) {
    return InvalidField("rows", absl::StrCat(rows.size(), " rows"),
                        absl::StrCat(run.num_rows, ", as many as q of BeginTiles"));
  }
  if (run.next_tile > 0 && tile_index == run.next_tile - 1) return absl::OkStatus();
  if (tile_index != run.next_tile) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kTileOutOfOrder,
                 absl::StrCat("tile_index is ", tile_index, "; the next tile is ", run.next_tile))
        .Meta("tile_index", tile_index)
        .Meta("next_tile", run.next_tile);
  }
  work_->attend.clear();
  work_->addresses.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    SLUICE_RETURN_IF_ERROR(PlanRow(session, rows[i], static_cast<int64_t>(i)));
  }
  // Before the tile counts as folded.
  int64_t array_bytes =
      run.num_rows * session.spec_.num_query_heads * session.spec_.head_dim * 2;  // q
  for (const AttendSequence& attend : work_->attend) {
    array_bytes += session.AttendArrayBytes(attend.context_tokens, attend.query_tokens);
  }
  SLUICE_RETURN_IF_ERROR(session.MakeRoom(*session.attention_stream_, array_bytes));
  const std::byte* const* next = work_->addresses.data();
  for (AttendSequence& attend : work_->attend) {
    attend.blocks = next;
    next += rows[attend.first_row].block_ids.size();
  }
  ++run.next_tile;
  folded = true;
  if (work_->attend.empty()) return absl::OkStatus();
  AttendParams params;
  params.layout = session.layout_;
  params.options = run.options;
  params.num_query_heads = static_cast<int32_t>(session.spec_.num_query_heads);
  params.sequences = work_->attend.data();
  params.num_sequences = std::ssize(work_->attend);
  params.num_rows = run.num_rows;
  params.q = run.q;
  params.state = run.state;
  session.LaunchAttend(params, &work_->pieces);
  return absl::OkStatus();
}

void StepTileCall::Collect(SessionImpl&) { work_->run.reset(); }

struct FinalizeTilesCall::Work {
  std::shared_ptr<TileRun> run;
};

FinalizeTilesCall::FinalizeTilesCall() : work_(std::make_unique<Work>()) {}
FinalizeTilesCall::~FinalizeTilesCall() = default;

absl::Status FinalizeTilesCall::Start(SessionImpl& session) {
  SLUICE_RETURN_IF_ERROR(session.CheckOutDtype(out_dtype));
  SLUICE_ASSIGN_OR_RETURN(work_->run, session.FindRun(run_id));
  const TileRun& run = *work_->run;
  const SessionSpec& spec = session.spec_;
  rows = run.num_rows;
  const int64_t row_heads = rows * spec.num_query_heads;
  const int64_t out_bytes = row_heads * spec.head_dim * DTypeBytes(out_dtype);
  const int64_t result_bytes = out_bytes + (return_lse ? row_heads * 4 : 0) +
                               (return_state ? row_heads * (spec.head_dim + 2) * 4 : 0);
  if (max_result_bytes > 0 && result_bytes > max_result_bytes) {
    work_->run.reset();
    return Error(absl::StatusCode::kResourceExhausted, Reason::kMessageTooLarge,
                 absl::StrCat("the outputs of run ", run_id, " have ", result_bytes,
                              " bytes; at most ", max_result_bytes,
                              " fit a message; ask for less, or use runs of fewer rows"))
        .Meta("message", "reply")
        .Meta("size_bytes", result_bytes)
        .Meta("limit_bytes", max_result_bytes);
  }
  Staging& staging = internal_->staging;
  staging.Begin();
  const int64_t out_offset = staging.Add(out_bytes);
  const int64_t lse_offset = staging.Add(return_lse ? row_heads * 4 : 0);
  SLUICE_RETURN_IF_ERROR(session.CommitStaging(staging, 0));
  FinalizeParams params;
  params.num_rows = rows;
  params.num_query_heads = static_cast<int32_t>(spec.num_query_heads);
  params.head_dim = static_cast<int32_t>(spec.head_dim);
  params.state = run.state;
  params.sink_logits = run.sink_logits;
  params.out = staging.at(out_offset);
  params.out_dtype = out_dtype;
  params.lse = return_lse ? staging.at<float>(lse_offset) : nullptr;
  session.ops_.FinalizeStates(params, *session.attention_stream_);
  out = {staging.at(out_offset), static_cast<size_t>(out_bytes)};
  const auto floats = [](const float* data, bool wanted, int64_t count) {
    return absl::MakeConstSpan(data, wanted ? static_cast<size_t>(count) : 0);
  };
  lse = floats(staging.at<float>(lse_offset), return_lse, row_heads);
  // The states are host memory that stays with the call.
  state_m = floats(run.state.m, return_state, row_heads);
  state_l = floats(run.state.l, return_state, row_heads);
  state_o = floats(run.state.o, return_state, row_heads * spec.head_dim);
  session.FreeRun(run_id);
  return absl::OkStatus();
}

void FinalizeTilesCall::Collect(SessionImpl&) {
  if (!return_state) work_->run.reset();
}

AbortTilesCall::AbortTilesCall() = default;
AbortTilesCall::~AbortTilesCall() = default;

absl::Status AbortTilesCall::Start(SessionImpl& session) {
  session.FreeRun(run_id);
  return absl::OkStatus();
}

void AbortTilesCall::Collect(SessionImpl&) {}

}  // namespace sluice
