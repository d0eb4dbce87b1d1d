#include "kernels/cuda/memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/error.h"
#include "kernels/ops/check.h"

namespace sluice::cuda {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHostGranuleBytes = 64 << 10;
constexpr int64_t kSlabBytes = 32 << 20;
// Device memory committed in runs of at least this many bytes has a handle of its own: to make and
// map one takes as long as one of 2 MiB.
constexpr int64_t kLargeRunBytes = int64_t{1} << 30;
// Host memory committed in runs of at least this many bytes is faulted in by several threads.
constexpr int64_t kTouchedRunBytes = int64_t{64} << 20;
constexpr int kTouchThreads = 8;
constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int kMinClassLog2 = 12;
constexpr int kMaxClassLog2 = 22;  // larger ones have address space of their own
constexpr int kNumClasses = kMaxClassLog2 - kMinClassLog2 + 1;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

absl::Status NoMemory(const char* kind, int64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("no ", kind, " for ", bytes, " bytes"));
}

cudaError_t Pin(void* data, int64_t bytes) {
  const cudaError_t error =
      cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  // What the kernel's refusal to pin comes as.
  return error == cudaErrorOperatingSystem ? cudaErrorMemoryAllocation : error;
}

// Address space with committed granules.
struct Range {
  MemoryKind kind = MemoryKind::kDevice;
  int64_t bytes = 0;
  std::vector<bool> committed;                        // by granule
  std::vector<CUmemGenericAllocationHandle> handles;  // device: by granule; 0: of a large run
  struct LargeRun {
    int64_t first;  // granules
    int64_t count;
    CUmemGenericAllocationHandle handle;
  };
  std::vector<LargeRun> large_runs;
  std::vector<std::byte*> registered;  // host: starts of what was pinned
};

class Memory {
 public:
  absl::Status Start(int64_t hbm_budget_bytes, int numa_node) {
    std::lock_guard<std::mutex> lock(mutex_);
    numa_node_ = numa_node;
    property_ = {};
    property_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property_.location.id = 0;
    size_t granule = 0;
    absl::Status status =
        ToStatus(driver().granularity(&granule, &property_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
    granule_bytes_ = static_cast<int64_t>(granule);
    budget_bytes_ = hbm_budget_bytes;
    return status;
  }

  void Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& pools : free_) {
      for (auto& pool : pools) pool.clear();
    }
    slabs_.clear();
    while (!ranges_.empty()) EndRange(Unlink(ranges_.begin()));
    for (auto& kept : kept_) kept.clear();
    for (const CUmemGenericAllocationHandle handle : spare_handles_) {
      SLUICE_CUDA_CHECK(driver().release(handle));
    }
    spare_handles_.clear();
    num_granules_ = 0;
  }

