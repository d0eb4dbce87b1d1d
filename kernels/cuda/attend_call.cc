#include "kernels/cuda/attend_call.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cuda/attend_kernels.h"

namespace sluice::cuda {
namespace {

// Tokens that attention copies at once where they lie in one piece.
constexpr int kStepTokens = 16;

int64_t Align16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

int64_t TableBytes(const AttendParams& params, const AttendSequence& sequence) {
  return (sequence.context_tokens + params.layout.block_tokens - 1) / params.layout.block_tokens *
         static_cast<int64_t>(sizeof(std::byte*));
}

}  // namespace

AttendCall::AttendCall(AttendPlan* plan, const AttendParams& params, int num_sms)
    : plan_(*plan), params_(params), num_sms_(num_sms) {
  const KvLayout& layout = params.layout;
  pieces_ = PiecesOf(layout.head_dim, MaxRows(params));
  plan->Build(params, 8 * pieces_, num_sms);
  int64_t tables_bytes = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    tables_bytes += TableBytes(params, params.sequences[i]);
  }
  const int64_t units_offset =
      Align16(params.num_sequences * static_cast<int64_t>(sizeof(AttendSequenceArgs)));
  const int64_t merges_offset =
      units_offset +
      Align16(std::ssize(plan->units) * static_cast<int64_t>(sizeof(AttendUnitArgs)));
  arrays_bytes_ = merges_offset +
                  Align16(std::ssize(plan->merges) * static_cast<int64_t>(sizeof(AttendMergeArgs)));

  if (arrays_bytes_ > kInlineArgsBytes) {
    upload_bytes_ = arrays_bytes_ + tables_bytes;
  } else if (arrays_bytes_ + tables_bytes > kInlineArgsBytes) {
    upload_bytes_ = tables_bytes;
  }

  args_.token_stride_bytes = layout.token_stride_bytes;
  args_.kv_head_stride_bytes = layout.kv_head_stride_bytes;
  args_.v_offset_bytes = layout.v_offset_bytes;
  args_.window_tokens = params.options.window_tokens;
  args_.sink_tokens = params.options.window_tokens > 0 ? params.options.sink_tokens : 0;
  args_.q = params.q;
  args_.out = params.out;
  args_.lse = params.lse;
  args_.sink_logits = params.options.sink_logits;
  args_.state = params.state;
  const auto workspace = reinterpret_cast<int64_t>(params.workspace);
  args_.partial_m_l = reinterpret_cast<float*>((workspace + 255) / 256 * 256);
  args_.partial_o = args_.partial_m_l + (2 * plan->num_states + 3) / 4 * 4;
  args_.arrays = nullptr;
  args_.tables = nullptr;
  args_.tables_offset = static_cast<int32_t>(arrays_bytes_);
  args_.units_offset = static_cast<int32_t>(units_offset);
  args_.merges_offset = static_cast<int32_t>(merges_offset);
  args_.num_units = static_cast<int32_t>(plan->units.size());
  args_.num_merges = static_cast<int32_t>(plan->merges.size());
  args_.head_dim = layout.head_dim;
  args_.num_query_heads = params.num_query_heads;
  args_.num_kv_heads = layout.num_kv_heads;
  args_.group = params.num_query_heads / layout.num_kv_heads;
  args_.block_tokens_log2 = std::countr_zero(static_cast<uint32_t>(layout.block_tokens));
  args_.contiguous = layout.block_tokens >= kStepTokens && layout.head_dim % 32 == 0 &&
                     layout.token_stride_bytes == 2 * layout.head_dim;
  args_.num_stages = 0;
  args_.warp_bytes = 0;
  args_.scale = params.options.scale;
  args_.logit_softcap = params.options.logit_softcap;
  args_.dtype = layout.dtype;
  args_.out_dtype = params.out_dtype;
}

void AttendCall::Fill(std::byte* upload, const std::byte* seen) {
  const bool arrays_inline = arrays_bytes_ <= kInlineArgsBytes;
  std::byte* arrays = arrays_inline ? args_.inline_arrays : upload;
  std::byte* tables = arrays + arrays_bytes_;
  if (!arrays_inline) args_.arrays = seen;
  if (arrays_inline && upload_bytes_ > 0) {
    tables = upload;
    args_.tables = seen;
  }
  int64_t at = 0;
  for (int64_t i = 0; i < params_.num_sequences; ++i) {
    const AttendSequence& sequence = params_.sequences[i];
    const int64_t bytes = TableBytes(params_, sequence);
    if (bytes > 0) std::memcpy(tables + at, sequence.blocks, bytes);
    const AttendSequenceArgs packed = {at, sequence.context_tokens, sequence.first_row,
                                       sequence.query_tokens, sequence.causal ? 1 : 0};
    std::memcpy(arrays + i * static_cast<int64_t>(sizeof(packed)), &packed, sizeof(packed));
    at += bytes;
  }
  const auto copy = [&](int64_t offset, const auto& values) {
    if (values.empty()) return;
    std::memcpy(arrays + offset, values.data(), values.size() * sizeof(values[0]));
  };
  copy(args_.units_offset, plan_.units);
  copy(args_.merges_offset, plan_.merges);
}

cudaError_t AttendCall::Launch(cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (args_.num_units > 0) error = LaunchAttend(args_, pieces_, num_sms_, stream);
  if (error == cudaSuccess && args_.num_merges > 0) {
    error = LaunchAttendMerge(args_, plan_.max_merge_query_tokens, stream);
  }
  return error;
}

}  // namespace sluice::cuda
