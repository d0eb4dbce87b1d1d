// Rows times P: keys into A_g, queries into q'. Included once for each Highway target.
//
// Sums are in double: a product of two BF16 values is exact even in float, but where terms cancel a
// float sum of 256 of them is not within one BF16 ulp of the true one, and a double sum is.

#if defined(KERNELS_CPU_PROJECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_PROJECT_INL_H_
#undef KERNELS_CPU_PROJECT_INL_H_
#else
#define KERNELS_CPU_PROJECT_INL_H_
#endif

#include <cstring>

#include "kernels/cpu/simd-inl.h"
#include "kernels/ops/float16.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

using DD = hn::ScalableTag<double>;
using VD = hn::Vec<DD>;
inline constexpr int kDoubleLanes = kLanes / 2;
inline constexpr int kProjectRows = 4;

// Floats between rows of P and of results.
HWY_INLINE int PaddedRank(int rank) {
  return (rank + kDoubleLanes - 1) / kDoubleLanes * kDoubleLanes;
}

// P as floats, [head_dim][PaddedRank], zero past the rank.
HWY_INLINE void LoadProjection(const std::byte* projection, int head_dim, int rank, float* p) {
  const int padded = PaddedRank(rank);
  if (padded == rank && rank % 8 == 0) {
    // Without padding it is one array. A step of one token waits for this.
    const hn::CappedTag<float, 8> d8;
    const hn::Rebind<uint16_t, decltype(d8)> d16;
    const hn::Rebind<uint32_t, decltype(d8)> d32;
    const int lanes = static_cast<int>(hn::MaxLanes(d8));
    for (int i = 0; i < head_dim * rank; i += lanes) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(projection) + i);
      hn::StoreU(hn::BitCast(d8, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits))), d8, p + i);
    }
    return;
  }
  for (int d = 0; d < head_dim; ++d) {
    for (int r = 0; r < rank; ++r) {
      uint16_t bits;
      std::memcpy(&bits, projection + 2 * (static_cast<int64_t>(d) * rank + r), 2);
      p[d * padded + r] = FloatFromBf16(bits);
    }
    for (int r = rank; r < padded; ++r) p[d * padded + r] = 0.0f;
  }
}

template <int kRows, int kVectors>
HWY_INLINE void ProjectTile(const double* x, int head_dim, const float* p, int padded, float* out) {
  const DD dd;
  const hn::Rebind<float, DD> df;
  VD acc[kRows][kVectors];
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) acc[i][v] = hn::Zero(dd);
  }
  for (int d = 0; d < head_dim; ++d) {
    VD column[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      column[v] = hn::PromoteTo(dd, hn::LoadU(df, p + d * padded + v * kDoubleLanes));
    }
    HWY_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      const VD factor = hn::Set(dd, x[i * kMaxHeadDim + d]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) acc[i][v] = hn::MulAdd(factor, column[v], acc[i][v]);
    }
  }
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::DemoteTo(df, acc[i][v]), df, out + i * padded + v * kDoubleLanes);
    }
  }
}

template <int kRows>
HWY_INLINE void ProjectTiles(const double* x, int head_dim, const float* p, int padded,
                             float* out) {
  constexpr int kVectors = kManyRegisters ? 4 : 2;
  int r = 0;
  for (; r + kVectors * kDoubleLanes <= padded; r += kVectors * kDoubleLanes) {
    ProjectTile<kRows, kVectors>(x, head_dim, p + r, padded, out + r);
  }
  for (; r < padded; r += kDoubleLanes) {
    ProjectTile<kRows, 1>(x, head_dim, p + r, padded, out + r);
  }
}

// out[i][PaddedRank] = rows[i] P for up to kProjectRows rows of BF16 or FP16.
HWY_INLINE void ProjectRows(DType dtype, const std::byte* const* rows, int num_rows, int head_dim,
                            int rank, const float* p, float* out) {
  alignas(64) double x[kProjectRows * kMaxHeadDim];
  for (int i = 0; i < num_rows; ++i) {
    for (int d = 0; d < head_dim; ++d) {
      uint16_t bits;
      std::memcpy(&bits, rows[i] + 2 * d, 2);
      x[i * kMaxHeadDim + d] = dtype == DType::kBf16 ? FloatFromBf16(bits) : FloatFromFp16(bits);
    }
  }
  const int padded = PaddedRank(rank);
  if (num_rows == kProjectRows) {
    ProjectTiles<kProjectRows>(x, head_dim, p, padded, out);
    return;
  }
  for (int i = 0; i < num_rows; ++i) {
    ProjectTiles<1>(x + i * kMaxHeadDim, head_dim, p, padded, out + i * padded);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
