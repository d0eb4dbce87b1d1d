#include "kernels/cuda/stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/memory.h"

namespace sluice::cuda {
namespace {

constexpr int64_t kWordPageBytes = 64 << 10;
constexpr int64_t kWordStrideBytes = 64;
constexpr int64_t kArenaBytes = 1 << 20;
constexpr int64_t kUploadAlignment = 256;
// What operations that share a MakeRoom may lose to alignment.
constexpr int64_t kAlignmentBytes = 16 * kUploadAlignment;
constexpr int64_t kErrorRounds = 512;
// Watching goes on without a pause for this long: a scheduler's next step comes sooner than that,
// and a thread that sleeps takes as long to wake as a short step takes in all.
constexpr std::chrono::microseconds kBusyWatch(500);
constexpr std::chrono::milliseconds kIdleCheck(200);

// How a thread watches: it looks without a pause at first, then ever more rarely.
class Patience {
 public:
  void Reset() { start_ = std::chrono::steady_clock::now(); }
  std::chrono::nanoseconds waited() const { return std::chrono::steady_clock::now() - start_; }
  void Pause() {
    const auto waited = std::chrono::steady_clock::now() - start_;
    if (waited < kBusyWatch) {
      for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
    } else {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(waited / 16, std::chrono::microseconds(100)));
    }
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void CheckIdleDevice() {
  if (Failed()) return;
  const cudaError_t found = cudaStreamQuery(cudaStreamPerThread);
  if (found == cudaSuccess || found == cudaErrorNotReady) return;
  Fail(ToStatus(found, "seen by cudaStreamQuery while idle"), __FILE__, __LINE__);
}

}  // namespace

// ------------------------------------------------------------------ words

absl::Status WordPool::Take(Word* word) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    absl::StatusOr<Buffer> page = ReserveMemory(MemoryKind::kHost, kWordPageBytes);
    if (!page.ok()) return page.status();
    absl::Status committed = CommitMemory(*page, 0, kWordPageBytes);
    if (!committed.ok()) return committed;
    for (int64_t at = 0; at < kWordPageBytes; at += kWordStrideBytes) {
      auto* value = reinterpret_cast<volatile uint64_t*>(page->data() + at);
      *value = 0;
      free_.push_back(value);
    }
    pages_.push_back(*std::move(page));
  }
  *word = {free_.back(), *free_.back()};
  free_.pop_back();
  return absl::OkStatus();
}

void WordPool::Give(volatile uint64_t* word) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(word);
}

// ------------------------------------------------------------------ completion threads

CompletionThreads::CompletionThreads(int num_threads) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

CompletionThreads::~CompletionThreads() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void CompletionThreads::Add(CudaStream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  // A stream at work comes back by itself.
  if (std::find(running_.begin(), running_.end(), stream) != running_.end()) return;
  if (std::find(watched_.begin(), watched_.end(), stream) != watched_.end()) return;
  watched_.push_back(stream);
  if (!watching_) wake_.notify_one();
}

void CompletionThreads::WaitUntilLeft(CudaStream* stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  left_.wait(lock,
             [&] { return std::find(running_.begin(), running_.end(), stream) == running_.end(); });
  watched_.erase(std::remove(watched_.begin(), watched_.end(), stream), watched_.end());
}

CudaStream* CompletionThreads::FindReady() {
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (!watched_[i]->FrontIsReady()) continue;
    CudaStream* stream = watched_[i];
    // The others move up, so that all have their turn.
    watched_.erase(watched_.begin() + static_cast<int64_t>(i));
    return stream;
  }
  return nullptr;
}

void CompletionThreads::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  // Whether this thread has just run tasks: more may be about to come.
  bool recent = false;
  while (true) {
    const auto wanted = [&] { return end_ || (!watching_ && (recent || !watched_.empty())); };
    if (!wake_.wait_for(lock, kIdleCheck, wanted)) {
      // Nobody calls: a GPU that fails meanwhile is to be seen all the same.
      if (watching_) continue;
      lock.unlock();
      CheckIdleDevice();
      lock.lock();
      continue;
    }
    if (end_) return;
    watching_ = true;
    CudaStream* stream = nullptr;
    Patience patience;
    bool idle = false;
    for (int64_t rounds = 1; !end_ && (stream = FindReady()) == nullptr; ++rounds) {
      // With nothing to watch it stays awake for a while: waking takes longer than most steps.
      if (watched_.empty() != idle) {
        idle = !idle;
        patience.Reset();
      }
      if (idle && patience.waited() > kBusyWatch) break;
      // Work that failed never counts as complete.
      if (!idle && rounds % kErrorRounds == 0) watched_.front()->CheckForError();
      lock.unlock();
      patience.Pause();
      lock.lock();
    }
    watching_ = false;
    recent = stream != nullptr;
    if (stream == nullptr) continue;
    running_.push_back(stream);
    if (!watched_.empty()) wake_.notify_one();
    lock.unlock();
    stream->RunTasks();
    lock.lock();
    running_.erase(std::find(running_.begin(), running_.end(), stream));
    if (stream->HasTask()) watched_.push_back(stream);
    left_.notify_all();
  }
}

