// The three inner loops of attention over one split: logits, softmax weights, weighted sum of V.
// Included once for each Highway target.
//
// What is computed for one row (one query head of one query token) is the same sequence of
// operations whichever rows share the loads of K and V with it.

#if defined(KERNELS_CPU_ATTEND_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_ATTEND_TILE_INL_H_
#undef KERNELS_CPU_ATTEND_TILE_INL_H_
#else
#define KERNELS_CPU_ATTEND_TILE_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "hwy/cache_control.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

// ------------------------------------------------------------------ prefetching

// Rows are prefetched this far ahead of their use. A split reads its K rows, then its V rows, then
// the next split's K rows: to memory they are one stream of rows at shuffled addresses, of which
// the hardware sees the next one only when it is late.
inline constexpr int kPrefetchRows = 32;

// One of those passes over rows, and the pass after it.
struct PrefetchPass {
  const std::byte* const* rows = nullptr;
  int end = 0;                                  // of the rows of this pass
  int64_t offset = 0;                           // from a row's address to what the pass reads of it
  const std::byte* const* next_rows = nullptr;  // at least kPrefetchRows
  int64_t next_offset = 0;
};

// The lines of [begin, end) of the row that is kPrefetchRows after t.
HWY_INLINE void PrefetchAhead(const PrefetchPass& pass, int t, int begin_byte, int end_byte) {
  const int i = t + kPrefetchRows;
  const std::byte* row =
      i < pass.end ? pass.rows[i] + pass.offset : pass.next_rows[i - pass.end] + pass.next_offset;
  for (int at = begin_byte; at < end_byte; at += 64) hwy::Prefetch(row + at);
}

// ------------------------------------------------------------------ logits

template <DType kDType, int kRows, int kTokens, bool kTail>
HWY_INLINE void DotSlice(const std::byte* const* rows, const float* q, int q_stride, int slice,
                         MU tail, VF (&acc)[kRows][kTokens]) {
  const DF df;
  VF q_first[kRows], q_second[kRows];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    q_first[r] = hn::Load(df, q + r * q_stride + slice * kSlice);
    q_second[r] = hn::Load(df, q + r * q_stride + slice * kSlice + kLanes);
  }
  HWY_UNROLL(8)
  for (int t = 0; t < kTokens; ++t) {
    VF first, second;
    Widen<kDType>(LoadSlice<kTail>(rows[t] + slice * kSlice * 2, tail), first, second);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      acc[r][t] = hn::MulAdd(q_first[r], first, acc[r][t]);
      acc[r][t] = hn::MulAdd(q_second[r], second, acc[r][t]);
    }
  }
}

// logits[r * kSplitTokens + t] = q[r] . K[t] for t in [begin, end), which is rounded outwards to
// whole groups of kTokens.
template <DType kDType, int kRows, int kTokens>
HWY_INLINE void DotRows(const std::byte* const* rows, int begin, int end, const float* q,
                        int q_stride, const Slices& slices, float* logits,
                        const PrefetchPass* prefetch) {
  const DF df;
  for (int t = begin / kTokens * kTokens; t < end; t += kTokens) {
    if (prefetch != nullptr) {
      for (int i = 0; i < kTokens; ++i) {
        PrefetchAhead(*prefetch, t + i, 0, slices.count * kSlice * 2);
      }
    }
    VF acc[kRows][kTokens];
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (int i = 0; i < kTokens; ++i) acc[r][i] = hn::Zero(df);
    }
    for (int s = 0; s < slices.full; ++s) {
      DotSlice<kDType, kRows, kTokens, false>(rows + t, q, q_stride, s, slices.tail, acc);
    }
    if (slices.count > slices.full) {
      DotSlice<kDType, kRows, kTokens, true>(rows + t, q, q_stride, slices.full, slices.tail, acc);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      HWY_UNROLL(8)
      for (int i = 0; i < kTokens; i += 4) {
        StoreSums4(acc[r][i], acc[r][i + 1], acc[r][i + 2], acc[r][i + 3],
                   logits + r * kSplitTokens + t + i);
      }
    }
  }
}

