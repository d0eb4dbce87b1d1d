// A CUDA stream with positions, waits and host tasks.
//
// Each stream has a word in pinned host memory that counts its completed work: the GPU writes it
// after the operations before a host task (or where somebody asks), the thread that ran a host task
// writes it after the task. Later work of this stream, and other streams, wait for the word on the
// GPU (cuStreamWaitValue64), so that nothing is held back in a queue of ours, no event is needed
// and no thread waits for one call. Completion threads watch the words of streams that have host
// tasks.
//
// A stream of a failed device (error.h), and one for which there was no memory when it was created,
// does nothing: it counts everything as complete and runs host tasks through.
//
// Threads: every public method may be called from any thread.

#ifndef KERNELS_CUDA_STREAM_H_
#define KERNELS_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/error.h"
#include "kernels/device/device.h"

namespace sluice::cuda {

class CudaStream;

// Runs the host tasks of all streams.
class CompletionThreads {
 public:
  explicit CompletionThreads(int num_threads);
  ~CompletionThreads();

  // `stream` has a host task at the front of its queue.
  void Add(CudaStream* stream);
  // Blocks until no thread is at work on `stream`, which has no task left.
  void WaitUntilLeft(CudaStream* stream);

 private:
  void Run();
  // The first stream whose front task may run, taken out of the list; null: none.
  CudaStream* FindReady();

  std::mutex mutex_;
  std::condition_variable wake_;  // for threads that wait for their turn to watch
  std::condition_variable left_;
  std::vector<CudaStream*> watched_;
  std::vector<CudaStream*> running_;
  bool watching_ = false;  // one thread watches at a time
  bool end_ = false;
  std::vector<std::thread> threads_;
};

// Words in pinned memory, one a stream. A word only ever counts up, also when its place passes on
// to another stream: a wait that the GPU has not come to yet may still look at it.
class WordPool {
 public:
  struct Word {
    volatile uint64_t* value;
    uint64_t base;  // what position 0 of the new owner reads
  };
  [[nodiscard]] absl::Status Take(Word* word);
  void Give(volatile uint64_t* word);

 private:
  std::mutex mutex_;
  std::vector<Buffer> pages_;
  std::vector<volatile uint64_t*> free_;
};

// Room for what an operation's kernels read: pinned memory, and device memory of equal size behind
// it, kept until the operation is complete.
struct Upload {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

class CudaStream final : public Stream {
 public:
  CudaStream(StreamPriority priority, WordPool* words, CompletionThreads* completions);
  ~CudaStream() override;
  static CudaStream& From(Stream& stream) { return static_cast<CudaStream&>(stream); }

  StreamPosition Enqueue(HostTask* task) override;
  StreamPosition enqueued() const override { return enqueued_.load(std::memory_order_acquire); }
  StreamPosition completed() const override;
  void WaitFor(Stream& other, StreamPosition position) override;
  absl::Status MakeRoom(int64_t array_bytes) override;
  void Synchronize() override;

  // One operation of kernels/ops: `launch(cudaStream_t)` puts it on the stream. It may call
  // TakeUpload.
  template <typename Launch>
  StreamPosition Submit(const Launch& launch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (works()) {
      BeforeWork();
      launch(stream_);
    }
    return ++enqueued_;
  }
  // Inside Submit's launch. Where memory is out, which MakeRoom is to prevent, the device fails,
  // and what is returned is good for nothing but being written to.
  Upload TakeUpload(int64_t bytes);

 private:
  friend class CompletionThreads;

  struct Task {
    HostTask* task;
    StreamPosition position;
    uint64_t gate;
  };
  struct Arena {
    Buffer host;
    Buffer device;
    int64_t used_bytes = 0;
    StreamPosition last_position = 0;
  };

  [[nodiscard]] absl::Status Create(StreamPriority priority);
  bool works() const { return created_.ok() && !Failed(); }
  StreamPosition Reached() const;
  // With the lock: makes an arena with so much room the current one.
  [[nodiscard]] absl::Status FindRoom(int64_t bytes);
  // With the lock: makes the stream wait for a host task that later work must follow.
  void BeforeWork();
  // With the lock: has the GPU write the word up to the newest operation.
  void WriteWord();
  // For completion threads. Whether there is a front task, whether it may run, and running all that
  // may.
  bool HasTask() const { return front_needs_.load(std::memory_order_acquire) != UINT64_MAX; }
  bool FrontIsReady() const;
  void RunTasks();
  void CheckForError();
  bool IsReady(StreamPosition needs, uint64_t gate) const;
  void SetFront();

  WordPool* const words_;
  CompletionThreads* const completions_;
  absl::Status created_;  // as the constructor found it
  WordPool::Word word_ = {&no_word_, 0};
  // Counts the waits that a host task follows, as the GPU has passed them.
  WordPool::Word gate_ = {&no_word_, 0};
  volatile uint64_t no_word_ = 0;
  cudaStream_t stream_ = nullptr;

  mutable std::mutex mutex_;
  std::atomic<StreamPosition> enqueued_{0};
  StreamPosition written_ = 0;    // the word will reach this without further ado
  StreamPosition last_task_ = 0;  // position of the newest host task
  bool waits_for_task_ = false;   // the GPU has been told to wait for it
  bool waits_for_other_ = false;  // since the newest host task
  uint64_t num_gates_ = 0;
  std::deque<Task> tasks_;
  // What the front task waits for.
  std::atomic<StreamPosition> front_needs_{UINT64_MAX};
  std::atomic<uint64_t> front_gate_{0};
  std::vector<std::unique_ptr<Arena>> arenas_;
  size_t current_arena_ = 0;
  std::vector<std::byte> no_arena_;
};

}  // namespace sluice::cuda

#endif  // KERNELS_CUDA_STREAM_H_
