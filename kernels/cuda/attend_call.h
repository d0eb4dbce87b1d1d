// One Attend call made ready for its kernel: the plan, its parameters, and the arrays it reads.
//
//   AttendCall call(&plan, params, num_sms);
//   call.Fill(host, device);  // call.upload_bytes() of pinned memory, and where kernels see them
//   SLUICE_CUDA_CHECK(call.Launch(stream));
//
// Threads: one thread at a time.

#ifndef KERNELS_CUDA_ATTEND_CALL_H_
#define KERNELS_CUDA_ATTEND_CALL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attend_args.h"
#include "kernels/cuda/attend_plan.h"
#include "kernels/ops/params.h"

namespace sluice::cuda {

class AttendCall {
 public:
  // Builds the plan in `plan`, whose room is kept. `plan` and what params point to must outlive
  // this.
  AttendCall(AttendPlan* plan, const AttendParams& params, int num_sms);

  // What the kernel takes beside its parameters: counters where blocks share a sequence; of larger
  // calls the block tables, of the largest the other arrays too. It leaves all of it as it was.
  int64_t upload_bytes() const { return upload_bytes_; }
  // Writes upload_bytes() to host memory, which the kernel will see at `seen`, and what travels in
  // the parameters there.
  void Fill(std::byte* upload, const std::byte* seen);
  // Where the kernel finds q, if not where the params say.
  void set_q(const std::byte* q) { args_.q = q; }
  cudaError_t Launch(cudaStream_t stream) const;

 private:
  const AttendPlan& plan_;
  const AttendParams& params_;
  int pieces_ = 0;
  int64_t counters_bytes_ = 0;
  int64_t arrays_bytes_ = 0;
  int64_t upload_bytes_ = 0;
  AttendKernelArgs args_;
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_ATTEND_CALL_H_
