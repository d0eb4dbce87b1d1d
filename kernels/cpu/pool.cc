#include "kernels/cpu/pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "kernels/ops/check.h"

namespace sluice {
namespace {

constexpr std::chrono::microseconds kLookOut(5);

struct HostTaskOp {
  HostTask* task;
  static constexpr int kPhases = 1;
  PhaseSize Start(int, int) { return {1, 1}; }
  void Run(int, int64_t, int64_t, WorkerScratch&) { task->Run(); }
};

}  // namespace

CpuStream::CpuStream(CpuPool* pool, StreamPriority priority) : pool_(pool), priority_(priority) {
  // A decode step of one layer is four operations.
  for (int i = 0; i < 4; ++i) {
    all_nodes_.push_back(std::make_unique<Node>());
    all_nodes_.back()->next = free_nodes_;
    free_nodes_ = all_nodes_.back().get();
  }
}

CpuStream::~CpuStream() {
  std::unique_lock<std::mutex> lock(pool_->mutex_);
  ++pool_->done_waiters_;
  pool_->done_.wait(lock, [this] { return head_ == nullptr && workers_ == 0; });
  --pool_->done_waiters_;
}

CpuStream::Node* CpuStream::TakeNodeLocked() {
  if (free_nodes_ == nullptr) {
    all_nodes_.push_back(std::make_unique<Node>());
    free_nodes_ = all_nodes_.back().get();
  }
  Node* node = free_nodes_;
  free_nodes_ = node->next;
  node->next = nullptr;
  return node;
}

void CpuStream::AppendLocked(Node* node) {
  if (tail_ == nullptr) {
    head_ = node;
  } else {
    tail_->next = node;
  }
  tail_ = node;
}

void CpuStream::PopLocked() {
  Node* node = head_;
  head_ = node->next;
  if (head_ == nullptr) tail_ = nullptr;
  node->next = free_nodes_;
  free_nodes_ = node;
}

StreamPosition CpuStream::SubmitBytes(const OpKind* kind, const void* op, size_t bytes) {
  std::lock_guard<std::mutex> lock(pool_->mutex_);
  Node* node = TakeNodeLocked();
  node->kind = kind;
  std::memcpy(node->op, op, bytes);
  AppendLocked(node);
  const StreamPosition position = enqueued_.load(std::memory_order_relaxed) + 1;
  enqueued_.store(position, std::memory_order_release);
  // A stream that a worker holds is looked at again when that worker is done with its operation.
  if (head_ == node && workers_ == 0) {
    pool_->ListLocked(this);
    pool_->WakeLocked(1);
  }
  return position;
}

StreamPosition CpuStream::Enqueue(HostTask* task) { return Submit(HostTaskOp{task}); }

void CpuStream::WaitFor(Stream& other_stream, StreamPosition position) {
  CpuStream& other = From(other_stream);
  SLUICE_CHECK(other.pool_ == pool_ && position <= other.enqueued());
  if (&other == this) return;
  std::lock_guard<std::mutex> lock(pool_->mutex_);
  if (other.completed() >= position) return;
  Node* node = TakeNodeLocked();
  node->kind = nullptr;
  node->satisfied = false;
  node->waiting_stream = this;
  node->wait_position = position;
  node->next_waiter = other.waiters_;
  other.waiters_ = node;
  AppendLocked(node);
}

void CpuStream::Synchronize() {
  std::unique_lock<std::mutex> lock(pool_->mutex_);
  const StreamPosition position = enqueued();
  ++pool_->done_waiters_;
  pool_->done_.wait(lock, [&] { return completed() >= position; });
  --pool_->done_waiters_;
}

CpuPool::CpuPool(int num_threads) {
  for (int i = 0; i < num_threads; ++i) {
    // Touched here, so that no operation pays for its pages.
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, kScratchBytes));
    SLUICE_CHECK(memory != nullptr);
    std::memset(memory, 0, kScratchBytes);
    scratch_.push_back(memory);
  }
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this, i] { WorkerLoop(i); });
}

CpuPool::~CpuPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  for (std::byte* memory : scratch_) std::free(memory);
}

void CpuPool::WorkerLoop(int worker) {
  WorkerScratch scratch{scratch_[worker]};
  std::unique_lock<std::mutex> lock(mutex_);
  bool looked_out = true;
  for (;;) {
    CpuStream* stream = TakeLocked();
    if (stream != nullptr) {
      // Nobody was woken for work that came while a worker was looking out: it can take one stream.
      if (lists_[0].first != nullptr || lists_[1].first != nullptr) WakeLocked(1);
      RunStream(stream, lock, scratch);
      looked_out = false;
    } else if (stopping_) {
      return;
    } else if (!looked_out && !looking_out_) {
      looking_out_ = true;
      lock.unlock();
      LookOut();
      lock.lock();
      looking_out_ = false;
      looked_out = true;
    } else {
      ++idle_;
      work_.wait(lock);
      --idle_;
    }
  }
}

void CpuPool::LookOut() const {
  const auto until = std::chrono::steady_clock::now() + kLookOut;
  while (lists_[0].count.load(std::memory_order_relaxed) == 0 &&
         lists_[1].count.load(std::memory_order_relaxed) == 0 &&
         std::chrono::steady_clock::now() < until) {
  }
}

CpuStream* CpuPool::TakeLocked() {
  for (List& list : lists_) {
    if (list.first != nullptr) {
      CpuStream* stream = list.first;
      UnlistLocked(stream);
      return stream;
    }
  }
  return nullptr;
}

