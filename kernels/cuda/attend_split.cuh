// Attention of one warp over its split, tile by tile. Per tile, with M the tokens, N the rows (8 a
// piece) and the head dimension summed over: S^T = K Q^T, online softmax down the columns,
// O^T += V^T P^T. P is fed as high + low 16-bit parts, so that its rounding does not show.

#ifndef KERNELS_CUDA_ATTEND_SPLIT_CUH_
#define KERNELS_CUDA_ATTEND_SPLIT_CUH_

#include "kernels/cuda/attend_load.cuh"
#include "kernels/cuda/attend_shape.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pipeline.cuh"

namespace sluice::cuda {

// A number that the compiler knows, as an argument.
template <int kValue>
struct Constant {
  __host__ __device__ constexpr operator int() const { return kValue; }
};

// f(0), ..., f(kEnd - 1), each as a constant.
template <int kEnd, int kBegin = 0, typename F>
__device__ __forceinline__ void StaticFor(const F& f) {
  if constexpr (kBegin < kEnd) {
    f(Constant<kBegin>());
    StaticFor<kEnd, kBegin + 1>(f);
  }
}

template <typename T, int kPad, int kPieces>
class AttendSplit {
 public:
  using Shape = AttendShape<kPad, kPieces>;
  using Shared = AttendShared<kPad, kPieces>;
  // The pieces of a tile in the order of use: K of each step and half, then V.
  static constexpr int kHalfPieces = kTileSteps * Shape::kHalves;
  static constexpr int kTilePieces = 2 * kHalfPieces;

  __device__ __forceinline__ AttendSplit(const AttendKernelArgs& args, Shared& shared)
      : args_(args),
        shared_(shared),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        buffers_(SharedAddress(shared.buffers[threadIdx.x / 32])) {}

  // Starts to copy the first pieces of a tile, as many as there are buffers.
  __device__ __forceinline__ void CopyFirst(const std::byte* row, uint32_t present) {
    StaticFor<Shape::kBuffers>([&](auto piece) { CopyPiece<piece>(row, present); });
  }

  // Begins a unit: its queries are in shared memory.
  __device__ __forceinline__ void BeginUnit(int unit) {
    unit_ = unit;
    const AttendUnit& info = shared_.units[warp_][unit % kUnitSlots];
    const Visible first = VisibleTo(args_, info.entry, QueryTokenOf(info, 0));
    const Visible last = VisibleTo(args_, info.entry, QueryTokenOf(info, Shape::kRows - 1));
    all_begin_ = last.begin;
    all_end_ = first.end;
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int j = 0; j < kPad / 32; ++j) q_[j] = QueriesOf(0, j);
    }
  }

  __device__ __forceinline__ void BeginSplit() {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m_[n][c] = MinusInfinity();
        l_[n][c] = 0.0f;
      }
    }
