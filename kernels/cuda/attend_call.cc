#include "kernels/cuda/attend_call.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cuda/attend_kernels.h"

namespace sluice::cuda {
namespace {

// Tokens that the kernel reads from one address where they lie in one block.
constexpr int kStepTokens = 16;

int64_t Align16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

int64_t TableBytes(const AttendParams& params, const AttendSequence& sequence) {
  return (sequence.context_tokens + params.layout.block_tokens - 1) / params.layout.block_tokens *
         static_cast<int64_t>(sizeof(std::byte*));
}

// Blocks of threads of a call that waits for the link to host memory: with all of the GPU it would
// hold the others up for milliseconds. These have some 0.8 MB on their way, several times what
// fills the link; more would only queue up there, in front of every small copy and launch of the
// others.
constexpr int kHostBlocksOfThreads = 8;
// HBM is read this many times as fast by so few blocks.
constexpr int64_t kHbmSpeedup = 5;

// Whether the link is what the call waits for.
bool WaitsForLink(const AttendParams& params) {
  int64_t num_blocks = 0;
  int64_t host_blocks = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttendSequence& sequence = params.sequences[i];
    num_blocks +=
        (sequence.context_tokens + params.layout.block_tokens - 1) / params.layout.block_tokens;
    host_blocks += sequence.host_blocks;
  }
  return host_blocks > 0 && host_blocks * kHbmSpeedup >= num_blocks - host_blocks;
}

cudaError_t LaunchAttend(const AttendKernelArgs& args, int pieces, cudaStream_t stream) {
  if (args.dtype == DType::kBf16) {
    return pieces == 1 ? LaunchAttendBf16x1(args, stream) : LaunchAttendBf16x2(args, stream);
  }
  return pieces == 1 ? LaunchAttendFp16x1(args, stream) : LaunchAttendFp16x2(args, stream);
}

}  // namespace

AttendCall::AttendCall(AttendPlan* plan, const AttendParams& params, int num_sms)
    : plan_(*plan), params_(params) {
  const KvLayout& layout = params.layout;
  pieces_ = PiecesOf(layout.head_dim, MaxRows(params));
  int blocks_of_threads = num_sms * BlocksPerSm(layout.head_dim);
  if (WaitsForLink(params)) {
    blocks_of_threads =
        std::min(blocks_of_threads, std::max(kHostBlocksOfThreads, layout.num_kv_heads));
  }
  plan->Build(params, 8 * pieces_, blocks_of_threads);
  int64_t tables_bytes = 0;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    tables_bytes += TableBytes(params, params.sequences[i]);
  }
  const int64_t teams_offset =
      std::ssize(plan->entries) * static_cast<int64_t>(sizeof(AttendEntryArgs));
  arrays_bytes_ = Align16(teams_offset +
                          std::ssize(plan->teams) * static_cast<int64_t>(sizeof(AttendTeamArgs)));
  // What goes into an upload: first the counters, then the arrays and tables that are too large
  // for the parameters.
  counters_bytes_ = Align16(plan->num_counters * static_cast<int64_t>(sizeof(uint32_t)));
  upload_bytes_ = counters_bytes_;
  if (arrays_bytes_ > kInlineArgsBytes) {
    upload_bytes_ += arrays_bytes_ + tables_bytes;
  } else if (arrays_bytes_ + tables_bytes > kInlineArgsBytes) {
    upload_bytes_ += tables_bytes;
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
  args_.counters = nullptr;
  args_.arrays = nullptr;
  args_.tables = nullptr;
  args_.teams_offset = static_cast<int32_t>(teams_offset);
  args_.tables_offset = static_cast<int32_t>(arrays_bytes_);
  args_.num_entries = static_cast<int32_t>(plan->entries.size());
  args_.num_teams = plan->num_teams();
  args_.team_blocks = plan->team_blocks;
  args_.part_spans = plan->part_spans;
  args_.head_dim = layout.head_dim;
  args_.num_query_heads = params.num_query_heads;
  args_.num_kv_heads = layout.num_kv_heads;
  args_.group = params.num_query_heads / layout.num_kv_heads;
  args_.block_tokens_log2 = std::countr_zero(static_cast<uint32_t>(layout.block_tokens));
  args_.regular = layout.block_tokens >= kStepTokens && layout.head_dim % 32 == 0;
  args_.scale = params.options.scale;
  args_.logit_softcap = params.options.logit_softcap;
  args_.dtype = layout.dtype;
  args_.out_dtype = params.out_dtype;
}

void AttendCall::Fill(std::byte* upload, const std::byte* seen) {
  if (counters_bytes_ > 0) std::memset(upload, 0, counters_bytes_);
  args_.counters = reinterpret_cast<uint32_t*>(const_cast<std::byte*>(seen));
  upload += counters_bytes_;
  seen += counters_bytes_;
  const bool arrays_inline = arrays_bytes_ <= kInlineArgsBytes;
  std::byte* arrays = arrays_inline ? args_.inline_arrays : upload;
  std::byte* tables = arrays + arrays_bytes_;
  if (!arrays_inline) args_.arrays = seen;
  if (arrays_inline && upload_bytes_ > counters_bytes_) {
    tables = upload;
    args_.tables = seen;
  }
  int64_t at = 0;
  for (int64_t i = 0; i < params_.num_sequences; ++i) {
    const AttendSequence& sequence = params_.sequences[i];
    const int64_t bytes = TableBytes(params_, sequence);
    if (bytes > 0) std::memcpy(tables + at, sequence.blocks, bytes);
    at += bytes;
  }
  const auto copy = [&](int64_t offset, const auto& values) {
    if (values.empty()) return;
    std::memcpy(arrays + offset, values.data(), values.size() * sizeof(values[0]));
  };
  copy(0, plan_.entries);
  copy(args_.teams_offset, plan_.teams);
}

cudaError_t AttendCall::Launch(cudaStream_t stream) const {
  return plan_.entries.empty() ? cudaSuccess : LaunchAttend(args_, pieces_, stream);
}

}  // namespace sluice::cuda
