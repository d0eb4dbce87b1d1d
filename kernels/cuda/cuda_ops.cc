#include "kernels/cuda/cuda_ops.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/attend_plan.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/op_kernels.h"
#include "kernels/cuda/stream.h"
#include "kernels/ops/check.h"
#include "kernels/ops/check_params.h"

namespace sluice::cuda {
namespace {

// Kernels read up to this much of a call's arrays from pinned memory in place; more is copied to
// the GPU first, since several blocks of threads read it.
constexpr int64_t kInPlaceBytes = 4096;
// Queries up to this many bytes travel to the GPU with a call's other arrays; more has a copy of
// its own, straight from where it is.
constexpr int64_t kPackedQueryBytes = 64 << 10;

int64_t Align16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// An array as kernels can read it: in place where it is pinned, else as a copy that lives until the
// operation is complete. Inside Submit.
template <typename T>
const T* Reachable(const T* array, int64_t count, CudaStream& stream, cudaStream_t handle) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  const bool pinned = IsPinned(array, bytes);
  if (pinned && bytes <= kInPlaceBytes) return array;
  const Upload upload = stream.TakeUpload(bytes);
  if (!pinned) {
    std::memcpy(upload.host, array, bytes);
    if (bytes <= kInPlaceBytes) return reinterpret_cast<const T*>(upload.host);
  }
  const void* from = pinned ? static_cast<const void*>(array) : upload.host;
  SLUICE_CUDA_CHECK(cudaMemcpyAsync(upload.device, from, bytes, cudaMemcpyHostToDevice, handle));
  return reinterpret_cast<const T*>(upload.device);
}

StreamPosition CopyTokens(TokenCopyParams params, bool store, Stream& stream) {
  CheckCopies(params);
  int max_tokens = 0;
  for (int64_t i = 0; i < params.num_copies; ++i) {
    max_tokens = std::max(max_tokens, params.copies[i].num_tokens + params.copies[i].zero_tokens);
  }
  CudaStream& to = CudaStream::From(stream);
  return to.Submit([&](cudaStream_t handle) {
    if (max_tokens == 0) return;
    params.copies = Reachable(params.copies, params.num_copies, to, handle);
    SLUICE_CUDA_CHECK(LaunchTokenCopy(params, max_tokens, store, handle));
  });
}

// A plan a thread: it keeps its room.
AttendPlan& ThreadPlan() {
  thread_local AttendPlan plan;
  return plan;
}

}  // namespace

StreamPosition CudaOps::StoreTokens(const TokenCopyParams& params, Stream& stream) {
  return CopyTokens(params, true, stream);
}

StreamPosition CudaOps::GatherTokens(const TokenCopyParams& params, Stream& stream) {
  return CopyTokens(params, false, stream);
}

StreamPosition CudaOps::CopyBytes(const ByteCopyParams& params, Stream& stream) {
  CudaStream& to = CudaStream::From(stream);
  int64_t max_bytes = 0;
  for (int64_t i = 0; i < params.num_copies; ++i) {
    max_bytes = std::max(max_bytes, params.copies[i].bytes);
  }
  return to.Submit([&](cudaStream_t handle) {
    if (max_bytes == 0) return;
    if (params.num_copies == 1) {
      const ByteCopy& copy = params.copies[0];
      SLUICE_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, handle));
      return;
    }
    const ByteCopyParams reachable = {Reachable(params.copies, params.num_copies, to, handle),
                                      params.num_copies};
    SLUICE_CUDA_CHECK(LaunchByteCopy(reachable, max_bytes, handle));
  });
}

