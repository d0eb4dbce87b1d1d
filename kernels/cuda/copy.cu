// StoreTokens, GatherTokens and CopyBytes. Bytes: each row once read and once written.

#include <algorithm>

#include "kernels/cuda/op_kernels.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPieceBytes = 64 << 10;

__device__ __forceinline__ bool Aligned16(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 15) == 0;
}

// x: copies; y: pieces of tokens; z: K or V. A thread takes 16 bytes (or 2) of a row at a time.
template <typename Word>
__device__ void CopyRows(const KvLayout& layout, const TokenCopy& copy, int first, int last, int v,
                         bool store) {
  const int row_words = layout.head_dim * 2 / static_cast<int>(sizeof(Word));
  const int64_t words = static_cast<int64_t>(last - first) * layout.num_kv_heads * row_words;
  std::byte* wire = v == 0 ? copy.k : copy.v;
  std::byte* block =
      copy.block + v * layout.v_offset_bytes + copy.first_token * layout.token_stride_bytes;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    // In the order of the wire.
    const int word = static_cast<int>(i % row_words);
    const int64_t row = i / row_words;
    const int64_t head = row % layout.num_kv_heads;
    const int64_t token = first + row / layout.num_kv_heads;
    auto* in_wire =
        reinterpret_cast<Word*>(wire) + (token * layout.num_kv_heads + head) * row_words + word;
    auto* in_block = reinterpret_cast<Word*>(block + token * layout.token_stride_bytes +
                                             head * layout.kv_head_stride_bytes) +
                     word;
    const Word value = token >= copy.num_tokens ? Word{} : (store ? *in_wire : *in_block);
    *(store ? in_block : in_wire) = value;
  }
}

__global__ void __launch_bounds__(kThreads)
    TokenCopyKernel(TokenCopyParams params, int piece_tokens, bool store) {
  const TokenCopy copy = params.copies[blockIdx.x];
  const int first = blockIdx.y * piece_tokens;
  const int last = min(first + piece_tokens, copy.num_tokens + copy.zero_tokens);
  if (first >= last) return;
  const int v = blockIdx.z;
  const KvLayout& layout = params.layout;
  const bool wide =
      Aligned16(v == 0 ? copy.k : copy.v, copy.block) &&
      (layout.token_stride_bytes | layout.kv_head_stride_bytes | layout.v_offset_bytes) % 16 == 0;
  if (wide) {
    CopyRows<uint4>(layout, copy, first, last, v, store);
  } else {
    CopyRows<uint16_t>(layout, copy, first, last, v, store);
  }
}

__global__ void __launch_bounds__(kThreads) ByteCopyKernel(ByteCopyParams params) {
  const ByteCopy copy = params.copies[blockIdx.x];
  const int64_t first = blockIdx.y * kPieceBytes;
  const int64_t last = min(first + kPieceBytes, copy.bytes);
  if (first >= last) return;
  int64_t done = first;
  if (Aligned16(copy.to, copy.from)) {
    for (int64_t i = first + 16 * threadIdx.x; i + 16 <= last; i += 16 * kThreads) {
      *reinterpret_cast<uint4*>(copy.to + i) = *reinterpret_cast<const uint4*>(copy.from + i);
    }
    done = last / 16 * 16;
  }
  for (int64_t i = done + threadIdx.x; i < last; i += kThreads) copy.to[i] = copy.from[i];
}

}  // namespace

cudaError_t LaunchTokenCopy(const TokenCopyParams& params, int max_tokens, bool store,
                            cudaStream_t stream) {
  const int64_t token_bytes = 2 * int64_t{params.layout.num_kv_heads} * params.layout.head_dim;
  const int piece_tokens =
      static_cast<int>(std::clamp<int64_t>(kPieceBytes / token_bytes, 1, max_tokens));
  const dim3 grid(static_cast<unsigned>(params.num_copies),
                  (max_tokens + piece_tokens - 1) / piece_tokens, 2);
  TokenCopyKernel<<<grid, kThreads, 0, stream>>>(params, piece_tokens, store);
  return cudaGetLastError();
}

cudaError_t LaunchByteCopy(const ByteCopyParams& params, int64_t max_bytes, cudaStream_t stream) {
  const int64_t pieces = (max_bytes + kPieceBytes - 1) / kPieceBytes;
  if (pieces > 65'535) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(params.num_copies), static_cast<unsigned>(pieces));
  ByteCopyKernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sluice::cuda
