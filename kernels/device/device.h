// The device seam: what the daemon needs of a GPU, or of the CPU that stands in for one.
//
// A Device owns memory and streams. A Stream runs the work given to it in order; work of different
// streams runs side by side unless WaitFor says otherwise. The operations that can be put on a
// stream are in kernels/ops/ops.h.
//
//   SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, CreateCpuDevice({}));
//   std::unique_ptr<Stream> stream = device->CreateStream(StreamPriority::kAttention);
//   device->ops().Attend(params, *stream);
//   stream->Enqueue(&done);  // done.Run() is called when the attention is complete.
//
// Threads: every method may be called from any thread. Enqueueing on one stream from two threads
// is safe; the order between them is then whichever came first.
// Ownership: owners are move-only; a Stream and a Buffer must not outlive their Device.

#ifndef KERNELS_DEVICE_DEVICE_H_
#define KERNELS_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

class Ops;

// Memory that the device's operations can address. Move-only; gives the memory back when destroyed.
// Nothing that still runs may use it then: wait for the streams first.
class Buffer {
 public:
  Buffer() = default;
  // `release` is called once with (data, bytes).
  Buffer(std::byte* data, int64_t bytes, void (*release)(std::byte*, int64_t))
      : data_(data), bytes_(bytes), release_(release) {}
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        release_(other.release_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      Reset();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
      release_ = other.release_;
    }
    return *this;
  }
  ~Buffer() { Reset(); }

  void Reset() {
    if (data_ != nullptr) release_(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  void (*release_)(std::byte*, int64_t) = nullptr;
};

// Where a Buffer lies. On the CPU device both kinds are ordinary memory.
enum class MemoryKind {
  kDevice,  // HBM: the kernels' fastest memory; the host cannot read it.
  kHost,    // pinned host memory: host and kernels address it alike.
};

// The n-th piece of work of a stream, counted from 1; 0 is "nothing", and always complete.
using StreamPosition = uint64_t;

// Work of the host that runs in a stream's order. Run is called once, on a thread of the device,
// after all earlier work of the stream; it must be short, must not block and may delete or reuse
// the task. The caller owns the task and keeps it alive until Run is entered. Run may enqueue more
// work on any stream, and must not destroy the stream that it runs on, or synchronize.
class HostTask {
 public:
  virtual ~HostTask() = default;
  virtual void Run() = 0;
};

enum class StreamPriority {
  kAttention,  // decode and scoring: taken first
  kCopy,       // bulk movement and projection: gives way to attention between small pieces
};

// An ordered queue of work. Destroying a stream waits for what it holds.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Appends host work; does not block. Returns its position.
  virtual StreamPosition Enqueue(HostTask* task) = 0;
  // Position of the newest work handed in; and the position up to which all work is complete.
  virtual StreamPosition enqueued() const = 0;
  virtual StreamPosition completed() const = 0;
  // Work enqueued after this call starts only when `other` (of the same device) has completed
  // `position`, which must have been enqueued there; does not block. `other` may be destroyed
  // before this stream gets there.
  virtual void WaitFor(Stream& other, StreamPosition position) = 0;
  // Makes sure that operations can be enqueued whose arrays (tables of addresses, lists of copies,
  // queries) have `array_bytes` in all, without memory being taken then. RESOURCE_EXHAUSTED where
  // it is out, UNAVAILABLE on a failed device. Operations do without this as long as memory is
  // there; where it is out when one is enqueued, the device fails.
  [[nodiscard]] virtual absl::Status MakeRoom(int64_t array_bytes) {
    (void)array_bytes;
    return absl::OkStatus();
  }
  // Blocks the calling thread until everything enqueued so far is complete. For tests, tools and
  // shutdown; never called on an RPC thread.
  virtual void Synchronize() = 0;

 protected:
  Stream() = default;
};

struct DeviceInfo {
  std::string kind;                // "cpu" or "cuda"
  std::string name;                // for people: "AMD EPYC 9554 (AVX3), 2 threads"
  std::string instruction_set;     // what an output's bits depend on: "AVX3", "AVX2", "sm_90"
  int num_workers = 0;             // threads or multiprocessors
  int64_t total_memory_bytes = 0;  // HBM, or physical memory on the CPU device
  int64_t free_memory_bytes = 0;   // of it, when the device was created
  // Whether device memory is another memory than the host's.
  bool has_hbm = false;
  // Whether operations take addresses of any memory of the process, say of a message's bytes.
  // False: of Reserve'd memory alone; other bytes have to be copied there first. (The arrays of
  // params themselves, such as TokenCopyParams::copies, may lie anywhere in either case.)
  bool reads_any_host_memory = false;
};

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual const DeviceInfo& info() const = 0;

  // OK while the device works. Else UNAVAILABLE, for good, with the place that saw it fail: nothing
  // more is computed, every stream counts everything as complete and host tasks run through, so
  // that their owners can say so. Who has seen work complete and then an OK status here has sound
  // results.
  virtual absl::Status status() const { return absl::OkStatus(); }

  // Address space for `bytes` of memory, aligned to 4,096. Pages cost memory from the moment that
  // Commit covers them (or, on the CPU device, when first touched). RESOURCE_EXHAUSTED when the
  // address space is not to be had; UNAVAILABLE, here and below, on a failed device.
  [[nodiscard]] virtual absl::StatusOr<Buffer> Reserve(MemoryKind kind, int64_t bytes) = 0;
  // Makes [offset, offset + bytes) of a reserved buffer usable. Repeating it is harmless.
  // RESOURCE_EXHAUSTED when memory is out; what was committed before stays usable.
  [[nodiscard]] virtual absl::Status Commit(const Buffer& buffer, int64_t offset_bytes,
                                            int64_t bytes) = 0;

  // Takes this much device memory for later Commits now, so that they need not ask the driver for
  // it. RESOURCE_EXHAUSTED when it is not to be had. A device without such a step does nothing.
  [[nodiscard]] virtual absl::Status TakeDeviceMemory(int64_t bytes) {
    (void)bytes;
    return absl::OkStatus();
  }

  virtual std::unique_ptr<Stream> CreateStream(StreamPriority priority) = 0;

  virtual Ops& ops() = 0;
};

}  // namespace sluice

#endif  // KERNELS_DEVICE_DEVICE_H_
