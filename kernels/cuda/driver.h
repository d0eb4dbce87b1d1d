// The few driver functions that the runtime has no other name for, found through the runtime: so
// that nothing links against libcuda and the program starts where there is none.

#ifndef KERNELS_CUDA_DRIVER_H_
#define KERNELS_CUDA_DRIVER_H_

#include <cuda.h>
#include <cudaTypedefs.h>

#include "absl/status/status.h"

namespace sluice::cuda {

struct Driver {
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 granularity = nullptr;
  PFN_cuStreamWriteValue64_v11070 write_value = nullptr;
  PFN_cuStreamWaitValue64_v11070 wait_value = nullptr;
};

// Filled in by LoadDriver, once.
const Driver& driver();
[[nodiscard]] absl::Status LoadDriver();

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_DRIVER_H_