StreamPosition CudaOps::ProjectKeys(const ProjectKeysParams& params, Stream& stream) {
  CheckProjectKeys(params);
  int max_tokens = 0;
  for (int64_t i = 0; i < params.num_blocks; ++i) {
    max_tokens = std::max(max_tokens, params.blocks[i].num_tokens);
  }
  CudaStream& to = CudaStream::From(stream);
  return to.Submit([&](cudaStream_t handle) {
    if (max_tokens == 0) return;
    ProjectKeysParams reachable = params;
    reachable.blocks = Reachable(params.blocks, params.num_blocks, to, handle);
    SLUICE_CUDA_CHECK(LaunchProjectKeys(reachable, max_tokens, handle));
  });
}

int64_t CudaOps::ScoreWorkspaceBytes(const ScoreParams& params) const {
  return cuda::ScoreWorkspaceBytes(params);
}

StreamPosition CudaOps::ScoreBlocks(const ScoreParams& params, Stream& stream) {
  CheckScore(params);
  CudaStream& to = CudaStream::From(stream);
  return to.Submit([&](cudaStream_t handle) {
    if (params.num_blocks == 0) return;
    ScoreParams reachable = params;
    reachable.blocks = Reachable(params.blocks, params.num_blocks, to, handle);
    SLUICE_CUDA_CHECK(LaunchScore(reachable, handle));
  });
}

int64_t CudaOps::AttendWorkspaceBytes(const AttendParams& params) const {
  return cuda::AttendWorkspaceBytes(params);
}

StreamPosition CudaOps::Attend(const AttendParams& params, Stream& stream) {
  CheckAttend(params);
  AttendCall call(&ThreadPlan(), params, num_sms_);
  // Every unit of a row reads it, so q does not stay in host memory.
  const int64_t q_bytes =
      IsHost(params.q) ? params.num_rows * params.num_query_heads * params.layout.head_dim * 2 : 0;
  const int64_t q_offset = Align16(call.upload_bytes());
  const bool q_packed = q_bytes <= kPackedQueryBytes;
  CudaStream& to = CudaStream::From(stream);
  return to.Submit([&](cudaStream_t handle) {
    Upload upload;
    if (q_offset + q_bytes > 0) upload = to.TakeUpload(q_offset + q_bytes);
    call.Fill(upload.host, upload.device);
    if (q_bytes > 0) {
      call.set_q(upload.device + q_offset);
      if (q_packed) {
        std::memcpy(upload.host + q_offset, params.q, q_bytes);
      } else {
        SLUICE_CUDA_CHECK(cudaMemcpyAsync(upload.device + q_offset, params.q, q_bytes,
                                          cudaMemcpyHostToDevice, handle));
      }
    }
    const int64_t packed_bytes = q_offset + (q_packed ? q_bytes : 0);
    if (packed_bytes > 0) {
      SLUICE_CUDA_CHECK(cudaMemcpyAsync(upload.device, upload.host, packed_bytes,
                                        cudaMemcpyHostToDevice, handle));
    }
    SLUICE_CUDA_CHECK(call.Launch(handle));
  });
}

StreamPosition CudaOps::BeginStates(const BeginParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  return CudaStream::From(stream).Submit([&](cudaStream_t handle) {
    if (params.num_rows > 0) SLUICE_CUDA_CHECK(LaunchBegin(params, handle));
  });
}

StreamPosition CudaOps::MergeStates(const MergeParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  CudaStream& to = CudaStream::From(stream);
  return to.Submit([&](cudaStream_t handle) {
    if (params.num_rows == 0 || params.num_parts == 0) return;
    MergeParams reachable = params;
    reachable.parts = Reachable(params.parts, params.num_parts, to, handle);
    SLUICE_CUDA_CHECK(LaunchMerge(reachable, handle));
  });
}

StreamPosition CudaOps::FinalizeStates(const FinalizeParams& params, Stream& stream) {
  CheckHeadDim(params.head_dim);
  return CudaStream::From(stream).Submit([&](cudaStream_t handle) {
    if (params.num_rows > 0) SLUICE_CUDA_CHECK(LaunchFinalize(params, handle));
  });
}

}  // namespace sluice::cuda
