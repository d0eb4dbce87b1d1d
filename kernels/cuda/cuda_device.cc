#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/stream.h"

namespace sluice {
namespace {

// What the attention kernels take at the largest head_dim.
constexpr size_t kNeededSharedBytes = 227 << 10;
// Buffers are made of whole granules, and streams have some of their own: beyond the budget a
// sixteenth and this much may be taken.
constexpr int64_t kRoundingShareDivisor = 16;
constexpr int64_t kRoundingBytes = 128 << 20;

// The NUMA node that the first GPU is attached to; -1 where the machine does not tell.
int NumaNode() {
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), 0) != cudaSuccess) {
    (void)cudaGetLastError();
    return -1;
  }
  std::string path = absl::AsciiStrToLower(bus_id);
  std::ifstream file(absl::StrCat("/sys/bus/pci/devices/", path, "/numa_node"));
  int node = -1;
  file >> node;
  return file.fail() ? -1 : node;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(DeviceInfo info, int num_completion_threads)
      : info_(std::move(info)), ops_(info_.num_workers), completions_(num_completion_threads) {}
  ~CudaDevice() override = default;

  const DeviceInfo& info() const override { return info_; }
  absl::Status status() const override { return cuda::Failure().status(); }
  absl::StatusOr<Buffer> Reserve(MemoryKind kind, int64_t bytes) override {
    return cuda::ReserveMemory(kind, bytes);
  }
  absl::Status Commit(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) override {
    return cuda::CommitMemory(buffer, offset_bytes, bytes);
  }
  absl::Status TakeDeviceMemory(int64_t bytes) override { return cuda::TakeDeviceMemory(bytes); }
  std::unique_ptr<Stream> CreateStream(StreamPriority priority) override {
    return std::make_unique<cuda::CudaStream>(priority, &words_, &completions_);
  }
  Ops& ops() override { return ops_; }

 private:
  // Gives slabs and granules back after all that lies in them.
  struct MemoryLife {
    ~MemoryLife() { cuda::StopMemory(); }
  };

  MemoryLife memory_;
  DeviceInfo info_;
  cuda::CudaOps ops_;
  cuda::WordPool words_;
  cuda::CompletionThreads completions_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const CudaDeviceOptions& options) {
  if (options.hbm_budget_bytes < 0 || options.num_completion_threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("hbm_budget_bytes is ", options.hbm_budget_bytes,
                     " (0 or more is allowed), num_completion_threads is ",
                     options.num_completion_threads, " (1 or more)"));
  }
  if (cuda::Failed()) return cuda::Failure().status();
  // Streams share this many queues into the GPU; in a queue, one that waits holds the others up.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // Kernels are loaded now. Later on that takes memory which may be out, and may wait for a stream
  // that waits for a host task, for ever where the task needs a lock of the thread that launches.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  int num_devices = 0;
  absl::Status status = cuda::ToStatus(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  // A program that finds no driver, or one that does not fit, finds no GPU.
  if (!status.ok()) return absl::UnavailableError(status.message());
  if (num_devices == 0) return absl::UnavailableError("no GPU");
  cudaDeviceProp properties;
  status = cuda::ToStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  if (status.ok()) status = cuda::ToStatus(cudaSetDevice(0), "cudaSetDevice");
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (status.ok())
    status = cuda::ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  if (status.ok() && (properties.major < 8 || properties.unifiedAddressing == 0)) {
    status = absl::UnavailableError(absl::StrCat(properties.name, " has compute capability ",
                                                 properties.major, ".", properties.minor,
                                                 "; 8.0 is needed"));
  }
  if (status.ok() && properties.sharedMemPerBlockOptin < kNeededSharedBytes) {
    status = absl::UnavailableError(
        absl::StrCat(properties.name, " has ", properties.sharedMemPerBlockOptin,
                     " bytes of shared memory a block of threads; the kernels need ",
                     kNeededSharedBytes, ", as on Hopper"));
  }
  if (status.ok()) status = cuda::LoadDriver();
  if (status.ok()) {
    const int64_t budget_bytes = options.hbm_budget_bytes > 0
                                     ? options.hbm_budget_bytes
                                     : static_cast<int64_t>(free_bytes) / 10 * 9;
    status = cuda::StartMemory(budget_bytes + budget_bytes / kRoundingShareDivisor + kRoundingBytes,
                               NumaNode());
  }
  if (!status.ok()) return status;
  cuda::ListenForFailure(options.on_fatal);
  DeviceInfo info;
  info.kind = "cuda";
  info.instruction_set = absl::StrCat("sm_", properties.major, properties.minor);
  info.name = absl::StrCat(properties.name, " (", info.instruction_set, "), ",
                           properties.multiProcessorCount, " multiprocessors");
  info.num_workers = properties.multiProcessorCount;
  info.total_memory_bytes = static_cast<int64_t>(total_bytes);
  info.free_memory_bytes = static_cast<int64_t>(free_bytes);
  info.has_hbm = true;
  info.reads_any_host_memory = false;
  return std::unique_ptr<Device>(
      std::make_unique<CudaDevice>(std::move(info), options.num_completion_threads));
}

}  // namespace sluice
