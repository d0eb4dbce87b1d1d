// Begin, merge and finalize of running states. Bytes: each state once, read or written, and the
// outputs.

#include "kernels/cuda/op_kernels.h"
#include "kernels/cuda/state.cuh"

namespace sluice::cuda {
namespace {

// A block: one row and query head; a thread: one element of o.

__global__ void BeginKernel(BeginParams params) {
  const int64_t at = blockIdx.x;
  if (threadIdx.x == 0) {
    params.state.m[at] = MinusInfinity();
    params.state.l[at] = 0.0f;
  }
  for (int d = threadIdx.x; d < params.head_dim; d += blockDim.x) {
    params.state.o[at * params.head_dim + d] = 0.0f;
  }
}

__global__ void MergeKernel(MergeParams params) {
  const int64_t at = blockIdx.x;
  const bool stores = static_cast<int>(threadIdx.x) < params.head_dim;
  const int64_t o_at = at * params.head_dim + (stores ? threadIdx.x : 0);
  float m = params.into.m[at];
  float l = params.into.l[at];
  float o = params.into.o[o_at];
  __syncthreads();
  for (int64_t p = 0; p < params.num_parts; ++p) {
    const RunningState& part = params.parts[p];
    Fold fold;
    if (FoldBegin(m, l, part.m[at], part.l[at], fold)) o = FoldElement(fold, o, part.o[o_at]);
  }
  if (stores) params.into.o[o_at] = o;
  if (threadIdx.x == 0) {
    params.into.m[at] = m;
    params.into.l[at] = l;
  }
}

__global__ void FinalizeKernel(FinalizeParams params) {
  const int64_t at = blockIdx.x;
  const int head = static_cast<int>(at % params.num_query_heads);
  const Finish finish =
      FinishOf(params.state.m[at], params.state.l[at],
               params.sink_logits == nullptr ? nullptr : params.sink_logits + head);
  for (int d = threadIdx.x; d < params.head_dim; d += blockDim.x) {
    const int64_t i = at * params.head_dim + d;
    StoreOut(params.out_dtype, params.out, i, __fmul_rn(params.state.o[i], finish.factor));
  }
  if (threadIdx.x == 0 && params.lse != nullptr) params.lse[at] = finish.lse;
}

int Threads(int head_dim) { return (head_dim + 31) / 32 * 32; }

}  // namespace

cudaError_t LaunchBegin(const BeginParams& params, cudaStream_t stream) {
  const int64_t states = params.num_rows * params.num_query_heads;
  BeginKernel<<<static_cast<unsigned>(states), Threads(params.head_dim), 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchMerge(const MergeParams& params, cudaStream_t stream) {
  const int64_t states = params.num_rows * params.num_query_heads;
  MergeKernel<<<static_cast<unsigned>(states), Threads(params.head_dim), 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchFinalize(const FinalizeParams& params, cudaStream_t stream) {
  const int64_t states = params.num_rows * params.num_query_heads;
  FinalizeKernel<<<static_cast<unsigned>(states), Threads(params.head_dim), 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sluice::cuda
