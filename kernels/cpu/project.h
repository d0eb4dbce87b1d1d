// A_g on the CPU.

#ifndef KERNELS_CPU_PROJECT_H_
#define KERNELS_CPU_PROJECT_H_

#include <cstdint>

#include "kernels/cpu/pool.h"
#include "kernels/ops/params.h"

namespace sluice {

// Units are (kv head, block), so that consecutive ones share P.
struct ProjectKeysOp {
  ProjectKeysParams params;
  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

struct ProjectScratch {
  alignas(64) float p[kMaxHeadDim * kMaxRank];
};

}  // namespace sluice

#endif  // KERNELS_CPU_PROJECT_H_
