// Vector helpers that the kernels share. Included once for each Highway target.
//
// Rows of BF16 or FP16 are read in slices of two vectors of floats. Within a slice the elements
// stand in "lane order": for BF16 first those with even index, then those with odd (one shift and
// one mask turn 32 bits into both); for FP16 as in memory. Dot products do not mind, provided that
// q is in lane order too, and outputs are put back in memory order once at the end.

#if defined(KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_SIMD_INL_H_
#undef KERNELS_CPU_SIMD_INL_H_
#else
#define KERNELS_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/ops/params.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using MU = hn::Mask<DU>;

inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
inline constexpr int kSlice = 2 * kLanes;
// x86 before AVX-512 has 16 vector registers, the others 32.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3
inline constexpr bool kManyRegisters = false;
#else
inline constexpr bool kManyRegisters = true;
#endif

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How a row of head_dim elements falls into slices.
struct Slices {
  explicit Slices(int head_dim)
      : full(head_dim / kSlice),
        count((head_dim + kSlice - 1) / kSlice),
        tail(hn::FirstN(DU(), (head_dim % kSlice) / 2)) {}
  int full;
  int count;
  MU tail;  // 32-bit lanes of the last slice, where count > full
};

// One slice from memory; past the tail nothing is read and the lanes are 0.
template <bool kTail>
HWY_INLINE VU LoadSlice(const std::byte* from, [[maybe_unused]] MU tail) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  if constexpr (kTail) return hn::MaskedLoad(tail, DU(), words);
  return hn::LoadU(DU(), words);
}

// Without an instruction for it (F16C), Highway widens FP16 by arithmetic that takes infinity and
// NaN for the numbers of the next exponent, 2^16 and up. No FP16 number is as large as that.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
inline constexpr bool kWidensSpecials = true;
#else
inline constexpr bool kWidensSpecials = false;
#endif
HWY_INLINE VF RestoreSpecials(VF widened) {
  if constexpr (kWidensSpecials) return widened;
  const DF df;
  const DU du;
  const auto special = hn::Ge(hn::Abs(widened), hn::Set(df, 65536.0f));
  const VU bits = hn::Or(hn::BitCast(du, widened), hn::Set(du, 0x7f800000u));
  return hn::IfThenElse(special, hn::BitCast(df, bits), widened);
}

template <DType kDType>
HWY_INLINE void Widen(VU raw, VF& first, VF& second) {
  const DF df;
  const DU du;
  if constexpr (kDType == DType::kBf16) {
    first = hn::BitCast(df, hn::ShiftLeft<16>(raw));
    second = hn::BitCast(df, hn::And(raw, hn::Set(du, 0xffff0000u)));
  } else {
    const hn::Rebind<hwy::float16_t, DF> dh;
    const hn::Repartition<uint16_t, DF> d16;
    const hn::Half<decltype(d16)> d16_half;
    const auto halves = hn::BitCast(d16, raw);
    first = RestoreSpecials(hn::PromoteTo(df, hn::BitCast(dh, hn::LowerHalf(d16_half, halves))));
    second = RestoreSpecials(hn::PromoteTo(df, hn::BitCast(dh, hn::UpperHalf(d16_half, halves))));
  }
}

// Index in memory order of position `lane` of lane order.
template <DType kDType>
HWY_INLINE int MemoryIndex(int lane) {
  if constexpr (kDType != DType::kBf16) return lane;
  const int slice = lane / kSlice * kSlice;
  const int within = lane % kSlice;
  return slice + (within < kLanes ? 2 * within : 2 * (within - kLanes) + 1);
}

// Adds up the 128-bit blocks of a vector; lane i of the result is the sum of lanes i, i + 4, ...
template <class D>
HWY_INLINE void StoreSumOfBlocks(D d, hn::Vec<D> v, float* to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    StoreSumOfBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}

// Stores the sums of the lanes of four vectors, in a fixed order of additions.
HWY_INLINE void StoreSums4(VF a, VF b, VF c, VF d, float* to) {
  const DF df;
  const VF ac = hn::Add(hn::InterleaveLower(df, a, c), hn::InterleaveUpper(df, a, c));
  const VF bd = hn::Add(hn::InterleaveLower(df, b, d), hn::InterleaveUpper(df, b, d));
  const VF abcd = hn::Add(hn::InterleaveLower(df, ac, bd), hn::InterleaveUpper(df, ac, bd));
  StoreSumOfBlocks(df, abcd, to);
}

// e^x for x <= 0, within 2 ulp; 0 below -87.3 (2^-126) and for -infinity; NaN stays NaN.
// Cody-Waite reduction and the polynomial of Cephes' expf.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNonPositive(D df, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto n = hn::Round(hn::Mul(x, hn::Set(df, 1.44269504088896341f)));
  auto r = hn::NegMulAdd(n, hn::Set(df, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(df, -2.12194440e-4f), r);
  auto p = hn::Set(df, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(df, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(df, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(df, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(df, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(df, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(df, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  const auto y = hn::Mul(p, hn::BitCast(df, exponent));
  return hn::IfThenElse(hn::Lt(x, hn::Set(df, -87.3f)), hn::Zero(df), y);
}

// The weight e^(x - max) of a part whose maximum is x <= max. Equal infinities weigh 1, not NaN.
HWY_INLINE float WeightOf(float x, float max) {
  if (x == max) return 1.0f;
  const hn::CappedTag<float, 4> d4;
  return hn::GetLane(ExpOfNonPositive(d4, hn::Set(d4, x - max)));
}

// tanh through e^(-2|x|); the absolute error is that of a float near 1.
HWY_INLINE VF Tanh(VF x) {
  const DF df;
  const VF e = ExpOfNonPositive(df, hn::Mul(hn::Abs(x), hn::Set(df, -2.0f)));
  const VF one = hn::Set(df, 1.0f);
  return hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
}

// Floats to BF16 bits in the low half of each lane, to nearest even; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundToBf16(D, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
  const auto is_nan = hn::RebindMask(du, hn::Ne(v, v));
  return hn::IfThenElse(is_nan, hn::Or(high, hn::Set(du, 0x40u)), rounded);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
