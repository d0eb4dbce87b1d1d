// The CPU device's threads and streams.
//
// A CpuStream is a strand: a queue of operations that run in order. An operation is one or more
// phases; a phase is a number of independent units that workers claim with an atomic counter, so
// idle workers join an operation that is under way. Streams that have something to claim stand in
// one list per priority and are taken in turn. A worker that has finished an operation goes on with
// the stream's next one without a wake-up, unless another stream of the same or a higher priority
// waits.
// Having nothing to do, one worker looks out for a few microseconds before it sleeps: the next
// operation of a chain that is being enqueued just now then costs no wake-up either.
//
//   struct Fill {                      // an operation: trivially copyable, at most kOpBytes
//     float* data; int64_t count;
//     static constexpr int kPhases = 1;
//     PhaseSize Start(int phase, int num_workers) { return {count, 4096}; }
//     void Run(int phase, int64_t begin, int64_t end, WorkerScratch&) {...}
//   };
//   StreamPosition position = CpuStream::From(stream).Submit(Fill{data, count});
//
// Threads: every public method may be called from any thread. One mutex of the pool guards the
// lists; it is taken once per operation and worker, never while an operation runs.

#ifndef KERNELS_CPU_POOL_H_
#define KERNELS_CPU_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/device/device.h"

namespace sluice {

inline constexpr size_t kOpBytes = 320;
inline constexpr size_t kScratchBytes = 256 << 10;

// Memory of one worker that an operation may use while it runs a range of units; what is left in it
// afterwards is lost.
struct WorkerScratch {
  std::byte* memory = nullptr;  // kScratchBytes, aligned to 64

  template <class T>
  T& As() {
    static_assert(sizeof(T) <= kScratchBytes && std::is_trivially_destructible_v<T>);
    return *reinterpret_cast<T*>(memory);
  }
};

struct PhaseSize {
  int64_t units = 0;
  // Units that a worker takes at once: some 20 us of work, so that claims cost nothing beside it
  // and the worker can still turn to more urgent work soon.
  int64_t units_per_claim = 1;
};

// How the pool runs one type of operation.
struct OpKind {
  int phases;
  PhaseSize (*start)(void* op, int phase, int num_workers);
  void (*run)(void* op, int phase, int64_t begin, int64_t end, WorkerScratch& scratch);
};

template <class Op>
inline constexpr OpKind kOpKind = {
    Op::kPhases,
    [](void* op, int phase, int num_workers) {
      return static_cast<Op*>(op)->Start(phase, num_workers);
    },
    [](void* op, int phase, int64_t begin, int64_t end, WorkerScratch& scratch) {
      static_cast<Op*>(op)->Run(phase, begin, end, scratch);
    }};

class CpuPool;

class CpuStream final : public Stream {
 public:
  CpuStream(CpuPool* pool, StreamPriority priority);
  ~CpuStream() override;

  static CpuStream& From(Stream& stream) { return static_cast<CpuStream&>(stream); }

  // Copies `op` to the end of the queue. Allocates only where more operations are in flight than
  // this stream has held before.
  template <class Op>
  StreamPosition Submit(const Op& op) {
    static_assert(std::is_trivially_copyable_v<Op> && sizeof(Op) <= kOpBytes);
    return SubmitBytes(&kOpKind<Op>, &op, sizeof(Op));
  }

  StreamPosition Enqueue(HostTask* task) override;
  StreamPosition enqueued() const override { return enqueued_.load(std::memory_order_acquire); }
  StreamPosition completed() const override { return completed_.load(std::memory_order_acquire); }
  void WaitFor(Stream& other, StreamPosition position) override;
  void Synchronize() override;

 private:
  friend class CpuPool;

  // An operation, or (kind null) a wait for another stream.
  struct Node {
    const OpKind* kind = nullptr;
    Node* next = nullptr;
    CpuStream* waiting_stream = nullptr;
    StreamPosition wait_position = 0;
    Node* next_waiter = nullptr;
    bool satisfied = false;
    alignas(std::max_align_t) std::byte op[kOpBytes];
  };

  StreamPosition SubmitBytes(const OpKind* kind, const void* op, size_t bytes);
  Node* TakeNodeLocked();
  void AppendLocked(Node* node);
  // Drops the oldest node.
  void PopLocked();

  CpuPool* const pool_;
  const StreamPriority priority_;
  std::atomic<StreamPosition> enqueued_{0};
  std::atomic<StreamPosition> completed_{0};

  // Everything below is guarded by the pool's mutex, except next_unit_.
  Node* head_ = nullptr;
  Node* tail_ = nullptr;
  Node* free_nodes_ = nullptr;
  std::vector<std::unique_ptr<Node>> all_nodes_;
  Node* waiters_ = nullptr;  // waits of other streams for this one
  // The phase under way. While phase_active_ is false and a worker holds the stream, that worker
  // has it alone.
  bool phase_active_ = false;
  int phase_ = 0;
  int64_t units_ = 0;
  int64_t units_per_claim_ = 1;
  std::atomic<int64_t> next_unit_{0};
  int participants_ = 0;  // workers that may still run units of the phase
  int workers_ = 0;       // workers that hold the stream in any way
  // The pool's list of streams with something to claim.
  bool listed_ = false;
  CpuStream* list_previous_ = nullptr;
  CpuStream* list_next_ = nullptr;
};

class CpuPool {
 public:
  explicit CpuPool(int num_threads);
  // All streams must be gone.
  ~CpuPool();
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()); }

 private:
  friend class CpuStream;

  struct List {
    CpuStream* first = nullptr;
    CpuStream* last = nullptr;
    std::atomic<int> count{0};  // changed under the mutex, read without it
  };

  void WorkerLoop(int worker);
  CpuStream* TakeLocked();
  // Runs what `stream` (just taken) has until it is done, blocked, or should give way.
  void RunStream(CpuStream* stream, std::unique_lock<std::mutex>& lock, WorkerScratch& scratch);
  // Starts the next phase; false when the operation has no more phases.
  bool StartPhase(CpuStream* stream, std::unique_lock<std::mutex>& lock);
  void RunClaims(CpuStream* stream, WorkerScratch& scratch);
  void CompleteOpLocked(CpuStream* stream);
  // Drops waits that are over; true when the stream then has an operation to start.
  bool ReadyLocked(CpuStream* stream);
  void ListLocked(CpuStream* stream);
  void UnlistLocked(CpuStream* stream);
  void WakeLocked(int64_t wanted);
  // Looks out for work without the mutex, for kLookOut at most.
  void LookOut() const;
  bool ShouldGiveWay(StreamPriority priority, int own) const;

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  List lists_[2];  // by StreamPriority
  int idle_ = 0;
  // A worker is between its last work and sleeping, and will take what comes without being woken.
  bool looking_out_ = false;
  int done_waiters_ = 0;
  bool stopping_ = false;
  std::vector<std::byte*> scratch_;
  std::vector<std::thread> threads_;
};

}  // namespace sluice

#endif  // KERNELS_CPU_POOL_H_
