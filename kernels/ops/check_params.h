// What every device demands of params (params.h): a wrong shape is a broken invariant of the caller
// and ends the process.
//
// Threads: pure functions.

#ifndef KERNELS_OPS_CHECK_PARAMS_H_
#define KERNELS_OPS_CHECK_PARAMS_H_

#include "kernels/ops/params.h"

namespace sluice {

void CheckHeadDim(int head_dim);
void CheckCopies(const TokenCopyParams& params);
void CheckProjectKeys(const ProjectKeysParams& params);
void CheckScore(const ScoreParams& params);
void CheckAttend(const AttendParams& params);

}  // namespace sluice

#endif  // KERNELS_OPS_CHECK_PARAMS_H_
