// Scores of blocks, and A_g rows as they are stored.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {

struct ScoreCall::Work {
  std::vector<ScoreBlock> blocks;
  std::vector<uint32_t> block_ids;
  std::vector<uint8_t> predicted;
  std::vector<TopBlock> top;
  int64_t scores_offset = 0;
  int64_t top_offset = 0;
};

ScoreCall::ScoreCall() : work_(std::make_unique<Work>()) {}
ScoreCall::~ScoreCall() = default;

absl::Status ScoreCall::Resolve(SessionImpl& session) {
  if (by_sequence) {
    if (sequence_id >= session.spec_.max_sequences) {
      return InvalidField("sequence_id", sequence_id,
                          absl::StrCat("0..", session.spec_.max_sequences - 1));
    }
    const SequenceState* state = session.FindSequence(sequence_id);
    if (state == nullptr) return SequenceNotFound(sequence_id);
    work_->block_ids.assign(state->block_ids.begin(), state->block_ids.end());
  } else {
    if (block_ids.empty() || std::ssize(block_ids) > session.spec_.max_blocks) {
      return InvalidField("blocks.block_ids", absl::StrCat(block_ids.size(), " ids"),
                          absl::StrCat("1..", session.spec_.max_blocks, " ids"));
    }
    for (const uint32_t block_id : block_ids) {
      SLUICE_RETURN_IF_ERROR(session.CheckBlockId(block_id, "blocks.block_ids"));
      if (!session.blocks_->at(layer, block_id).present()) return BlockNotFound(layer, block_id);
    }
    work_->block_ids.assign(block_ids.begin(), block_ids.end());
  }
  if (top_k > work_->block_ids.size()) {
    return InvalidField(
        "top_k", top_k,
        absl::StrCat("0..", work_->block_ids.size(), ", the blocks that are scored"));
  }
  return absl::OkStatus();
}

absl::Status ScoreCall::Start(SessionImpl& session) {
  const SessionSpec& spec = session.spec_;
  SLUICE_RETURN_IF_ERROR(session.CheckLayer(layer));
  const int64_t q_dims[] = {spec.num_query_heads, spec.head_dim};
  SLUICE_RETURN_IF_ERROR(CheckTensor(q, "q", spec.kv_dtype, q_dims));
  if (has_scale && !std::isfinite(scale)) return InvalidField("scale", scale, "a finite number");
  SLUICE_RETURN_IF_ERROR(Resolve(session));

  const int64_t num_blocks = std::ssize(work_->block_ids);
  work_->blocks.clear();
  work_->predicted.clear();
  for (const uint32_t block_id : work_->block_ids) {
    const BlockEntry& entry = session.blocks_->at(layer, block_id);
    const bool is_predicted = entry.stored() && entry.projected != nullptr;
    work_->blocks.push_back({is_predicted ? entry.projected : nullptr, entry.valid_tokens});
    work_->predicted.push_back(is_predicted ? 1 : 0);
  }
  Staging& staging = internal_->staging;
  staging.Begin();
  const int64_t q_offset = staging.Add(q.bytes);
  work_->scores_offset = staging.Add(num_blocks * 4);
  work_->top_offset = staging.Add(top_k * 8);
  SLUICE_RETURN_IF_ERROR(
      session.CommitStaging(staging, num_blocks * static_cast<int64_t>(sizeof(ScoreBlock))));
  std::memcpy(staging.at(q_offset), q.data, q.bytes);

  ScoreParams params;
  params.kind = kind;
  params.q_dtype = spec.kv_dtype;
  params.num_query_heads = static_cast<int32_t>(spec.num_query_heads);
  params.num_kv_heads = static_cast<int32_t>(spec.num_kv_heads);
  params.head_dim = static_cast<int32_t>(spec.head_dim);
  params.block_tokens = static_cast<int32_t>(spec.block_tokens);
  params.rank = static_cast<int32_t>(spec.rank);
  params.scale = has_scale ? scale : 1.0f / std::sqrt(static_cast<float>(spec.head_dim));
  params.projection = session.projection_.data();
  params.q = staging.at(q_offset);
  params.blocks = work_->blocks.data();
  params.num_blocks = num_blocks;
  params.scores = staging.at<float>(work_->scores_offset);
  params.top = staging.at<int64_t>(work_->top_offset);
  params.top_k = top_k;
  params.workspace = session.score_workspace_.data();
  // An empty sequence has no scores.
  if (num_blocks > 0) session.ops_.ScoreBlocks(params, *session.attention_stream_);
  return absl::OkStatus();
}

