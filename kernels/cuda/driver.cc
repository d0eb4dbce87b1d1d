#include "kernels/cuda/driver.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/error.h"

namespace sluice::cuda {
namespace {

Driver functions;

template <typename Function>
absl::Status Load(const char* name, unsigned version, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess) return ToStatus(error, name);
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    return absl::UnavailableError(absl::StrCat("the driver has no ", name));
  }
  *function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

}  // namespace

const Driver& driver() { return functions; }

absl::Status LoadDriver() {
  absl::Status status;
  status.Update(Load("cuMemAddressReserve", 10020, &functions.address_reserve));
  status.Update(Load("cuMemAddressFree", 10020, &functions.address_free));
  status.Update(Load("cuMemCreate", 10020, &functions.create));
  status.Update(Load("cuMemRelease", 10020, &functions.release));
  status.Update(Load("cuMemMap", 10020, &functions.map));
  status.Update(Load("cuMemUnmap", 10020, &functions.unmap));
  status.Update(Load("cuMemSetAccess", 10020, &functions.set_access));
  status.Update(Load("cuMemGetAllocationGranularity", 10020, &functions.granularity));
  status.Update(Load("cuStreamWriteValue64", 11070, &functions.write_value));
  status.Update(Load("cuStreamWaitValue64", 11070, &functions.wait_value));
  return status;
}

}  // namespace sluice::cuda