// ------------------------------------------------------------------ streams

CudaStream::CudaStream(StreamPriority priority, WordPool* words, CompletionThreads* completions)
    : words_(words), completions_(completions) {
  created_ = Create(priority);
}

absl::Status CudaStream::Create(StreamPriority priority) {
  absl::Status status = words_->Take(&word_);
  if (status.ok()) status = words_->Take(&gate_);
  int least = 0;
  int greatest = 0;
  if (status.ok()) {
    status = SLUICE_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  }
  if (status.ok()) {
    status = SLUICE_CUDA_TRY(
        cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                     priority == StreamPriority::kAttention ? greatest : least));
  }
  return status;
}

CudaStream::~CudaStream() {
  Synchronize();
  completions_->WaitUntilLeft(this);
  if (stream_ != nullptr) {
    // Waits for other streams may be the last thing on it.
    SLUICE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    SLUICE_CUDA_CHECK(cudaStreamDestroy(stream_));
  }
  for (const WordPool::Word& word : {word_, gate_}) {
    if (word.value != &no_word_) words_->Give(word.value);
  }
}

StreamPosition CudaStream::Reached() const {
  if (!works()) return enqueued();
  return __atomic_load_n(word_.value, __ATOMIC_ACQUIRE) - word_.base;
}

void CudaStream::BeforeWork() {
  if (last_task_ == 0 || waits_for_task_ || Reached() >= last_task_) return;
  SLUICE_CUDA_CHECK(driver().wait_value(
      stream_, reinterpret_cast<CUdeviceptr>(const_cast<uint64_t*>(word_.value)),
      word_.base + last_task_, CU_STREAM_WAIT_VALUE_GEQ));
  waits_for_task_ = true;
}

void CudaStream::WriteWord() {
  const StreamPosition newest = enqueued_.load(std::memory_order_relaxed);
  if (written_ >= newest || !works()) return;
  SLUICE_CUDA_CHECK(driver().write_value(
      stream_, reinterpret_cast<CUdeviceptr>(const_cast<uint64_t*>(word_.value)),
      word_.base + newest, CU_STREAM_WRITE_VALUE_DEFAULT));
  written_ = newest;
}

StreamPosition CudaStream::Enqueue(HostTask* task) {
  std::lock_guard<std::mutex> lock(mutex_);
  WriteWord();
  if (waits_for_other_ && works()) {
    // The word does not tell whether the GPU has passed a wait; the gate does.
    SLUICE_CUDA_CHECK(driver().write_value(
        stream_, reinterpret_cast<CUdeviceptr>(const_cast<uint64_t*>(gate_.value)),
        gate_.base + ++num_gates_, CU_STREAM_WRITE_VALUE_DEFAULT));
    waits_for_other_ = false;
  }
  const StreamPosition position = ++enqueued_;
  written_ = position;  // by the thread that runs the task
  last_task_ = position;
  waits_for_task_ = false;
  tasks_.push_back({task, position, num_gates_});
  if (tasks_.size() == 1) SetFront();
  // With the lock: once the task has run, its owner may destroy the stream.
  completions_->Add(this);
  return position;
}

StreamPosition CudaStream::completed() const {
  const StreamPosition reached = Reached();
  if (reached < enqueued()) {
    // Nobody may have asked for the word since the newest operation.
    std::lock_guard<std::mutex> lock(mutex_);
    const_cast<CudaStream*>(this)->WriteWord();
  }
  return reached;
}

