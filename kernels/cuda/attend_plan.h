// How one Attend call is cut into units and merges (attend_args.h), and what it takes of the
// workspace.
//
// Threads: a plan is used by one thread at a time.

#ifndef KERNELS_CUDA_ATTEND_PLAN_H_
#define KERNELS_CUDA_ATTEND_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/attend_args.h"
#include "kernels/ops/params.h"

namespace sluice::cuda {

int64_t AttendWorkspaceBytes(const AttendParams& params, int num_sms);

struct AttendPlan {
  // `rows_per_unit` query rows of a kv head. The parts are splits where the call is small, which is
  // told from what the workspace may depend on.
  void Build(const AttendParams& params, int rows_per_unit, int num_sms);

  std::vector<AttendUnitArgs> units;
  std::vector<AttendMergeArgs> merges;
  int64_t num_states = 0;
  int max_merge_query_tokens = 0;
};

// The query rows of a kv head of the sequence that has most of them.
int64_t MaxRows(const AttendParams& params);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_PLAN_H_