#pragma unroll
    for (int d = 0; d < kPad / 16; ++d) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o_[d][n][c] = 0.0f;
      }
    }
  }

  // Adds tile `tile` of the split that starts at `start`, whose first pieces are on their way, and
  // has those of the tile after it follow them.
  __device__ __forceinline__ void Tile(int64_t start, int tile, const std::byte* row,
                                       uint32_t present, const std::byte* next_row,
                                       uint32_t next_present) {
    const int64_t position = start + tile * kTileTokens;
    const int64_t end = position + kTileTokens;
    const bool masked = end > all_end_ || (position < all_begin_ &&
                                           (args_.window_tokens == 0 || end > args_.sink_tokens));
    // Once a piece is used up, a later one takes its place.
    const auto follow = [&](auto piece) {
      constexpr int kNext = piece + Shape::kBuffers;
      if constexpr (kNext < kTilePieces) {
        CopyPiece<kNext>(row, present);
      } else {
        CopyPiece<kNext - kTilePieces>(next_row, next_present);
      }
    };
    if (present == 0) {
      StaticFor<kTilePieces>(follow);
      return;
    }
    float s[kTileSteps][kPieces][4];
    StaticFor<kTileSteps>([&](auto step) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[step][n][c] = 0.0f;
      }
      StaticFor<Shape::kHalves>([&](auto half) {
        constexpr int kPiece = step * Shape::kHalves + half;
        MultiplyKeys<half>(WaitForPiece<kPiece>(), s[step]);
        follow(Constant<kPiece>());
      });
    });
    Scale(s);
    if (masked) Mask(start, tile, s);
    Softmax(s);
    StaticFor<kTileSteps>([&](auto step) {
      Weights weights;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const SplitPair pair = Split<T>(s[step][n][2 * half], s[step][n][2 * half + 1]);
          weights.high[n][half] = Transpose(pair.high);
          weights.low[n][half] = Transpose(pair.low);
        }
      }
      StaticFor<Shape::kHalves>([&](auto half) {
        constexpr int kPiece = kHalfPieces + step * Shape::kHalves + half;
        const uint32_t v = WaitForPiece<kPiece>();
        if (masked) {
          AddMaskedValues<half>(v, start, tile * kTileTokens + step * kStepTokens, weights);
        } else {
#pragma unroll
          for (int d = 0; d < DimsOf(half) / 16; ++d) {
            AddValues(ValuesOf<half>(v, d), weights, o_[half * kHalfTiles + d]);
          }
        }
        follow(Constant<kPiece>());
      });
    });
  }

  // Leaves the split's state in shared memory.
  __device__ __forceinline__ void Store(int slot) {
    const int num_rows = shared_.units[warp_][unit_ % kUnitSlots].entry.num_rows;
    const int g = lane_ / 4;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float l = l_[n][c];
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, mask));
        }
        const int row = 8 * n + lane_ % 4 * 2 + c;
        if (row >= num_rows) continue;
        // NaN that is seen must reach the result. A maximum passes it over; a finite one keeps
        // folds from taking the split for an empty one.
        const float m = l != l && m_[n][c] == MinusInfinity() ? -3.402823466e38f : m_[n][c];
        if (g == 0) shared_.split_m_l[slot][row][warp_] = make_float2(m, l);
        float* o = shared_.split_o[slot][warp_][row];
#pragma unroll
        for (int d = 0; d < kPad / 16; ++d) {
          o[16 * d + g] = o_[d][n][c];
          o[16 * d + 8 + g] = o_[d][n][c + 2];
        }
      }
    }
  }

 private:
  // Products of 16 head dimensions in the first half of a row.
  static constexpr int kHalfTiles = Shape::kPieceDims / 16;
  static __host__ __device__ constexpr int DimsOf(int half) {
    return half == 0 ? Shape::kPieceDims : kPad - Shape::kPieceDims;
  }

  // P of one step, tokens by rows, high and low parts.
  struct Weights {
    uint32_t high[kPieces][2];
    uint32_t low[kPieces][2];
  };

  static __host__ __device__ constexpr int HalfOf(int piece) { return piece % Shape::kHalves; }

  // Every piece is a group of copies, also one of which nothing is there.
  template <int kPiece>
  __device__ __forceinline__ void CopyPiece(const std::byte* row, uint32_t present) {
    constexpr int kHalf = HalfOf(kPiece);
    constexpr int kStep = kPiece % kHalfPieces / Shape::kHalves;
    // Every lane has read what was there.
    __syncwarp();
    if (present != 0) {
      CopyRows<DimsOf(kHalf), kHalf * Shape::kPieceDims, kPiece >= kHalfPieces>(
          buffers_ + kPiece % Shape::kBuffers * Shape::kBufferBytes, args_, row, present, kStep,
          lane_);
    }
    EndCopies();
  }
  // Where the piece is, once all lanes have copied their part of it.
  template <int kPiece>
  __device__ __forceinline__ uint32_t WaitForPiece() const {
    WaitForCopies<Shape::kBuffers - 1>();
    __syncwarp();
    return buffers_ + kPiece % Shape::kBuffers * Shape::kBufferBytes;
  }

  // Of the 8 rows of a piece, head dimensions 32 j, ...: the operands of two products.
  __device__ __forceinline__ uint4 QueriesOf(int n, int j) const {
    return LoadMatrices<false>(
        SharedAddress(&shared_.q[unit_ % 2][8 * n + lane_ % 8][4 * j + lane_ / 8]));
  }
  __device__ __forceinline__ uint4 Queries(int n, int j) const {
    if constexpr (Shape::kQueriesInRegisters) return q_[j];
    return QueriesOf(n, j);
  }

  __device__ __forceinline__ int QueryTokenOf(const AttendUnit& unit, int row) const {
    const int last = unit.entry.num_rows - 1;
    return (unit.entry.first_row + (row < last ? row : last)) / args_.group;
  }

  template <int kHalf>
  __device__ __forceinline__ void MultiplyKeys(uint32_t k, float (&s)[kPieces][4]) {
    // Two sums, so that products need not wait for each other.
    float other[kPieces][4];
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) other[n][c] = 0.0f;
    }
    // Matrices of tokens 0..7 and 8..15, then the same of the next 8 head dimensions.
    const int row = lane_ % 16;
