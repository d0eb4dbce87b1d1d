// What has to be said to Highway before its first include.

#ifndef KERNELS_CPU_HIGHWAY_CONFIG_H_
#define KERNELS_CPU_HIGHWAY_CONFIG_H_

// The kernels keep vectors in arrays, which vectors of unknown length cannot be.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

// The fallback emulates vectors of four lanes. Highway avoids it with GCC before 12.3 because of a
// bug in the vectorisation of high multiplications, which are not used here; its other fallback has
// one lane and no shuffles.
#ifndef HWY_BROKEN_EMU128
#define HWY_BROKEN_EMU128 0
#endif

#endif  // KERNELS_CPU_HIGHWAY_CONFIG_H_
