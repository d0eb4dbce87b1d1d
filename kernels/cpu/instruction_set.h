// The instruction set that the kernels run with.

#ifndef KERNELS_CPU_INSTRUCTION_SET_H_
#define KERNELS_CPU_INSTRUCTION_SET_H_

#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

// Of those that the kernels are compiled for, the best that this CPU has: "AVX3", "AVX2", "NEON",
// ...
std::string CpuInstructionSet();

// For tests. All that this CPU has, best first, as Highway's target bits; and a way to make every
// kernel use one of them (0: the best again). Only while no device exists.
std::vector<int64_t> CpuInstructionSets();
void ForceCpuInstructionSetForTest(int64_t target);

}  // namespace sluice

#endif  // KERNELS_CPU_INSTRUCTION_SET_H_