void CudaStream::WaitFor(Stream& other, StreamPosition position) {
  CudaStream& source = From(other);
  if (&source == this || source.Reached() >= position || !works()) return;
  {
    std::lock_guard<std::mutex> lock(source.mutex_);
    if (source.written_ < position) source.WriteWord();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  WriteWord();  // what came before does not wait
  SLUICE_CUDA_CHECK(driver().wait_value(
      stream_, reinterpret_cast<CUdeviceptr>(const_cast<uint64_t*>(source.word_.value)),
      source.word_.base + position, CU_STREAM_WAIT_VALUE_GEQ));
  waits_for_other_ = true;
}

void CudaStream::Synchronize() {
  StreamPosition newest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    WriteWord();
    newest = enqueued_.load(std::memory_order_relaxed);
  }
  Patience patience;
  int64_t rounds = 0;
  while (Reached() < newest) {
    patience.Pause();
    if (++rounds % kErrorRounds == 0) CheckForError();
  }
}

void CudaStream::CheckForError() {
  if (!works()) return;
  const cudaError_t found = cudaStreamQuery(stream_);
  if (found == cudaSuccess || found == cudaErrorNotReady) return;
  Fail(ToStatus(found, "seen by cudaStreamQuery"), __FILE__, __LINE__);
}

bool CudaStream::IsReady(StreamPosition needs, uint64_t gate) const {
  return Reached() >= needs && (*gate_.value - gate_.base >= gate || !works());
}

bool CudaStream::FrontIsReady() const {
  const StreamPosition needs = front_needs_.load(std::memory_order_acquire);
  return IsReady(needs, front_gate_.load(std::memory_order_relaxed));
}

void CudaStream::SetFront() {
  front_gate_.store(tasks_.empty() ? 0 : tasks_.front().gate, std::memory_order_relaxed);
  front_needs_.store(tasks_.empty() ? UINT64_MAX : tasks_.front().position - 1,
                     std::memory_order_release);
}

void CudaStream::RunTasks() {
  while (true) {
    Task front;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.empty()) return;
      front = tasks_.front();
      if (!IsReady(front.position - 1, front.gate)) return;
      tasks_.pop_front();
      SetFront();
    }
    front.task->Run();
    std::lock_guard<std::mutex> lock(mutex_);
    *word_.value = word_.base + front.position;
  }
}

absl::Status CudaStream::FindRoom(int64_t bytes) {
  const auto fits = [&](Arena& arena) { return arena.host.bytes() - arena.used_bytes >= bytes; };
  if (current_arena_ < arenas_.size() && fits(*arenas_[current_arena_])) return absl::OkStatus();
  const StreamPosition reached = Reached();
  for (size_t i = 0; i < arenas_.size(); ++i) {
    if (arenas_[i]->last_position > reached) continue;
    arenas_[i]->used_bytes = 0;
    if (!fits(*arenas_[i])) continue;
    current_arena_ = i;
    return absl::OkStatus();
  }
  // What was used up is free once the word says so: have it written.
  WriteWord();
  const int64_t arena_bytes = std::max(kArenaBytes, 2 * bytes);
  auto arena = std::make_unique<Arena>();
  for (const auto& [kind, buffer] : {std::pair{MemoryKind::kHost, &arena->host},
                                     std::pair{MemoryKind::kDevice, &arena->device}}) {
    absl::StatusOr<Buffer> reserved = ReserveMemory(kind, arena_bytes);
    absl::Status status = reserved.status();
    if (status.ok()) status = CommitMemory(*reserved, 0, arena_bytes);
    if (!status.ok()) return status;
    *buffer = *std::move(reserved);
  }
  arenas_.push_back(std::move(arena));
  current_arena_ = arenas_.size() - 1;
  return absl::OkStatus();
}

absl::Status CudaStream::MakeRoom(int64_t array_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Failed()) return Failure().status();
  if (!created_.ok()) return created_;
  return FindRoom(array_bytes + kAlignmentBytes);
}

Upload CudaStream::TakeUpload(int64_t bytes) {
  bytes = (bytes + kUploadAlignment - 1) / kUploadAlignment * kUploadAlignment;
  if (absl::Status status = FindRoom(bytes); !status.ok()) {
    Fail(status, __FILE__, __LINE__);
    no_arena_.resize(bytes);
    return {no_arena_.data(), no_arena_.data()};
  }
  Arena& arena = *arenas_[current_arena_];
  const int64_t at = arena.used_bytes;
  arena.used_bytes += bytes;
  arena.last_position = enqueued_.load(std::memory_order_relaxed) + 1;
  return {arena.host.data() + at, arena.device.data() + at};
}

}  // namespace sluice::cuda
