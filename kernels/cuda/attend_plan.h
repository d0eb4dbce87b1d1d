// How one Attend call is cut into entries, parts and teams (attend_args.h), and what it takes of
// the workspace.
//
// Threads: a plan is used by one thread at a time.

#ifndef KERNELS_CUDA_ATTEND_PLAN_H_
#define KERNELS_CUDA_ATTEND_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/attend_args.h"
#include "kernels/ops/params.h"

namespace sluice::cuda {

// Grows with every context and with the number of sequences.
int64_t AttendWorkspaceBytes(const AttendParams& params);

struct AttendPlan {
  // `rows_per_entry` query rows of a kv head, for `num_blocks` blocks of threads at once.
  void Build(const AttendParams& params, int rows_per_entry, int num_blocks);

  std::vector<AttendEntryArgs> entries;
  std::vector<AttendTeamArgs> teams;  // and one more, where the last ends
  int team_blocks = 0;
  int part_spans = 0;
  int64_t num_states = 0;
  int num_counters = 0;

  int num_teams() const { return static_cast<int>(teams.size()) - 1; }

 private:
  void AddEntries(const AttendParams& params, int rows_per_entry);
  int64_t CutIntoTeams(int num_teams);
  void ShareEntries(int num_kv_heads);

  std::vector<int64_t> entry_spans_;
};

// The query rows of a kv head of the sequence that has most of them.
int64_t MaxRows(const AttendParams& params);

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_PLAN_H_
