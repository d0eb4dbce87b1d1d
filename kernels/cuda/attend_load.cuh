// K and V from global into shared memory, and from there into the registers of the tensor cores:
// row by row, whole lines at a time, the 16-byte chunks of a row placed so that eight rows' reading
// of one chunk meets every bank once.

#ifndef KERNELS_CUDA_ATTEND_LOAD_CUH_
#define KERNELS_CUDA_ATTEND_LOAD_CUH_

#include "kernels/cuda/attend_shape.cuh"

namespace sluice::cuda {

// 64 tokens of a kv head as a warp is about to read them: of each tile, K of token `lane`, and the
// tokens that are there.
struct SplitRows {
  const std::byte* row[kSplitTiles];
  uint32_t present[kSplitTiles];
};

// Up to 128 head dimensions of 16 tokens in shared memory.
template <int kDims>
struct RowPiece {
  static constexpr int kChunks = kDims / 8;  // of a row
  static constexpr bool kSwizzled = kChunks % 8 == 0;
  static constexpr int kStride = 2 * kDims + (kSwizzled ? 0 : 16);
  static constexpr int kBytes = kStepTokens * kStride;
  static __device__ __forceinline__ int Offset(int row, int chunk) {
    return row * kStride + 16 * (kSwizzled ? chunk ^ (row & 7) : chunk);
  }
};

// Starts to copy head dimensions [kFirstDim, + kDims) of a step's tokens.
template <int kDims, int kFirstDim, bool kIsV>
__device__ __forceinline__ void CopyRows(uint32_t to, const AttendKernelArgs& args,
                                         const std::byte* tile_row, uint32_t present, int step,
                                         int lane) {
  using Piece = RowPiece<kDims>;
  constexpr int kCopies = kStepTokens * Piece::kChunks / 32;
  const auto pointer =
      reinterpret_cast<uint64_t>(tile_row) + (kIsV ? args.v_offset_bytes : 0) + 2 * kFirstDim;
  if (args.regular != 0 && present == 0xffffffffu) {
    const auto* at =
        reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, pointer, step * kStepTokens));
    if constexpr (32 % Piece::kChunks == 0) {
      constexpr int kRows = 32 / Piece::kChunks;  // of one copy
      const int row = lane / Piece::kChunks;
      at += row * args.token_stride_bytes + 16 * (lane % Piece::kChunks);
      const int64_t step_bytes = kRows * args.token_stride_bytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        CopyAsync16(to + Piece::Offset(kRows * i + row, lane % Piece::kChunks), at);
        at += step_bytes;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = (32 * i + lane) / Piece::kChunks;
        const int chunk = (32 * i + lane) % Piece::kChunks;
        CopyAsync16(to + Piece::Offset(row, chunk),
                    at + row * args.token_stride_bytes + 16 * chunk);
      }
    }
    return;
  }
  // Rows one by one; zeros where there is nothing to read.
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i) {
    const int row = (32 * i + lane) / Piece::kChunks;
    const int chunk = (32 * i + lane) % Piece::kChunks;
    const int token = step * kStepTokens + row;
    const auto* at = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, pointer, token));
    CopyAsync16(to + Piece::Offset(row, chunk), at + 16 * chunk,
                (present >> token & 1) != 0 && kFirstDim + 8 * chunk < args.head_dim);
  }
}

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_LOAD_CUH_