#pragma unroll
    for (int j = 0; j < DimsOf(kHalf) / 32; ++j) {
      const uint4 a =
          LoadMatrices<false>(k + RowPiece<DimsOf(kHalf)>::Offset(row, 4 * j + lane_ / 16));
      const uint4 b =
          LoadMatrices<false>(k + RowPiece<DimsOf(kHalf)>::Offset(row, 4 * j + 2 + lane_ / 16));
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const uint4 q = Queries(n, kHalf * Shape::kPieceDims / 32 + j);
        Mma<T>(s[n], a.x, a.y, a.z, a.w, q.x, q.y);
        Mma<T>(other[n], b.x, b.y, b.z, b.w, q.z, q.w);
      }
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = __fadd_rn(s[n][c], other[n][c]);
    }
  }

  __device__ __forceinline__ void Scale(float (&s)[kTileSteps][kPieces][4]) {
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[step][n][c] = __fmul_rn(s[step][n][c], args_.scale);
      }
    }
    if (args_.logit_softcap == 0.0f) return;
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[step][n][c] =
              __fmul_rn(tanhf(__fdiv_rn(s[step][n][c], args_.logit_softcap)), args_.logit_softcap);
        }
      }
    }
  }

  __device__ __forceinline__ void Mask(int64_t start, int tile,
                                       float (&s)[kTileSteps][kPieces][4]) {
    const AttendUnit& unit = shared_.units[warp_][unit_ % kUnitSlots];
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const VisibleHere visible = VisibleFrom(
            VisibleTo(args_, unit.entry, QueryTokenOf(unit, 8 * n + lane_ % 4 * 2 + c)), start);
#pragma unroll
        for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int token = tile * kTileTokens + step * kStepTokens + lane_ / 4 + 8 * half;
            if (!visible.Sees(token)) s[step][n][2 * half + c] = MinusInfinity();
          }
        }
      }
    }
  }

  // s becomes e^(s - m); m, l and o move on to the new maximum.
  __device__ __forceinline__ void Softmax(float (&s)[kTileSteps][kPieces][4]) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      float alpha[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float max = fmaxf(s[0][n][c], s[0][n][c + 2]);
#pragma unroll
        for (int step = 1; step < kTileSteps; ++step) {
          max = fmaxf(max, fmaxf(s[step][n][c], s[step][n][c + 2]));
        }
#pragma unroll
        for (int mask = 4; mask <= 16; mask *= 2) {
          max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
        }
        max = fmaxf(max, m_[n][c]);
        alpha[c] = WeightOf(m_[n][c], max);
        m_[n][c] = max;
        // Where nothing is seen yet every s is -infinity, and e^(s - 0) is 0.
        const float base = max == MinusInfinity() ? 0.0f : max;
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& value = s[step][n][2 * half + c];
            value = ExpOfNonPositive(__fsub_rn(value, base));
            sum = __fadd_rn(sum, value);
          }
        }
        l_[n][c] = __fmaf_rn(l_[n][c], alpha[c], sum);
      }
      if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
        for (int d = 0; d < kPad / 16; ++d) {
#pragma unroll
          for (int c = 0; c < 4; ++c) o_[d][n][c] = __fmul_rn(o_[d][n][c], alpha[c % 2]);
        }
      }
    }
  }

  // V of head dimensions 16 d, ... of a half, transposed: tokens 0..7 of the first 8 head
  // dimensions and of the next, then tokens 8..15.
  template <int kHalf>
  __device__ __forceinline__ uint4 ValuesOf(uint32_t v, int d) const {
    const int token = lane_ % 8 + lane_ / 16 * 8;
    return LoadMatrices<true>(v + RowPiece<DimsOf(kHalf)>::Offset(token, 2 * d + lane_ / 8 % 2));
  }

  __device__ __forceinline__ void AddValues(const uint4& v, const Weights& weights,
                                            float (&o)[kPieces][4]) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      Mma<T>(o[n], v.x, v.y, v.z, v.w, weights.high[n][0], weights.high[n][1]);
      Mma<T>(o[n], v.x, v.y, v.z, v.w, weights.low[n][0], weights.low[n][1]);
    }
  }

  // The same where tokens are hidden from some rows: V of a token reaches no product of a row that
  // does not see it, whatever bits it holds. One pass for each query token, whose rows alone keep
  // what it adds.
  template <int kHalf>
  __device__ __forceinline__ void AddMaskedValues(uint32_t v, int64_t start, int first_token,
                                                  const Weights& weights) {
    const AttendUnit& unit = shared_.units[warp_][unit_ % kUnitSlots];
    const int first = QueryTokenOf(unit, 0);
    const int last = QueryTokenOf(unit, Shape::kRows - 1);
#pragma unroll 1
    for (int query_token = first; query_token <= last; ++query_token) {
      const VisibleHere visible = VisibleFrom(VisibleTo(args_, unit.entry, query_token), start);
      uint32_t seen[2];  // of this lane's tokens below and from 8 on, as masks
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first_token + 8 * i + lane_ % 4 * 2;
        seen[i] = (visible.Sees(token) ? 0xffffu : 0) | (visible.Sees(token + 1) ? ~0xffffu : 0);
      }
#pragma unroll
      for (int d = 0; d < DimsOf(kHalf) / 16; ++d) {
        uint4 x = ValuesOf<kHalf>(v, d);
        x = make_uint4(x.x & seen[0], x.y & seen[0], x.z & seen[1], x.w & seen[1]);
        auto& o = o_[kHalf * kHalfTiles + d];
        float sum[kPieces][4];
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[n][c] = o[n][c];
        }
        AddValues(x, weights, sum);
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (QueryTokenOf(unit, 8 * n + lane_ % 4 * 2 + c % 2) == query_token) {
              o[n][c] = sum[n][c];
            }
          }
        }
      }
    }
  }

  const AttendKernelArgs& args_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  const uint32_t buffers_;
  int unit_ = 0;
  // What every row sees, besides the sink.
  int64_t all_begin_ = 0;
  int64_t all_end_ = 0;
  uint4 q_[Shape::kQueriesInRegisters ? kPad / 32 : 1];
  float m_[kPieces][2];
  float l_[kPieces][2];  // of this lane's tokens
  float o_[kPad / 16][kPieces][4];
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_SPLIT_CUH_
