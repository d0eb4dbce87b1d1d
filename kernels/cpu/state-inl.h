// Running states (m, l, o): folding one into another, and the end result. Formulas:
// docs/numerics.md. Included once for each Highway target. The one place where states meet:
// attention within a call, tiles, and merges of parts all come here.

#if defined(KERNELS_CPU_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_STATE_INL_H_
#undef KERNELS_CPU_STATE_INL_H_
#else
#define KERNELS_CPU_STATE_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "kernels/cpu/simd-inl.h"
#include "kernels/ops/float16.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

struct StateRef {
  float* m;
  float* l;
  float* o;
};

// into = into + part. `count` is a multiple of 8. An empty part changes nothing, not even a zero's
// sign, so that a split that sees no token and a split that is left out are the same.
HWY_INLINE void FoldState(StateRef into, float part_m, float part_l, const float* part_o,
                          int count) {
  if (part_m == -kInfinity) return;
  const float m = part_m > *into.m ? part_m : *into.m;
  const float into_weight = WeightOf(*into.m, m);
  const float part_weight = WeightOf(part_m, m);
  *into.l = *into.l * into_weight + part_l * part_weight;
  *into.m = m;
  const auto fold = [&](auto d, int i) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, into.o + i), hn::Set(d, into_weight));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, part_o + i), hn::Set(d, part_weight), scaled), d,
               into.o + i);
  };
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) fold(DF(), i);
  for (; i < count; i += 4) fold(hn::CappedTag<float, 4>(), i);
}

// What turns (m, l, o) into the result: out = factor o, and lse.
struct Finish {
  float factor;
  float lse;
};
HWY_INLINE Finish FinishOf(float m, float l, const float* sink_logit) {
  float weight = 1.0f;
  if (sink_logit != nullptr && *sink_logit != -kInfinity) {
    const float with_sink = *sink_logit > m ? *sink_logit : m;
    weight = WeightOf(m, with_sink);
    l = l * weight + WeightOf(*sink_logit, with_sink);
    m = with_sink;
  }
  if (l == 0.0f) return {0.0f, -kInfinity};
  return {weight / l, static_cast<float>(m + std::log(static_cast<double>(l)))};
}

// out[0, count) = factor o as `dtype`, memory order.
HWY_INLINE void StoreOut(DType dtype, const float* o, float factor, int count, std::byte* out) {
  if (dtype == DType::kFp16) {
    for (int i = 0; i < count; ++i) {
      const uint16_t bits = Fp16FromFloat(o[i] * factor);
      std::memcpy(out + 2 * i, &bits, 2);
    }
    return;
  }
  const auto store = [&](auto d, int i) HWY_ATTR {
    const auto value = hn::Mul(hn::LoadU(d, o + i), hn::Set(d, factor));
    if (dtype == DType::kF32) {
      hn::StoreU(value, d, reinterpret_cast<float*>(out) + i);
    } else {
      const hn::Rebind<uint16_t, decltype(d)> d16;
      hn::StoreU(hn::TruncateTo(d16, RoundToBf16(d, value)), d16,
                 reinterpret_cast<uint16_t*>(out) + i);
    }
  };
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(DF(), i);
  for (; i < count; i += 4) store(hn::CappedTag<float, 4>(), i);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