  absl::Status TakeDevice(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (std::ssize(spare_handles_) * granule_bytes_ < bytes) {
      CUmemGenericAllocationHandle handle = 0;
      absl::Status status = Create(1, &handle);
      if (!status.ok()) return status;
      spare_handles_.push_back(handle);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::byte*> Reserve(MemoryKind kind, int64_t bytes, int64_t* reserved_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > int64_t{1} << kMaxClassLog2) return ReserveRange(kind, bytes, reserved_bytes);
    int log2 = kMinClassLog2;
    while (int64_t{1} << log2 < bytes) ++log2;
    *reserved_bytes = int64_t{1} << log2;
    std::vector<std::byte*>& pool = free_[static_cast<int>(kind)][log2 - kMinClassLog2];
    if (pool.empty()) {
      int64_t slab_bytes = 0;
      absl::StatusOr<std::byte*> slab = ReserveRange(kind, kSlabBytes, &slab_bytes);
      if (!slab.ok()) return slab;
      absl::Status committed = CommitRange(ranges_.find(*slab), 0, slab_bytes);
      if (!committed.ok()) {
        EndRange(Unlink(ranges_.find(*slab)));
        return committed;
      }
      slabs_.push_back(*slab);
      for (int64_t at = slab_bytes - *reserved_bytes; at >= 0; at -= *reserved_bytes) {
        pool.push_back(*slab + at);
      }
    }
    std::byte* data = pool.back();
    pool.pop_back();
    pieces_.emplace(data, kind);
    return data;
  }

  absl::Status Commit(std::byte* data, int64_t offset_bytes, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = ranges_.find(data);
    // A piece of a slab is committed from the start, also where it lies at the slab's beginning.
    if (range == ranges_.end() || pieces_.count(data) > 0) return absl::OkStatus();
    return CommitRange(range, offset_bytes, bytes);
  }

  void Release(std::byte* data, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Who knows what still writes there.
    if (Failed()) return;
    const auto piece = pieces_.find(data);
    if (piece == pieces_.end()) {
      const auto range = ranges_.find(data);
      SLUICE_CHECK(range != ranges_.end());
      // Unpinning and unmapping can wait for the GPU, which may wait for a host task, which may
      // wait for whoever holds the driver up. So a range is kept for the next that is about as
      // large.
      kept_[static_cast<int>(range->second->kind)].emplace(range->second->bytes, data);
      return;
    }
    int log2 = kMinClassLog2;
    while (int64_t{1} << log2 < bytes) ++log2;
    free_[static_cast<int>(piece->second)][log2 - kMinClassLog2].push_back(data);
    pieces_.erase(piece);
  }

  // Asked for each operation; never waits for a call of CUDA's.
  bool InRange(const void* data, int64_t bytes, bool whole) {
    std::lock_guard<std::mutex> lock(index_mutex_);
    auto* at = static_cast<std::byte*>(const_cast<void*>(data));
    auto it = ranges_.upper_bound(at);
    if (it == ranges_.begin()) return false;
    --it;
    const Range& range = *it->second;
    if (range.kind != MemoryKind::kHost || at >= it->first + range.bytes) return false;
    return !whole || at + bytes <= it->first + range.bytes;
  }

 private:
  using Ranges = std::map<std::byte*, std::unique_ptr<Range>>;
  using Unlinked = Ranges::node_type;

  int64_t GranuleBytes(MemoryKind kind) const {
    return kind == MemoryKind::kDevice ? granule_bytes_ : kHostGranuleBytes;
  }

  absl::StatusOr<std::byte*> ReserveRange(MemoryKind kind, int64_t bytes, int64_t* reserved_bytes) {
    const int64_t unit = GranuleBytes(kind);
    if (bytes > INT64_MAX - unit) return NoMemory("address space", bytes);
    auto range = std::make_unique<Range>();
    range->kind = kind;
    range->bytes = RoundUp(bytes, unit);
    std::byte* data = nullptr;
    // The smallest that was given back and is not far too large. Of device memory one of this very
    // size: what is committed in it counts against the budget.
    std::multimap<int64_t, std::byte*>& kept_ranges = kept_[static_cast<int>(kind)];
    const auto kept = kept_ranges.lower_bound(range->bytes);
    const int64_t most_bytes = kind == MemoryKind::kDevice ? range->bytes : 2 * range->bytes;
    if (kept != kept_ranges.end() && kept->first <= most_bytes) {
      data = kept->second;
      kept_ranges.erase(kept);
      *reserved_bytes = range->bytes;
      return data;
    }
    if (kind == MemoryKind::kDevice) {
      CUdeviceptr address = 0;
      if (Failed()) return Failure().status();
      if (driver().address_reserve(&address, range->bytes, unit, 0, 0) != CUDA_SUCCESS) {
        return NoMemory("device address space", bytes);
      }
      data = reinterpret_cast<std::byte*>(address);
    } else {
      void* mapped = mmap(nullptr, range->bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (mapped == MAP_FAILED) return NoMemory("address space", bytes);
      PlaceNearDevice(mapped, range->bytes);
      data = static_cast<std::byte*>(mapped);
    }
    // One bit a granule, also for what is never committed: a 64 GiB range takes 4 KiB of them.
    range->committed.resize(range->bytes / unit);
    if (kind == MemoryKind::kDevice) range->handles.resize(range->bytes / unit);
    *reserved_bytes = range->bytes;
    std::lock_guard<std::mutex> lock(index_mutex_);
    ranges_.emplace(data, std::move(range));
    return data;
  }

  absl::Status CommitRange(Ranges::iterator it, int64_t offset_bytes, int64_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    Range& range = *it->second;
    const int64_t unit = GranuleBytes(range.kind);
    const int64_t end = (offset_bytes + bytes + unit - 1) / unit;
    for (int64_t granule = offset_bytes / unit; granule < end;) {
      if (range.committed[granule]) {
        ++granule;
        continue;
      }
      int64_t last = granule;
      while (last < end && !range.committed[last]) ++last;
      absl::Status status = range.kind == MemoryKind::kDevice
                                ? MapGranules(it->first, range, granule, last)
                                : PinGranules(it->first, range, granule, last);
      if (!status.ok()) return status;
      granule = last;
    }
    return absl::OkStatus();
  }

  // A preference: where the machine has one node, or forbids to choose, nothing is lost but speed.
  void PlaceNearDevice(void* data, int64_t bytes) const {
    constexpr int kMaxNodes = 64;
    if (numa_node_ < 0 || numa_node_ >= kMaxNodes) return;
    const uint64_t nodes = uint64_t{1} << numa_node_;
    (void)syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, &nodes, kMaxNodes + 1, 0);
  }

  absl::Status Create(int64_t num_granules, CUmemGenericAllocationHandle* handle) {
    if ((num_granules_ + num_granules) * granule_bytes_ > budget_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the GPU's budget of ", budget_bytes_, " bytes is spent"));
    }
    absl::Status status =
        SLUICE_CUDA_TRY(driver().create(handle, num_granules * granule_bytes_, &property_, 0));
    if (status.ok()) num_granules_ += num_granules;
    return status;
  }

  absl::Status Map(std::byte* at, int64_t bytes, CUmemGenericAllocationHandle handle) {
    const auto address = reinterpret_cast<CUdeviceptr>(at);
    absl::Status status = SLUICE_CUDA_TRY(driver().map(address, bytes, 0, handle, 0));
    if (!status.ok()) return status;
    CUmemAccessDesc access = {};
    access.location = property_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = SLUICE_CUDA_TRY(driver().set_access(address, bytes, &access, 1));
    if (!status.ok()) SLUICE_CUDA_CHECK(driver().unmap(address, bytes));
    return status;
  }

  absl::Status MapGranules(std::byte* data, Range& range, int64_t first, int64_t last) {
    const int64_t large = kLargeRunBytes / granule_bytes_;
    for (; last - first >= large; first += large) {
      CUmemGenericAllocationHandle handle = 0;
      // Where there is no such piece, there may be granules.
      if (!Create(large, &handle).ok()) break;
      absl::Status status = Map(data + first * granule_bytes_, large * granule_bytes_, handle);
      if (!status.ok()) {
        SLUICE_CUDA_CHECK(driver().release(handle));
        num_granules_ -= large;
        return status;
      }
      range.large_runs.push_back({first, large, handle});
      std::fill_n(range.committed.begin() + first, large, true);
    }
    for (int64_t granule = first; granule < last; ++granule) {
      if (spare_handles_.empty()) {
        CUmemGenericAllocationHandle handle = 0;
        absl::Status status = Create(1, &handle);
        if (status.ok()) {
          spare_handles_.push_back(handle);
        } else {
          EndKeptRanges();
          if (spare_handles_.empty()) {
            status = Create(1, &handle);
            if (!status.ok()) return status;
            spare_handles_.push_back(handle);
          }
        }
      }
      absl::Status status =
          Map(data + granule * granule_bytes_, granule_bytes_, spare_handles_.back());
      if (!status.ok()) return status;
      range.handles[granule] = spare_handles_.back();
      spare_handles_.pop_back();
      range.committed[granule] = true;
    }
    return absl::OkStatus();
  }

  // Pinning faults pages in one by one and from one thread; huge pages and many threads are
  // quicker.
  static void Touch(std::byte* data, int64_t bytes) {
    if (bytes < kTouchedRunBytes) return;
    (void)madvise(data, bytes, MADV_HUGEPAGE);
    const int64_t part = RoundUp(bytes / kTouchThreads, kHugePageBytes);
    std::vector<std::thread> threads;
    for (int64_t begin = 0; begin < bytes; begin += part) {
      threads.emplace_back([=] {
        const int64_t end = std::min(begin + part, bytes);
        for (int64_t at = begin; at < end; at += kPageBytes) {
          *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  absl::Status PinGranules(std::byte* data, Range& range, int64_t first, int64_t last) {
    std::byte* at = data + first * kHostGranuleBytes;
    const int64_t bytes = (last - first) * kHostGranuleBytes;
    Touch(at, bytes);
    const absl::Status status = SLUICE_CUDA_TRY(Pin(at, bytes));
    if (absl::IsResourceExhausted(status)) return NoMemory("pinned host memory", bytes);
    if (!status.ok()) return status;
    range.registered.push_back(at);
    for (int64_t granule = first; granule < last; ++granule) range.committed[granule] = true;
    return absl::OkStatus();
  }

  Unlinked Unlink(Ranges::iterator it) {
    SLUICE_CHECK(it != ranges_.end());
    std::lock_guard<std::mutex> lock(index_mutex_);
    return ranges_.extract(it);
  }

  // The last resort where the budget is spent: the granules of ranges that nobody uses.
  void EndKeptRanges() {
    auto& kept_ranges = kept_[static_cast<int>(MemoryKind::kDevice)];
    for (const auto& [bytes, data] : kept_ranges) EndRange(Unlink(ranges_.find(data)));
    kept_ranges.clear();
  }

  // The end of a range: Unlink, Unmap, TakeBack. On a failed device it stays where it is.
  void Unmap(const Unlinked& unlinked) {
    std::byte* const data = unlinked.key();
    const Range& range = *unlinked.mapped();
    if (Failed()) return;
    if (range.kind == MemoryKind::kHost) {
      for (std::byte* start : range.registered) SLUICE_CUDA_CHECK(cudaHostUnregister(start));
      munmap(data, range.bytes);
      return;
    }
    const auto unmap = [&](int64_t granule, int64_t count) {
      SLUICE_CUDA_CHECK(driver().unmap(
          reinterpret_cast<CUdeviceptr>(data + granule * granule_bytes_), count * granule_bytes_));
    };
    for (size_t granule = 0; granule < range.handles.size(); ++granule) {
      if (range.handles[granule] != 0) unmap(static_cast<int64_t>(granule), 1);
    }
    for (const Range::LargeRun& run : range.large_runs) {
      unmap(run.first, run.count);
      SLUICE_CUDA_CHECK(driver().release(run.handle));
    }
    SLUICE_CUDA_CHECK(driver().address_free(reinterpret_cast<CUdeviceptr>(data), range.bytes));
  }
  void TakeBack(const Unlinked& unlinked) {
    const Range& range = *unlinked.mapped();
    for (const CUmemGenericAllocationHandle handle : range.handles) {
      if (handle != 0) spare_handles_.push_back(handle);
    }
    for (const Range::LargeRun& run : range.large_runs) num_granules_ -= run.count;
  }
  void EndRange(const Unlinked& unlinked) {
    Unmap(unlinked);
    TakeBack(unlinked);
  }

  std::mutex mutex_;
  // Of ranges_, beside mutex_ where they change; alone where they are only looked at.
  std::mutex index_mutex_;
  CUmemAllocationProp property_ = {};
  int64_t granule_bytes_ = 2 << 20;
  int64_t budget_bytes_ = 0;
  int64_t num_granules_ = 0;
  int numa_node_ = -1;
  std::vector<CUmemGenericAllocationHandle> spare_handles_;
  Ranges ranges_;
  // By kind: ranges that were given back, by bytes; what was committed still is.
  std::multimap<int64_t, std::byte*> kept_[2];
  std::vector<std::byte*> slabs_;
  std::map<std::byte*, MemoryKind> pieces_;  // live pieces of slabs
  std::vector<std::byte*> free_[2][kNumClasses];
};

Memory& memory() {
  static Memory* const instance = new Memory();
  return *instance;
}

void ReleaseBuffer(std::byte* data, int64_t bytes) { memory().Release(data, bytes); }

}  // namespace

absl::Status StartMemory(int64_t hbm_budget_bytes, int numa_node) {
  return memory().Start(hbm_budget_bytes, numa_node);
}
void StopMemory() { memory().Stop(); }
absl::Status TakeDeviceMemory(int64_t bytes) { return memory().TakeDevice(bytes); }

absl::StatusOr<Buffer> ReserveMemory(MemoryKind kind, int64_t bytes) {
  if (bytes <= 0) return absl::InvalidArgumentError(absl::StrCat("reserve of ", bytes, " bytes"));
  int64_t reserved_bytes = 0;
  absl::StatusOr<std::byte*> data = memory().Reserve(kind, bytes, &reserved_bytes);
  if (!data.ok()) return data.status();
  return Buffer(*data, reserved_bytes, &ReleaseBuffer);
}

absl::Status CommitMemory(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) {
  if (offset_bytes < 0 || bytes < 0 || offset_bytes > buffer.bytes() ||
      bytes > buffer.bytes() - offset_bytes) {
    return absl::OutOfRangeError(absl::StrCat("commit of [", offset_bytes, ", +", bytes,
                                              ") in a buffer of ", buffer.bytes(), " bytes"));
  }
  return memory().Commit(buffer.data(), offset_bytes, bytes);
}

bool IsPinned(const void* data, int64_t bytes) { return memory().InRange(data, bytes, true); }
bool IsHost(const void* data) { return memory().InRange(data, 0, false); }

}  // namespace sluice::cuda
