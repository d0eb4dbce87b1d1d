// Block scores on the CPU.

#ifndef KERNELS_CPU_SCORE_H_
#define KERNELS_CPU_SCORE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/pool.h"
#include "kernels/ops/params.h"

namespace sluice {

// Where the parts of a call's workspace are.
struct ScoreWorkspace {
  static int64_t Bytes(const ScoreParams& params);
  explicit ScoreWorkspace(const ScoreParams& params);

  float* q;         // q' in lane order, [num_query_heads][kMaxRank]
  float* stats;     // MASS: [block][m or l][padded heads]
  float* ranges;    // MASS: likewise for each kRangeBlocks blocks; the whole call's at the end
  uint64_t* order;  // top k: sort keys
  int64_t heads;    // num_query_heads, rounded up to whole vectors
  int64_t num_ranges;
};

struct ScoreOp {
  ScoreParams params;

  // Queries; blocks; MASS: ranges of blocks, the whole, masses; the top k.
  static constexpr int kPhases = 6;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

struct ScoreScratch {
  alignas(64) float p[kMaxHeadDim * kMaxRank];
  alignas(64) float weights[4 * kSplitTokens];
  alignas(64) std::byte padded[kMaxBlockTokens * kMaxRank * 2];
  const std::byte* rows[kMaxBlockTokens + 8];
};
static_assert(sizeof(ScoreScratch) <= kScratchBytes);

}  // namespace sluice

#endif  // KERNELS_CPU_SCORE_H_
