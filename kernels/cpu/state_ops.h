// Running states by themselves: begin, merge, finalize.

#ifndef KERNELS_CPU_STATE_OPS_H_
#define KERNELS_CPU_STATE_OPS_H_

#include <cstdint>

#include "kernels/cpu/pool.h"
#include "kernels/ops/params.h"

namespace sluice {

// Units are (row, query head).
struct BeginOp {
  BeginParams params;
  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

struct MergeOp {
  MergeParams params;
  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

struct FinalizeOp {
  FinalizeParams params;
  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

}  // namespace sluice

#endif  // KERNELS_CPU_STATE_OPS_H_
