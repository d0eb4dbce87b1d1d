// SLUICE_CHECK: a broken invariant of ours ends the process with the place and the condition.

#ifndef KERNELS_OPS_CHECK_H_
#define KERNELS_OPS_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define SLUICE_CHECK(condition)                                                          \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#endif  // KERNELS_OPS_CHECK_H_