// Any number of rows up to kTileRows, in the tile shapes that the registers hold. `prefetch` may be
// null.
template <DType kDType>
HWY_INLINE void Dots(const std::byte* const* rows, int begin, int end, int num_rows, const float* q,
                     int q_stride, const Slices& slices, float* logits,
                     const PrefetchPass* prefetch) {
  int r = 0;
  if constexpr (kManyRegisters) {
    if (num_rows >= 4) {
      DotRows<kDType, 4, 4>(rows, begin, end, q, q_stride, slices, logits, prefetch);
      r = 4;
    }
  }
  for (; r + 2 <= num_rows; r += 2) {
    DotRows<kDType, 2, 4>(rows, begin, end, q + r * q_stride, q_stride, slices,
                          logits + r * kSplitTokens, r == 0 ? prefetch : nullptr);
  }
  if (r < num_rows) {
    DotRows<kDType, 1, 8>(rows, begin, end, q + r * q_stride, q_stride, slices,
                          logits + r * kSplitTokens, r == 0 ? prefetch : nullptr);
  }
}

// ------------------------------------------------------------------ weights

// What a row sees of a split: at most two ranges of tokens, in order, within [0, kSplitTokens).
struct RowRanges {
  int begin[2];
  int end[2];
  int count;  // 0, 1 or 2
};

struct MaxAndSum {
  float m;
  float l;
};

// Turns q.k into e^(s - m) for the tokens that the row sees, in place, and +0 for the others in the
// vectors that it touches. The sum runs over the split's 256 positions, position i in lane
// i % kLanes; positions not seen would add +0, so that vectors without any are left out.
HWY_INLINE MaxAndSum Softmax(float* logits, const RowRanges& ranges, float scale, float softcap) {
  const DF df;
  const int first = ranges.begin[0] / kLanes * kLanes;
  const int last = (ranges.end[ranges.count - 1] + kLanes - 1) / kLanes * kLanes;
  const VF scales = hn::Set(df, scale);
  if (softcap == 0.0f) {
    for (int i = first; i < last; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(df, logits + i), scales), df, logits + i);
    }
  } else {
    const VF cap = hn::Set(df, softcap);
    for (int i = first; i < last; i += kLanes) {
      const VF s = hn::Mul(hn::Load(df, logits + i), scales);
      hn::Store(hn::Mul(Tanh(hn::Div(s, cap)), cap), df, logits + i);
    }
  }
  std::fill(logits + first, logits + ranges.begin[0], -kInfinity);
  if (ranges.count == 2) {
    std::fill(logits + ranges.end[0], logits + ranges.begin[1], -kInfinity);
  }
  std::fill(logits + ranges.end[ranges.count - 1], logits + last, -kInfinity);

  VF maxima = hn::Set(df, -kInfinity);
  VF nans = hn::Zero(df);
  for (int i = first; i < last; i += kLanes) {
    const VF s = hn::Load(df, logits + i);
    const auto is_nan = hn::IsNaN(s);
    nans = hn::IfThenElse(is_nan, s, nans);
    maxima = hn::Max(maxima, hn::IfThenElse(is_nan, hn::Set(df, -kInfinity), s));
  }
  const float m = hn::GetLane(hn::MaxOfLanes(df, maxima));
  if (!hn::AllFalse(df, hn::IsNaN(nans))) [[unlikely]] {
    // NaN that is seen must reach the result. A maximum passes it over, so it goes on as a weight;
    // the state has a finite maximum, so that no fold takes it for an empty one.
    const float finite_m = m == -kInfinity ? std::numeric_limits<float>::lowest() : m;
    const VF all_m = hn::Set(df, finite_m);
    for (int i = first; i < last; i += kLanes) {
      const VF s = hn::Load(df, logits + i);
      hn::Store(hn::IfThenElse(hn::IsNaN(s), s, ExpOfNonPositive(df, hn::Sub(s, all_m))), df,
                logits + i);
    }
    return {finite_m, std::numeric_limits<float>::quiet_NaN()};
  }
  if (m == -kInfinity) return {m, 0.0f};
  const VF all_m = hn::Set(df, m);
  VF sum = hn::Zero(df);
  for (int i = first; i < last; i += kLanes) {
    const VF weight = ExpOfNonPositive(df, hn::Sub(hn::Load(df, logits + i), all_m));
    hn::Store(weight, df, logits + i);
    sum = hn::Add(sum, weight);
  }
  return {m, hn::GetLane(hn::SumOfLanes(df, sum))};
}

