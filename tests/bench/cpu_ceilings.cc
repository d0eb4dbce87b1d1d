#include "tests/bench/cpu_ceilings.h"

#include "kernels/cpu/highway_config.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/cpu_ceilings.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

void RunRead(const ReadOp& op, int64_t begin, int64_t end) {
  const DU du;
  VU a = hn::Zero(du), b = a, c = a, d = a;
  const int64_t first = begin * op.pieces_per_unit;
  const int64_t last =
      end * op.pieces_per_unit < op.num_pieces ? end * op.pieces_per_unit : op.num_pieces;
  for (int64_t i = first; i < last; ++i) {
    const auto* from = reinterpret_cast<const uint32_t*>(op.pieces[i]);
    const int64_t ahead = i + op.prefetch_pieces < op.num_pieces ? i + op.prefetch_pieces : i;
    const std::byte* next = op.pieces[ahead];
    for (int64_t word = 0; word < op.piece_bytes / 4; word += 4 * kLanes) {
      if (op.prefetch_pieces > 0) {
        for (int64_t at = 0; at < 16 * kLanes; at += 64) hwy::Prefetch(next + 4 * word + at);
      }
      a = hn::Xor(a, hn::LoadU(du, from + word));
      b = hn::Xor(b, hn::LoadU(du, from + word + kLanes));
      c = hn::Xor(c, hn::LoadU(du, from + word + 2 * kLanes));
      d = hn::Xor(d, hn::LoadU(du, from + word + 3 * kLanes));
    }
  }
  op.sink->fetch_xor(hn::GetLane(hn::Xor(hn::Xor(a, b), hn::Xor(c, d))));
}

template <int kGroup>
uint32_t MultiplyAdd(int64_t iterations) {
  // Four vectors of elements at a time, so that no sum waits for itself.
  const DF df;
  const DU du;
  VF acc[4 * kGroup];
  HWY_UNROLL(16)
  for (int i = 0; i < 4 * kGroup; ++i) acc[i] = hn::Zero(df);
  VF q_first[kGroup], q_second[kGroup];
  HWY_UNROLL(4)
  for (int h = 0; h < kGroup; ++h) {
    q_first[h] = hn::Set(df, 1.5f + static_cast<float>(h));
    q_second[h] = hn::Set(df, 0.5f - static_cast<float>(h));
  }
  VU raw = hn::Iota(du, 7);
  for (int64_t i = 0; i < iterations; i += 4) {
    HWY_UNROLL(4)
    for (int t = 0; t < 4; ++t) {
      VF first, second;
#if HWY_COMPILER_GCC
      // What is loaded differs each time, as far as the compiler may know.
      asm volatile("" : "+m"(raw));
#endif
      Widen<DType::kBf16>(raw, first, second);
      HWY_UNROLL(4)
      for (int h = 0; h < kGroup; ++h) {
        acc[t * kGroup + h] = hn::MulAdd(q_first[h], first, acc[t * kGroup + h]);
        acc[t * kGroup + h] = hn::MulAdd(q_second[h], second, acc[t * kGroup + h]);
      }
    }
  }
  VF sum = acc[0];
  HWY_UNROLL(16)
  for (int i = 1; i < 4 * kGroup; ++i) sum = hn::Add(sum, acc[i]);
  return hn::GetLane(hn::BitCast(du, sum));
}

uint32_t RunMultiplyAdd(int group, int64_t iterations) {
  return group == 1 ? MultiplyAdd<1>(iterations) : MultiplyAdd<4>(iterations);
}

int64_t Elements() { return kSlice; }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

HWY_EXPORT(RunRead);
HWY_EXPORT(RunMultiplyAdd);
HWY_EXPORT(Elements);

PhaseSize ReadOp::Start(int, int) {
  return {(num_pieces + pieces_per_unit - 1) / pieces_per_unit, 1};
}
void ReadOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  HWY_DYNAMIC_DISPATCH(RunRead)(*this, begin, end);
}

PhaseSize MultiplyAddOp::Start(int, int) { return {units, 1}; }
void MultiplyAddOp::Run(int, int64_t begin, int64_t end, WorkerScratch&) {
  for (int64_t i = begin; i < end; ++i) {
    sink->fetch_xor(HWY_DYNAMIC_DISPATCH(RunMultiplyAdd)(group, iterations));
  }
}

int64_t MultiplyAddElements() { return HWY_DYNAMIC_DISPATCH(Elements)(); }

}  // namespace sluice
#endif  // HWY_ONCE
