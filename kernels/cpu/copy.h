// Tokens between wire layout and blocks.

#ifndef KERNELS_CPU_COPY_H_
#define KERNELS_CPU_COPY_H_

#include <cstdint>

#include "kernels/cpu/pool.h"
#include "kernels/ops/params.h"

namespace sluice {

// Units are pieces of a copy: some of its tokens, all kv heads.
struct CopyOp {
  TokenCopyParams params;
  bool store;  // into the blocks, or out of them
  int64_t pieces_per_copy = 1;
  int64_t tokens_per_piece = 1;

  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

// Units are whole copies.
struct ByteCopyOp {
  ByteCopyParams params;

  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

}  // namespace sluice

#endif  // KERNELS_CPU_COPY_H_
