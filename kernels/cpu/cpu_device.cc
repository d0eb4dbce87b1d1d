#include "kernels/cpu/cpu_device.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/pool.h"
#include "kernels/device/machine_memory.h"

namespace sluice {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int kMaxThreads = 1024;

int AllowedCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return std::max(1u, std::thread::hardware_concurrency());
}

std::string CpuName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "CPU";
}

void Unmap(std::byte* data, int64_t bytes) { munmap(data, bytes); }

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int num_threads) : pool_(num_threads) {
    info_.kind = "cpu";
    info_.instruction_set = CpuInstructionSet();
    info_.name =
        absl::StrCat(CpuName(), " (", info_.instruction_set, "), ", num_threads, " threads");
    info_.num_workers = num_threads;
    info_.total_memory_bytes = MachineMemoryBytes();
    info_.free_memory_bytes = info_.total_memory_bytes;
    info_.reads_any_host_memory = true;
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<Buffer> Reserve(MemoryKind, int64_t bytes) override {
    if (bytes <= 0) return absl::InvalidArgumentError(absl::StrCat("reserve of ", bytes, " bytes"));
    if (bytes > INT64_MAX - kHugePageBytes) return NoAddressSpace(bytes);
    const int64_t mapped = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    // A large buffer starts on a huge page, so that committed parts of it can be huge pages.
    const int64_t slack = mapped >= kHugePageBytes ? kHugePageBytes : 0;
    void* raw = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NoAddressSpace(bytes);
    auto* data = static_cast<std::byte*>(raw);
    if (slack > 0) {
      const int64_t before = -reinterpret_cast<int64_t>(raw) & (kHugePageBytes - 1);
      if (before > 0) munmap(data, before);
      if (before < slack) munmap(data + before + mapped, slack - before);
      data += before;
    }
    return Buffer(data, mapped, &Unmap);
  }

  absl::Status Commit(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) override {
    if (offset_bytes < 0 || bytes < 0 || offset_bytes > buffer.bytes() ||
        bytes > buffer.bytes() - offset_bytes) {
      return absl::OutOfRangeError(absl::StrCat("commit of [", offset_bytes, ", +", bytes,
                                                ") in a buffer of ", buffer.bytes(), " bytes"));
    }
    // Huge pages where the committed range covers them whole: shuffled blocks are then found
    // without a walk of the page table each. It is a hint; a kernel without them says no, which is
    // fine.
    const int64_t begin = (offset_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    const int64_t end = (offset_bytes + bytes) / kHugePageBytes * kHugePageBytes;
    if (begin < end) (void)madvise(buffer.data() + begin, end - begin, MADV_HUGEPAGE);
    return absl::OkStatus();
  }

  std::unique_ptr<Stream> CreateStream(StreamPriority priority) override {
    return std::make_unique<CpuStream>(&pool_, priority);
  }

  Ops& ops() override { return ops_; }

 private:
  static absl::Status NoAddressSpace(int64_t bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("no address space for ", bytes, " bytes"));
  }

  DeviceInfo info_;
  CpuOps ops_;
  CpuPool pool_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(const CpuDeviceOptions& options) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return absl::InvalidArgumentError(absl::StrCat("num_threads is ", options.num_threads,
                                                   "; 0 to ", kMaxThreads, " are allowed"));
  }
  return std::unique_ptr<Device>(
      std::make_unique<CpuDevice>(options.num_threads > 0 ? options.num_threads : AllowedCores()));
}

}  // namespace sluice
