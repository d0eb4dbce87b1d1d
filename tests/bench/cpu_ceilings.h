// What the CPU device's own workers can do at best: read memory, and multiply and add.

#ifndef TESTS_BENCH_CPU_CEILINGS_H_
#define TESTS_BENCH_CPU_CEILINGS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/pool.h"

namespace sluice {

// Reads pieces of memory, each contiguous, in the order given; a unit is `pieces_per_unit` of them.
struct ReadOp {
  const std::byte* const* pieces;
  int64_t num_pieces;
  int64_t piece_bytes;  // a multiple of 256
  int64_t pieces_per_unit;
  int prefetch_pieces;  // how many pieces ahead to prefetch; 0: leave it to the hardware
  std::atomic<uint32_t>* sink;

  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

// A loop that stays in registers, with the mix of instructions that attention at GQA `group` needs
// for each vector of BF16 elements: two conversions, and a multiply-add for each half and head.
struct MultiplyAddOp {
  int group;           // 1 or 4
  int64_t iterations;  // vectors of BF16 elements for each unit
  int64_t units;
  std::atomic<uint32_t>* sink;

  static constexpr int kPhases = 1;
  PhaseSize Start(int phase, int num_workers);
  void Run(int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

// BF16 elements of one vector.
int64_t MultiplyAddElements();

}  // namespace sluice

#endif  // TESTS_BENCH_CPU_CEILINGS_H_