void CpuPool::ListLocked(CpuStream* stream) {
  if (stream->listed_) return;
  List& list = lists_[static_cast<int>(stream->priority_)];
  stream->listed_ = true;
  stream->list_next_ = nullptr;
  stream->list_previous_ = list.last;
  (list.last != nullptr ? list.last->list_next_ : list.first) = stream;
  list.last = stream;
  list.count.fetch_add(1, std::memory_order_relaxed);
}

void CpuPool::UnlistLocked(CpuStream* stream) {
  if (!stream->listed_) return;
  List& list = lists_[static_cast<int>(stream->priority_)];
  CpuStream* previous = stream->list_previous_;
  CpuStream* next = stream->list_next_;
  (previous != nullptr ? previous->list_next_ : list.first) = next;
  (next != nullptr ? next->list_previous_ : list.last) = previous;
  stream->listed_ = false;
  list.count.fetch_sub(1, std::memory_order_relaxed);
}

void CpuPool::WakeLocked(int64_t wanted) {
  if (looking_out_) --wanted;
  for (int64_t i = std::min<int64_t>(wanted, idle_); i > 0; --i) work_.notify_one();
}

// Whether streams that come before or beside one of `priority` wait, `own` of them being itself.
bool CpuPool::ShouldGiveWay(StreamPriority priority, int own) const {
  const int attention = lists_[0].count.load(std::memory_order_relaxed);
  if (priority == StreamPriority::kAttention) return attention > own;
  return attention > 0 || lists_[1].count.load(std::memory_order_relaxed) > own;
}

void CpuPool::RunStream(CpuStream* stream, std::unique_lock<std::mutex>& lock,
                        WorkerScratch& scratch) {
  ++stream->workers_;
  for (;;) {
    if (!stream->phase_active_ && !StartPhase(stream, lock)) {
      CompleteOpLocked(stream);
      if (!ReadyLocked(stream)) break;
      if (ShouldGiveWay(stream->priority_, 0)) {
        ListLocked(stream);
        break;
      }
      continue;
    }
    ++stream->participants_;
    const int64_t next = stream->next_unit_.load(std::memory_order_relaxed);
    const int64_t left = stream->units_ - next;
    if (left > stream->units_per_claim_) {
      ListLocked(stream);
      WakeLocked((left - 1) / stream->units_per_claim_);
    }
    lock.unlock();
    RunClaims(stream, scratch);
    lock.lock();
    --stream->participants_;
    if (stream->next_unit_.load(std::memory_order_relaxed) < stream->units_) {
      // Given way: somebody has to come back for the rest, after those that wait already.
      UnlistLocked(stream);
      ListLocked(stream);
      break;
    }
    UnlistLocked(stream);
    if (stream->participants_ > 0) break;
    stream->phase_active_ = false;
    ++stream->phase_;
  }
  --stream->workers_;
  if (done_waiters_ > 0) done_.notify_all();
}

bool CpuPool::StartPhase(CpuStream* stream, std::unique_lock<std::mutex>& lock) {
  CpuStream::Node* node = stream->head_;
  const OpKind* kind = node->kind;
  const int workers = num_threads();
  PhaseSize size;
  lock.unlock();
  while (size.units == 0 && stream->phase_ < kind->phases) {
    size = kind->start(node->op, stream->phase_, workers);
    if (size.units == 0) ++stream->phase_;
  }
  lock.lock();
  if (size.units == 0) return false;
  stream->units_ = size.units;
  stream->units_per_claim_ = size.units_per_claim;
  stream->next_unit_.store(0, std::memory_order_relaxed);
  stream->phase_active_ = true;
  return true;
}

void CpuPool::RunClaims(CpuStream* stream, WorkerScratch& scratch) {
  // Stable while this worker takes part: the node leaves the queue only after the last participant.
  CpuStream::Node* node = stream->head_;
  const int64_t units = stream->units_;
  const int64_t per_claim = stream->units_per_claim_;
  do {
    const int64_t begin = stream->next_unit_.fetch_add(per_claim, std::memory_order_relaxed);
    if (begin >= units) return;
    const int64_t end = std::min(begin + per_claim, units);
    node->kind->run(node->op, stream->phase_, begin, end, scratch);
  } while (!ShouldGiveWay(stream->priority_, 1));
}

void CpuPool::CompleteOpLocked(CpuStream* stream) {
  stream->PopLocked();
  stream->phase_ = 0;
  const StreamPosition completed = stream->completed_.load(std::memory_order_relaxed) + 1;
  stream->completed_.store(completed, std::memory_order_release);
  if (done_waiters_ > 0) done_.notify_all();
  for (CpuStream::Node** link = &stream->waiters_; *link != nullptr;) {
    CpuStream::Node* waiter = *link;
    if (waiter->wait_position > completed) {
      link = &waiter->next_waiter;
      continue;
    }
    *link = waiter->next_waiter;
    waiter->satisfied = true;
    CpuStream* waiting = waiter->waiting_stream;
    if (waiting->workers_ == 0 && ReadyLocked(waiting)) {
      ListLocked(waiting);
      WakeLocked(1);
    }
  }
}

bool CpuPool::ReadyLocked(CpuStream* stream) {
  while (stream->head_ != nullptr && stream->head_->kind == nullptr) {
    if (!stream->head_->satisfied) return false;
    stream->PopLocked();
  }
  return stream->head_ != nullptr;
}

}  // namespace sluice
