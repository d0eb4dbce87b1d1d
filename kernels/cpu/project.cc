// ProjectKeys. Bytes: each K row once; P comes from L1. Bound by arithmetic: head_dim times rank
// multiply-adds in double for a row.

#include "kernels/cpu/project.h"

#include <algorithm>

#include "kernels/cpu/highway_config.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/project.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/project-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

void StoreProjected(const float* values, int rank, std::byte* to) {
  const DF df;
  const hn::Rebind<uint16_t, DF> d16;
  int r = 0;
  for (; r + kLanes <= rank; r += kLanes) {
    hn::StoreU(hn::TruncateTo(d16, RoundToBf16(df, hn::LoadU(df, values + r))), d16,
               reinterpret_cast<uint16_t*>(to) + r);
  }
  for (; r < rank; ++r) {
    const uint16_t bits = Bf16FromFloat(values[r]);
    std::memcpy(to + 2 * r, &bits, 2);
  }
}

void RunProjectKeys(const ProjectKeysParams& params, int64_t begin, int64_t end,
                    ProjectScratch& scratch) {
  const KvLayout& layout = params.layout;
  const int padded = PaddedRank(params.rank);
  int64_t loaded_head = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t head = unit / params.num_blocks;
    const ProjectBlock& block = params.blocks[unit % params.num_blocks];
    if (loaded_head < 0 || (head != loaded_head && params.projection_kv_head_stride_bytes != 0)) {
      LoadProjection(params.projection + head * params.projection_kv_head_stride_bytes,
                     layout.head_dim, params.rank, scratch.p);
      loaded_head = head;
    }
    const std::byte* k = block.block + head * layout.kv_head_stride_bytes;
    std::byte* projected = block.projected + 2 * head * layout.block_tokens * params.rank;
    const int last = block.first_token + block.num_tokens;
    for (int t = block.first_token; t < last; t += kProjectRows) {
      const int rows = std::min(last - t, kProjectRows);
      const std::byte* from[kProjectRows] = {};
      for (int i = 0; i < rows; ++i) from[i] = k + (t + i) * layout.token_stride_bytes;
      alignas(64) float out[kProjectRows * kMaxRank];
      ProjectRows(layout.dtype, from, rows, layout.head_dim, params.rank, scratch.p, out);
      for (int i = 0; i < rows; ++i) {
        StoreProjected(out + i * padded, params.rank,
                       projected + 2 * static_cast<int64_t>(t + i) * params.rank);
      }
    }
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

HWY_EXPORT(RunProjectKeys);

PhaseSize ProjectKeysOp::Start(int, int) {
  int64_t max_tokens = 0;
  for (int64_t i = 0; i < params.num_blocks; ++i) {
    max_tokens = std::max<int64_t>(max_tokens, params.blocks[i].num_tokens);
  }
  if (max_tokens == 0) return {0, 1};
  // About 16 multiply-adds a nanosecond.
  const int64_t unit_ns =
      std::max<int64_t>(max_tokens * params.layout.head_dim * params.rank / 16, 50);
  return {params.num_blocks * params.layout.num_kv_heads, std::max<int64_t>(1, 20'000 / unit_ns)};
}

void ProjectKeysOp::Run(int, int64_t begin, int64_t end, WorkerScratch& scratch) {
  HWY_DYNAMIC_DISPATCH(RunProjectKeys)(params, begin, end, scratch.As<ProjectScratch>());
}

}  // namespace sluice
#endif  // HWY_ONCE