// ------------------------------------------------------------------ weighted sum of V

// o[r][slices] += sum of weights[r][t] V[t] for t in [begin, end), in order of t.
template <DType kDType, int kRows, int kSlices, bool kTail>
HWY_INLINE void SumSlices(const std::byte* const* rows, int64_t v_offset, int first_slice,
                          int begin, int end, const float* weights, MU tail, float* o,
                          const PrefetchPass* prefetch) {
  const DF df;
  const int first_byte = first_slice * kSlice * 2;
  const int64_t offset = v_offset + first_byte;
  o += first_slice * kSlice;
  VF acc[kRows][2 * kSlices];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int s = 0; s < 2 * kSlices; ++s)
      acc[r][s] = hn::Load(df, o + r * kMaxHeadDim + s * kLanes);
  }
  for (int t = begin; t < end; ++t) {
    // Each pass over the tokens fetches what it will read itself: traffic is then even.
    if (prefetch != nullptr) {
      PrefetchAhead(*prefetch, t, first_byte, first_byte + kSlices * kSlice * 2);
    }
    const std::byte* v = rows[t] + offset;
    VF weight[kRows];
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) weight[r] = hn::Set(df, weights[r * kSplitTokens + t]);
    HWY_UNROLL(8)
    for (int s = 0; s < kSlices; ++s) {
      VF first, second;
      Widen<kDType>(LoadSlice<kTail>(v + s * kSlice * 2, tail), first, second);
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        acc[r][2 * s] = hn::MulAdd(weight[r], first, acc[r][2 * s]);
        acc[r][2 * s + 1] = hn::MulAdd(weight[r], second, acc[r][2 * s + 1]);
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int s = 0; s < 2 * kSlices; ++s)
      hn::Store(acc[r][s], df, o + r * kMaxHeadDim + s * kLanes);
  }
}

template <DType kDType, int kRows, int kSlices>
HWY_INLINE void SumRowsOf(const std::byte* const* rows, int64_t v_offset, int begin, int end,
                          const float* weights, const Slices& slices, float* o,
                          const PrefetchPass* prefetch) {
  int s = 0;
  for (; s + kSlices <= slices.full; s += kSlices) {
    SumSlices<kDType, kRows, kSlices, false>(rows, v_offset, s, begin, end, weights, slices.tail, o,
                                             prefetch);
  }
  for (; s < slices.full; ++s) {
    SumSlices<kDType, kRows, 1, false>(rows, v_offset, s, begin, end, weights, slices.tail, o,
                                       prefetch);
  }
  if (s < slices.count) {
    SumSlices<kDType, kRows, 1, true>(rows, v_offset, s, begin, end, weights, slices.tail, o,
                                      prefetch);
  }
}

// o[r] += sum of weights[r][t] V[t]; o rows are kMaxHeadDim apart. `prefetch` may be null.
template <DType kDType>
HWY_INLINE void WeightedSums(const std::byte* const* rows, int64_t v_offset, int begin, int end,
                             int num_rows, const float* weights, const Slices& slices, float* o,
                             const PrefetchPass* prefetch) {
  if (begin >= end) return;
  constexpr int kScale = kManyRegisters ? 2 : 1;
  int r = 0;
  for (; r + 4 <= num_rows; r += 4) {
    SumRowsOf<kDType, 4, kScale>(rows, v_offset, begin, end, weights + r * kSplitTokens, slices,
                                 o + r * kMaxHeadDim, r == 0 ? prefetch : nullptr);
  }
  for (; r + 2 <= num_rows; r += 2) {
    SumRowsOf<kDType, 2, 2 * kScale>(rows, v_offset, begin, end, weights + r * kSplitTokens, slices,
                                     o + r * kMaxHeadDim, r == 0 ? prefetch : nullptr);
  }
  if (r < num_rows) {
    SumRowsOf<kDType, 1, 4>(rows, v_offset, begin, end, weights + r * kSplitTokens, slices,
                            o + r * kMaxHeadDim, r == 0 ? prefetch : nullptr);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