void ScoreCall::Collect(SessionImpl&) {
  const float* values = internal_->staging.at<float>(work_->scores_offset);
  scores = {values, work_->block_ids.size()};
  predicted = work_->predicted;
  work_->top.clear();
  const int64_t* order = internal_->staging.at<int64_t>(work_->top_offset);
  for (uint32_t i = 0; i < top_k; ++i) {
    const auto index = static_cast<uint32_t>(order[i]);
    work_->top.push_back(
        {index, work_->block_ids[index], values[index], work_->predicted[index] != 0});
  }
  top = work_->top;
}

struct ReadProjectedKeysCall::Work {
  std::vector<uint8_t> predicted;
  std::vector<uint32_t> valid_tokens;
  std::vector<ByteCopy> copies;
  int64_t rows_offset = 0;
};

ReadProjectedKeysCall::ReadProjectedKeysCall() : work_(std::make_unique<Work>()) {}
ReadProjectedKeysCall::~ReadProjectedKeysCall() = default;

absl::Status ReadProjectedKeysCall::Start(SessionImpl& session) {
  const SessionSpec& spec = session.spec_;
  SLUICE_RETURN_IF_ERROR(session.CheckLayer(layer));
  if (block_ids.empty() || std::ssize(block_ids) > spec.max_blocks) {
    return InvalidField("block_ids", absl::StrCat(block_ids.size(), " ids"),
                        absl::StrCat("1..", spec.max_blocks, " ids"));
  }
  work_->predicted.clear();
  work_->valid_tokens.clear();
  work_->copies.clear();
  for (const uint32_t block_id : block_ids) {
    SLUICE_RETURN_IF_ERROR(session.CheckBlockId(block_id, "block_ids"));
    if (!session.blocks_->at(layer, block_id).present()) return BlockNotFound(layer, block_id);
  }
  Staging& staging = internal_->staging;
  staging.Begin();
  const int64_t total_bytes = std::ssize(block_ids) * session.row_bytes_;
  work_->rows_offset = staging.Add(total_bytes);
  SLUICE_RETURN_IF_ERROR(session.CommitStaging(
      staging, std::ssize(block_ids) * spec.num_kv_heads * static_cast<int64_t>(sizeof(ByteCopy))));
  std::memset(staging.at(work_->rows_offset), 0, total_bytes);
  const int64_t head_bytes = spec.block_tokens * spec.rank * 2;
  for (size_t i = 0; i < block_ids.size(); ++i) {
    const BlockEntry& entry = session.blocks_->at(layer, block_ids[i]);
    const bool is_predicted = entry.stored() && entry.projected != nullptr;
    work_->predicted.push_back(is_predicted ? 1 : 0);
    work_->valid_tokens.push_back(entry.valid_tokens);
    if (!is_predicted) continue;
    for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
      const int64_t offset = i * session.row_bytes_ + head * head_bytes;
      work_->copies.push_back({staging.at(work_->rows_offset + offset),
                               entry.projected + head * head_bytes,
                               entry.valid_tokens * spec.rank * 2});
    }
  }
  session.ops_.CopyBytes({work_->copies.data(), std::ssize(work_->copies)},
                         *session.attention_stream_);
  projected_keys = {staging.at(work_->rows_offset), static_cast<size_t>(total_bytes)};
  return absl::OkStatus();
}

void ReadProjectedKeysCall::Collect(SessionImpl&) {
  predicted = work_->predicted;
  valid_tokens = work_->valid_tokens;
}

}  // namespace sluice
