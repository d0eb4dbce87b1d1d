#include "server/session/transfer_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/ops/check.h"
#include "server/base/error.h"

namespace sluice {
namespace {

constexpr int64_t kPageBytes = 4096;
// What a thread copies before it looks for the next: some 50 us.
constexpr int64_t kPieceBytes = 512 << 10;

int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }
int64_t NumPieces(int64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

}  // namespace

int64_t FreeRanges::Take(int64_t bytes) {
  const auto it = std::find_if(ranges_.begin(), ranges_.end(),
                               [&](const Range& range) { return range.bytes >= bytes; });
  if (it == ranges_.end()) return -1;
  const int64_t offset_bytes = it->offset_bytes;
  it->offset_bytes += bytes;
  it->bytes -= bytes;
  if (it->bytes == 0) ranges_.erase(it);
  return offset_bytes;
}

void FreeRanges::Give(int64_t offset_bytes, int64_t bytes) {
  const auto after = std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& range) {
    return range.offset_bytes > offset_bytes;
  });
  const bool joins_after = after != ranges_.end() && offset_bytes + bytes == after->offset_bytes;
  if (after != ranges_.begin()) {
    Range& before = *std::prev(after);
    if (before.offset_bytes + before.bytes == offset_bytes) {
      before.bytes += bytes;
      if (joins_after) {
        before.bytes += after->bytes;
        ranges_.erase(after);
      }
      return;
    }
  }
  if (joins_after) {
    after->offset_bytes = offset_bytes;
    after->bytes += bytes;
  } else {
    ranges_.insert(after, {offset_bytes, bytes});
  }
}

void TransferStaging::Queue::Push(Transfer* transfer) {
  transfer->next_ = nullptr;
  (tail_ == nullptr ? head_ : tail_->next_) = transfer;
  tail_ = transfer;
}

TransferStaging::Transfer* TransferStaging::Queue::Pop() {
  Transfer* const transfer = head_;
  head_ = std::exchange(transfer->next_, nullptr);
  if (head_ == nullptr) tail_ = nullptr;
  return transfer;
}

absl::StatusOr<std::unique_ptr<TransferStaging>> TransferStaging::Create(const Options& options,
                                                                         Device* device) {
  const int64_t bytes = WholePages(options.capacity_bytes);
  absl::StatusOr<Buffer> region = device->Reserve(MemoryKind::kHost, bytes);
  absl::Status status = region.status();
  if (status.ok()) status = device->Commit(*region, 0, bytes);
  if (!status.ok()) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
                 absl::StrCat("no pinned memory for --transfer_staging_bytes: ", status.message()))
        .Meta("need_bytes", bytes);
  }
  return std::unique_ptr<TransferStaging>(new TransferStaging(options, *std::move(region)));
}

TransferStaging::TransferStaging(const Options& options, Buffer region)
    : region_(std::move(region)),
      capacity_bytes_(WholePages(options.capacity_bytes)),
      free_(capacity_bytes_) {
  for (int i = 0; i < options.num_threads; ++i) threads_.emplace_back([this] { RunCopier(); });
}

TransferStaging::~TransferStaging() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool TransferStaging::TryTake(Transfer* transfer) {
  const int64_t offset_bytes = free_.Take(WholePages(transfer->bytes_));
  if (offset_bytes < 0) return false;
  transfer->data_ = region_.data() + offset_bytes;
  return true;
}

bool TransferStaging::Take(Transfer* transfer, int64_t bytes) {
  SLUICE_CHECK(bytes >= 0 && bytes <= capacity_bytes_);
  transfer->bytes_ = bytes;
  if (bytes == 0) {
    transfer->data_ = region_.data();
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_.front() == nullptr && TryTake(transfer)) return true;
  waiting_.Push(transfer);
  return false;
}

void TransferStaging::Release(Transfer* transfer) {
  std::byte* const data = std::exchange(transfer->data_, nullptr);
  const int64_t bytes = std::exchange(transfer->bytes_, 0);
  if (bytes == 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.Give(data - region_.data(), WholePages(bytes));
    if (waiting_.front() == nullptr || !TryTake(waiting_.front())) return;
    do {
      granted_.Push(waiting_.Pop());
    } while (waiting_.front() != nullptr && TryTake(waiting_.front()));
  }
  wake_.notify_all();
}

void TransferStaging::Copy(Transfer* transfer, const ByteCopy& first, const ByteCopy& second) {
  transfer->copies_ = {first, second};
  // Even of nothing there is a piece, so that OnCopied follows.
  const int64_t num_pieces = std::max<int64_t>(1, NumPieces(first.bytes) + NumPieces(second.bytes));
  transfer->num_pieces_ = num_pieces;
  transfer->next_piece_ = 0;
  transfer->pieces_left_ = num_pieces;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    copying_.Push(transfer);
  }
  // The transfer may be gone by now.
  if (num_pieces > 1) {
    wake_.notify_all();
  } else {
    wake_.notify_one();
  }
}

void TransferStaging::CopyPiece(const Transfer& transfer, int64_t piece) {
  const int64_t first_pieces = NumPieces(transfer.copies_[0].bytes);
  const bool second = piece >= first_pieces;
  const ByteCopy& copy = transfer.copies_[second ? 1 : 0];
  const int64_t begin = (second ? piece - first_pieces : piece) * kPieceBytes;
  const int64_t end = std::min(begin + kPieceBytes, copy.bytes);
  if (begin < end) std::memcpy(copy.to + begin, copy.from + begin, end - begin);
}

void TransferStaging::RunCopier() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (granted_.front() != nullptr) {
      Transfer* const transfer = granted_.Pop();
      lock.unlock();
      transfer->OnMemory();
      lock.lock();
    } else if (copying_.front() != nullptr) {
      Transfer* const transfer = copying_.front();
      const int64_t piece = transfer->next_piece_++;
      if (transfer->next_piece_ == transfer->num_pieces_) copying_.Pop();
      lock.unlock();
      CopyPiece(*transfer, piece);
      lock.lock();
      if (--transfer->pieces_left_ > 0) continue;
      lock.unlock();
      transfer->OnCopied();
      lock.lock();
    } else if (stop_) {
      return;
    } else {
      wake_.wait(lock);
    }
  }
}

}  // namespace sluice
