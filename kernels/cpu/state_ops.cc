// Begin, merge and finalize of running states. Bytes: each state once, read or written, and the
// outputs.

#include "kernels/cpu/state_ops.h"

#include <algorithm>

#include "kernels/cpu/highway_config.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/state_ops.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

void RunMerge(const MergeParams& params, int64_t begin, int64_t end) {
  const int64_t dim = params.head_dim;
  for (int64_t i = begin; i < end; ++i) {
    const StateRef into = {params.into.m + i, params.into.l + i, params.into.o + i * dim};
    for (int64_t p = 0; p < params.num_parts; ++p) {
      const RunningState& part = params.parts[p];
      FoldState(into, part.m[i], part.l[i], part.o + i * dim, params.head_dim);
    }
  }
}

void RunFinalize(const FinalizeParams& params, int64_t begin, int64_t end) {
  const int64_t dim = params.head_dim;
  for (int64_t i = begin; i < end; ++i) {
    const float* sink =
        params.sink_logits == nullptr ? nullptr : params.sink_logits + i % params.num_query_heads;
    const Finish finish = FinishOf(params.state.m[i], params.state.l[i], sink);
    StoreOut(params.out_dtype, params.state.o + i * dim, finish.factor, params.head_dim,
             params.out + i * dim * DTypeBytes(params.out_dtype));
    if (params.lse != nullptr) params.lse[i] = finish.lse;
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {
namespace {

// Rows of some 64 KiB of state at once.
PhaseSize RowsOf(int64_t rows, int64_t num_query_heads, int64_t head_dim, int64_t states) {
  return {rows * num_query_heads,
          std::max<int64_t>(1, (64 << 10) / (4 * (head_dim + 2) * (states + 1)))};
}

}  // namespace

HWY_EXPORT(RunMerge);
HWY_EXPORT(RunFinalize);

PhaseSize BeginOp::Start(int, int) {
  return RowsOf(params.num_rows, params.num_query_heads, params.head_dim, 0);
}
void BeginOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  std::fill(params.state.m + begin, params.state.m + end, -std::numeric_limits<float>::infinity());
  std::fill(params.state.l + begin, params.state.l + end, 0.0f);
  std::fill(params.state.o + begin * params.head_dim, params.state.o + end * params.head_dim, 0.0f);
}

PhaseSize MergeOp::Start(int, int) {
  return RowsOf(params.num_rows, params.num_query_heads, params.head_dim, params.num_parts);
}
void MergeOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  HWY_DYNAMIC_DISPATCH(RunMerge)(params, begin, end);
}

PhaseSize FinalizeOp::Start(int, int) {
  return RowsOf(params.num_rows, params.num_query_heads, params.head_dim, 1);
}
void FinalizeOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  HWY_DYNAMIC_DISPATCH(RunFinalize)(params, begin, end);
}

}  // namespace sluice
#endif  // HWY_ONCE
