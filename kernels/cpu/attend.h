// Attention on the CPU: one unit of an Attend call, for the best instruction set there is.

#ifndef KERNELS_CPU_ATTEND_H_
#define KERNELS_CPU_ATTEND_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend_plan.h"
#include "kernels/cpu/pool.h"
#include "kernels/ops/params.h"

namespace sluice {

inline constexpr int kTileRows = 4;

// What a worker needs while it computes a unit.
struct AttendScratch {
  alignas(64) float q[kRowBatch * kMaxHeadDim];  // in lane order, zero past head_dim
  alignas(64) float states[kRowBatch * StateFloats(kMaxHeadDim)];
  alignas(64) float tile_o[kTileRows * kMaxHeadDim];
  alignas(64) float weights[kTileRows * kSplitTokens];
  // The K rows of a split and of the next one, with room for the rows that tiles and prefetches may
  // reach past the end.
  const std::byte* rows[2][kSplitTokens + 64];
};
static_assert(sizeof(AttendScratch) <= kScratchBytes);

struct AttendOp {
  AttendParams params;
  AttendPlan plan;

  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};
static_assert(sizeof(AttendOp) <= kOpBytes);

}  // namespace sluice

#endif  // KERNELS_CPU_ATTEND_H_
