// Pinned host memory that offloads and fetches pass through on a device that cannot address a
// message's bytes, and the threads that copy in and out of it.
//
//   class Work final : public TransferStaging::Transfer { ... };
//   if (staging->Take(&work, bytes)) {           // else work.OnMemory() follows
//     staging->Copy(&work, {work.data(), k, k_bytes}, {work.data() + k_bytes, v, v_bytes});
//   }                                            // work.OnCopied() follows
//   ... the device reads work.data(); when it is done: staging->Release(&work);
//
// Who waits for memory gets it in the order of asking: the first waits until its bytes are free in
// one piece, and those behind it wait for it, so that nobody starves. Copies are done in the order
// in which they were handed in, each by all threads at once.
//
// Threads: every method may be called from any thread and does not block. OnMemory and OnCopied run
// on the copier threads with no lock held; they must be short and may call every method.
// Ownership: a Transfer belongs to its user, who keeps it while it waits, copies or holds memory.

#ifndef SERVER_SESSION_TRANSFER_STAGING_H_
#define SERVER_SESSION_TRANSFER_STAGING_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/ops/params.h"

namespace sluice {

// Which bytes of [0, capacity_bytes) are free: first fit, neighbours joined. Not thread-safe.
class FreeRanges {
 public:
  explicit FreeRanges(int64_t capacity_bytes) : ranges_{{0, capacity_bytes}} {}

  // The offset of `bytes` (1 or more) that were free, or -1 where no range is long enough.
  int64_t Take(int64_t bytes);
  void Give(int64_t offset_bytes, int64_t bytes);

  size_t num_ranges() const { return ranges_.size(); }

 private:
  struct Range {
    int64_t offset_bytes;
    int64_t bytes;
  };
  std::vector<Range> ranges_;  // by offset, no two of them adjacent
};

class TransferStaging {
 public:
  struct Options {
    int64_t capacity_bytes = 0;  // 1 or more
    int num_threads = 1;
  };

  class Transfer {
   public:
    Transfer() = default;
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // Its memory, from Take or OnMemory to Release.
    std::byte* data() const { return data_; }

   protected:
    ~Transfer() = default;

   private:
    friend class TransferStaging;
    // The memory that Take did not have is there.
    virtual void OnMemory() = 0;
    // What was handed to Copy is done. Nothing is touched afterwards.
    virtual void OnCopied() = 0;

    std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
    Transfer* next_ = nullptr;  // in the one list that it is in
    std::array<ByteCopy, 2> copies_;
    int64_t num_pieces_ = 0;
    int64_t next_piece_ = 0;
    int64_t pieces_left_ = 0;
  };

  // RESOURCE_EXHAUSTED HOST_MEMORY where the device has no such memory. It must outlive this.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TransferStaging>> Create(
      const Options& options, Device* device);
  // No transfer may be under way. Waits for callbacks that still run.
  ~TransferStaging();

  // The most bytes that one transfer can have.
  int64_t capacity_bytes() const { return capacity_bytes_; }
  // At most capacity_bytes. True: the memory is there, and OnMemory is not called. 0 bytes always
  // are.
  [[nodiscard]] bool Take(Transfer* transfer, int64_t bytes);
  void Copy(Transfer* transfer, const ByteCopy& first, const ByteCopy& second);
  // Gives the memory back, if there is any.
  void Release(Transfer* transfer);

 private:
  // Transfers, first in, first out.
  class Queue {
   public:
    Transfer* front() const { return head_; }
    void Push(Transfer* transfer);
    Transfer* Pop();

   private:
    Transfer* head_ = nullptr;
    Transfer* tail_ = nullptr;
  };

  TransferStaging(const Options& options, Buffer region);
  // With the lock.
  bool TryTake(Transfer* transfer);
  void RunCopier();
  static void CopyPiece(const Transfer& transfer, int64_t piece);

  const Buffer region_;
  const int64_t capacity_bytes_;

  std::mutex mutex_;
  std::condition_variable wake_;
  FreeRanges free_;
  Queue waiting_;  // for memory
  Queue granted_;  // OnMemory is to be called
  Queue copying_;  // has pieces that no thread has taken
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace sluice

#endif  // SERVER_SESSION_TRANSFER_STAGING_H_
