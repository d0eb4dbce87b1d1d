#include "server/session/session_impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/ops/check.h"
#include "kernels/ops/projection.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

constexpr absl::Duration kQueueRetry = absl::Milliseconds(20);
// What other calls and sessions give back is there for the next.
constexpr absl::Duration kMemoryRetry = absl::Milliseconds(100);

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "DTYPE_BF16";
    case DType::kFp16:
      return "DTYPE_FP16";
    case DType::kF32:
      return "DTYPE_F32";
  }
  return "?";
}

}  // namespace

// Calls.

Call::Call() : internal_(std::make_unique<Internal>(this)) {}
Call::~Call() = default;

void Call::Internal::Run() {
  call->status_ = CheckDevice(*session->device_);
  if (call->status_.ok()) call->Collect(*session);
  session->OnCallComplete(call);
}

// Life.

absl::StatusOr<std::shared_ptr<SessionImpl>> SessionImpl::Create(Options options, Device* device,
                                                                 BlockTable::Stores stores,
                                                                 TransferStaging* staging) {
  std::shared_ptr<SessionImpl> session(
      new SessionImpl(std::move(options), device, stores, staging));
  SLUICE_RETURN_IF_ERROR(session->Init());
  return session;
}

SessionImpl::SessionImpl(Options options, Device* device, BlockTable::Stores stores,
                         TransferStaging* staging)
    : layout_(SlotLayout(options.spec.kv_dtype, static_cast<int32_t>(options.spec.num_kv_heads),
                         static_cast<int32_t>(options.spec.head_dim),
                         static_cast<int32_t>(options.spec.block_tokens))),
      slot_bytes_(SlotBytes(options.spec.kv_dtype, options.spec.num_kv_heads, options.spec.head_dim,
                            options.spec.block_tokens)),
      row_bytes_(options.spec.num_kv_heads * options.spec.block_tokens * options.spec.rank * 2),
      device_(device),
      ops_(device->ops()),
      stores_(stores),
      staging_(staging),
      now_(std::move(options.now)),
      on_drained_(std::move(options.on_drained)),
      max_queued_calls_(options.max_queued_calls),
      max_tile_runs_(options.max_tile_runs),
      create_time_(now_()),
      reservation_(std::move(options.reservation)),
      spec_(std::move(options.spec)),
      epoch_(options.epoch),
      last_heard_(create_time_) {}

absl::Status SessionImpl::Init() {
  attention_stream_ = device_->CreateStream(StreamPriority::kAttention);
  ingest_stream_ = device_->CreateStream(StreamPriority::kCopy);
  fetch_stream_ = device_->CreateStream(StreamPriority::kCopy);
  const auto no_memory = [this](const absl::Status& status) -> absl::Status {
    return NoMemory(status, Reason::kDeviceMemory);
  };
  for (Stream* stream : {attention_stream_.get(), ingest_stream_.get(), fetch_stream_.get()}) {
    // A stream for which there was no memory says so here.
    SLUICE_RETURN_IF_ERROR(MakeRoom(*stream, 1));
  }
  auto rows = RowPool::Create(reservation_.total_rows, row_bytes_, device_);
  if (!rows.ok()) return no_memory(rows.status());
  rows_ = std::make_unique<RowPool>(*std::move(rows));
  blocks_ = std::make_unique<BlockTable>(
      BlockTable::Options{spec_.num_layers, spec_.max_blocks, slot_bytes_, spec_.host_budget_bytes,
                          spec_.hbm_budget_bytes},
      stores_, rows_.get(), std::vector<Stream*>{attention_stream_.get(), fetch_stream_.get()});
  sequences_.resize(spec_.max_sequences);
  sequence_marks_.resize(spec_.max_sequences);
  waiting_marks_.resize(spec_.max_sequences);
  block_marks_ = LazyArray<uint64_t>(spec_.max_blocks);
  block_writers_ = LazyArray<uint32_t>(spec_.max_blocks);
  if (!blocks_->valid() || !block_marks_.valid() || !block_writers_.valid()) {
    return no_memory(absl::ResourceExhaustedError("no address space for the block table"));
  }
  const auto reserve = [&](MemoryKind kind, int64_t bytes, Buffer* buffer) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    auto reserved = device_->Reserve(kind, bytes);
    if (!reserved.ok()) return no_memory(reserved.status());
    *buffer = *std::move(reserved);
    const absl::Status committed = device_->Commit(*buffer, 0, bytes);
    return committed.ok() ? committed : no_memory(committed);
  };
  SLUICE_RETURN_IF_ERROR(reserve(MemoryKind::kDevice, reservation_.projection_bytes, &projection_));
  SLUICE_RETURN_IF_ERROR(
      reserve(MemoryKind::kDevice, reservation_.split_workspace_bytes, &split_workspace_));
  SLUICE_RETURN_IF_ERROR(
      reserve(MemoryKind::kDevice, reservation_.score_workspace_bytes, &score_workspace_));
  // P is written on the host and travels in stream order, ahead of whatever will read it.
  SLUICE_RETURN_IF_ERROR(
      reserve(MemoryKind::kHost, reservation_.projection_bytes, &projection_upload_));
  FillGaussianProjection(spec_.projection_seed, static_cast<int>(spec_.head_dim),
                         static_cast<int>(spec_.rank),
                         reinterpret_cast<uint16_t*>(projection_upload_.data()));
  projection_copy_ = {projection_.data(), projection_upload_.data(), reservation_.projection_bytes};
  const StreamPosition uploaded = ops_.CopyBytes({&projection_copy_, 1}, *attention_stream_);
  ingest_stream_->WaitFor(*attention_stream_, uploaded);
  return absl::OkStatus();
}

SessionImpl::~SessionImpl() {
  // Teardown or a failed Init came first; nothing is in flight.
}

absl::Status SessionImpl::CheckHandle(uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(CheckAlive());
  if (epoch != epoch_) {
    return Error(absl::StatusCode::kAborted, Reason::kFenced,
                 absl::StrCat("the handle of session '", spec_.name, "' has epoch ", epoch,
                              "; the session has epoch ", epoch_,
                              ": it was opened again since, or the handle is of another daemon"))
        .Meta("epoch", epoch)
        .Meta("current_epoch", epoch_);
  }
  if (life_ == Life::kClosing) {
    return SessionClosing(spec_.name);
  }
  if (life_ == Life::kDetached) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kSessionDetached,
                 absl::StrCat("session '", spec_.name,
                              "' is detached: its lease ran out or it was closed with KEEP_DATA; "
                              "OpenSession attaches to it again"));
  }
  last_heard_ = now_();
  return absl::OkStatus();
}

void SessionImpl::EnterStream() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++open_streams_;
}

void SessionImpl::LeaveStream() {
  std::lock_guard<std::mutex> lock(mutex_);
  --open_streams_;
  last_heard_ = now_();
}

absl::Time SessionImpl::LeaseExpiry() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_heard_ + spec_.lease;
}

uint64_t SessionImpl::epoch() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return epoch_;
}

SessionInfo SessionImpl::Info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  SessionInfo info;
  info.name = spec_.name;
  info.epoch = epoch_;
  info.spec = spec_;
  info.attached = life_ == Life::kAttached;
  info.create_time = create_time_;
  info.expire_time = info.attached ? last_heard_ + spec_.lease : detach_time_ + spec_.retention;
  info.num_sequences = num_sequences_;
  if (life_ == Life::kGone) return info;
  blocks_->Reclaim();
  info.num_blocks = blocks_->num_stored();
  info.num_predicted_blocks = blocks_->num_predicted();
  info.memory = reservation_.items;
  for (MemoryItem& item : info.memory) {
    if (item.name == "a_g") {
      item.used_bytes = std::min(item.reserved_bytes, rows_->used_rows() * row_bytes_);
    } else if (item.name == "a_g_replacement") {
      item.used_bytes =
          std::max<int64_t>(0, rows_->used_rows() * row_bytes_ - reservation_.a_g_bytes);
    } else if (item.name == "running_state") {
      item.used_bytes =
          run_rows_ * (item.reserved_bytes / std::max<int64_t>(1, reservation_.run_rows));
    }
  }
  const auto add_blocks = [&](absl::string_view tier, const SlotStore* store, int64_t budget_bytes,
                              int64_t num_slots) {
    if (store == nullptr) return;
    info.memory.push_back({absl::StrCat("blocks.", tier),
                           budget_bytes > 0 ? budget_bytes : store->budget_bytes(),
                           num_slots * blocks_->stride_bytes(),
                           absl::StrCat("blocks ", num_slots, " x (slot ", slot_bytes_,
                                        " bytes, rounded up to ", blocks_->stride_bytes(), ")")});
  };
  const int64_t num_hbm_slots = blocks_->num_hbm_slots();
  add_blocks("hbm", stores_.hbm, spec_.hbm_budget_bytes, num_hbm_slots);
  add_blocks("host", stores_.host, spec_.host_budget_bytes, blocks_->num_slots() - num_hbm_slots);
  return info;
}

absl::Status SessionImpl::CheckSameSession(const SessionSpec& other) const {
  const auto differ = [&](absl::string_view field, const auto& ours,
                          const auto& theirs) -> absl::Status {
    if (ours == theirs) return absl::OkStatus();
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kSessionMismatch,
                 absl::StrCat("session '", spec_.name, "' exists with ", field, " ", ours, ", not ",
                              theirs, "; close it or take another name"))
        .Meta("field", absl::StrCat("spec.", field))
        .Meta("value", theirs)
        .Meta("allowed", ours);
  };
  SLUICE_RETURN_IF_ERROR(differ("num_layers", spec_.num_layers, other.num_layers));
  SLUICE_RETURN_IF_ERROR(differ("num_query_heads", spec_.num_query_heads, other.num_query_heads));
  SLUICE_RETURN_IF_ERROR(differ("num_kv_heads", spec_.num_kv_heads, other.num_kv_heads));
  SLUICE_RETURN_IF_ERROR(differ("head_dim", spec_.head_dim, other.head_dim));
  SLUICE_RETURN_IF_ERROR(differ("block_tokens", spec_.block_tokens, other.block_tokens));
  SLUICE_RETURN_IF_ERROR(differ("kv_dtype", DTypeName(spec_.kv_dtype), DTypeName(other.kv_dtype)));
  SLUICE_RETURN_IF_ERROR(differ("rank", spec_.rank, other.rank));
  SLUICE_RETURN_IF_ERROR(differ("projection_seed", spec_.projection_seed, other.projection_seed));
  SLUICE_RETURN_IF_ERROR(differ("max_blocks", spec_.max_blocks, other.max_blocks));
  SLUICE_RETURN_IF_ERROR(differ("max_sequences", spec_.max_sequences, other.max_sequences));
  SLUICE_RETURN_IF_ERROR(differ("tile_blocks", spec_.tile_blocks, other.tile_blocks));
  if (spec_.model_fingerprint != other.model_fingerprint) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kSessionMismatch,
                 absl::StrCat("session '", spec_.name, "' exists with another model_fingerprint"))
        .Meta("field", "spec.model_fingerprint");
  }
  return absl::OkStatus();
}

void SessionImpl::Attach(const SessionSpec& spec, uint64_t epoch) {
  std::lock_guard<std::mutex> lock(mutex_);
  life_ = Life::kAttached;
  epoch_ = epoch;
  last_heard_ = now_();
  spec_.lease = spec.lease;
  spec_.retention = spec.retention;
  spec_.host_budget_bytes = spec.host_budget_bytes;
  spec_.hbm_budget_bytes = spec.hbm_budget_bytes;
  blocks_->SetBudgets(spec.host_budget_bytes, spec.hbm_budget_bytes);
}

bool SessionImpl::Expire(absl::Time now) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (life_ == Life::kGone || life_ == Life::kClosing) return false;
  ExpireRuns(now);
  // What was dropped while the last call was on its way out would otherwise wait for the next call.
  blocks_->Reclaim();
  const bool busy = open_streams_ > 0 || !Idle();
  if (life_ == Life::kAttached && !busy && now >= last_heard_ + spec_.lease) {
    life_ = Life::kDetached;
    detach_time_ = last_heard_ + spec_.lease;
  }
  return life_ == Life::kDetached && !busy && now >= detach_time_ + spec_.retention;
}

absl::Status SessionImpl::BeginClose() {
  std::function<void()> drained;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life_ == Life::kClosing || life_ == Life::kGone) {
      return SessionClosing(spec_.name);
    }
    life_ = Life::kClosing;
    drained_told_ = false;
    drained = TakeDrained();
  }
  if (drained) drained();
  return absl::OkStatus();
}

void SessionImpl::EndCloseKeeping() {
  std::lock_guard<std::mutex> lock(mutex_);
  life_ = Life::kDetached;
  detach_time_ = now_();
}

int64_t SessionImpl::Teardown() {
  // Streams are waited for without the lock: the last task of a stream may still be on its way out
  // of it.
  attention_stream_->Synchronize();
  ingest_stream_->Synchronize();
  fetch_stream_->Synchronize();
  std::lock_guard<std::mutex> lock(mutex_);
  life_ = Life::kGone;
  const int64_t freed_bytes = blocks_->num_slots() * blocks_->stride_bytes();
  runs_.clear();
  run_rows_ = 0;
  sequences_.clear();
  num_sequences_ = 0;
  blocks_.reset();
  rows_.reset();
  split_workspace_.Reset();
  score_workspace_.Reset();
  projection_.Reset();
  projection_upload_.Reset();
  block_marks_ = LazyArray<uint64_t>();
  block_writers_ = LazyArray<uint32_t>();
  return freed_bytes;
}

// The queue.

bool SessionImpl::Idle() const {
  return num_queued_ == 0 && num_started_ == 0 && num_transfers_ == 0;
}

void SessionImpl::WaitUntilIdle() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return Idle(); });
}

std::function<void()> SessionImpl::TakeDrained() {
  if (!Idle()) return nullptr;
  idle_.notify_all();
  if (life_ != Life::kClosing || drained_told_) return nullptr;
  drained_told_ = true;
  return on_drained_;
}

absl::Status SessionImpl::CheckAlive() const {
  if (life_ != Life::kGone) return absl::OkStatus();
  return SessionNotFound(spec_.name);
}

absl::Status SessionImpl::AdmitChange() const {
  SLUICE_RETURN_IF_ERROR(CheckAlive());
  if (life_ == Life::kClosing) {
    return SessionClosing(spec_.name);
  }
  return CheckDevice(*device_);
}

absl::Status SessionImpl::Admit() const {
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  const int64_t num_calls = num_queued_ + num_started_ + num_transfers_;
  if (num_calls >= max_queued_calls_) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kQueueFull,
                 absl::StrCat("session '", spec_.name, "' has ", num_calls,
                              " calls waiting or running; --max_queued_calls_per_session is ",
                              max_queued_calls_))
        .Meta("value", num_calls)
        .Meta("allowed", max_queued_calls_)
        .Retry(kQueueRetry);
  }
  return absl::OkStatus();
}

absl::Status SessionImpl::NoMemory(const absl::Status& status, Reason reason) const {
  SLUICE_RETURN_IF_ERROR(CheckDevice(*device_));
  return Error(
             absl::StatusCode::kResourceExhausted, reason,
             absl::StrCat("within the budgets, but the machine gave no memory: ", status.message()))
      .Retry(kMemoryRetry);
}

absl::Status SessionImpl::MakeRoom(Stream& stream, int64_t array_bytes) {
  const absl::Status status = stream.MakeRoom(array_bytes);
  return status.ok() ? status : NoMemory(status, Reason::kDeviceMemory);
}

absl::Status SessionImpl::CommitStaging(Staging& staging, int64_t array_bytes) {
  const absl::Status status = staging.Commit(*device_);
  if (!status.ok()) return NoMemory(status, Reason::kHostMemory);
  return MakeRoom(*attention_stream_, array_bytes);
}

void SessionImpl::Submit(Call* call) {
  Call* ended = nullptr;
  Call::Internal& internal = *call->internal_;
  internal.session = this;
  internal.next = nullptr;
  // A Cancel that came too late for the call before must not reach this one.
  call->cancelled_.store(false, std::memory_order_relaxed);
  internal.submit_time = absl::Now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call->status_ = Admit();
    if (!call->status_.ok()) {
      ended = call;
    } else {
      (queue_tail_ == nullptr ? queue_head_ : queue_tail_->internal_->next) = call;
      queue_tail_ = call;
      ++num_queued_;
      Pump(&ended);
    }
  }
  RunDone(ended);
}

void SessionImpl::Pump(Call** ended) {
  Call** tail = ended;
  while (*tail != nullptr) tail = &(*tail)->internal_->next;
  bool some_wait = false;  // for an offload; what they mark stays as it is
  Call* previous = nullptr;
  for (Call* call = queue_head_; call != nullptr && num_started_ < kMaxStartedCalls;) {
    Call::Internal& internal = *call->internal_;
    const absl::Time now = absl::Now();
    absl::Status status;
    if (call->cancelled_.load(std::memory_order_relaxed)) {
      status =
          Error(absl::StatusCode::kCancelled, Reason::kCancelled, "cancelled before it started");
    } else if (now > call->deadline) {
      status = Error(absl::StatusCode::kDeadlineExceeded, Reason::kDeadlineExceeded,
                     "the deadline passed before the call started");
    } else {
      bool waits = some_wait && !call->MayPass(*this);
      if (!waits) {
        internal.start_time = now;
        status = CheckDevice(*device_);
        if (status.ok()) status = call->Start(*this);
        waits = status == WaitForOffload();
      }
      if (waits) {
        // An offload is filling a block that this call, or one before it, writes; it pumps again
        // when it is done.
        if (!std::exchange(some_wait, true)) waiting_stamp_ = next_stamp_++;
        if (!call->LetsPass(*this)) return;
        previous = std::exchange(call, internal.next);
        continue;
      }
    }
    Call* const next = std::exchange(internal.next, nullptr);
    (previous == nullptr ? queue_head_ : previous->internal_->next) = next;
    if (next == nullptr) queue_tail_ = previous;
    --num_queued_;
    call->status_ = std::move(status);
    if (call->status_.ok()) {
      ++num_started_;
      attention_stream_->Enqueue(&internal);
    } else {
      *tail = call;
      tail = &internal.next;
    }
    call = next;
  }
}

void SessionImpl::RunDone(Call* ended) {
  while (ended != nullptr) {
    // Done may use the call again or free it.
    Call* next = std::exchange(ended->internal_->next, nullptr);
    ended->cancelled_.store(false, std::memory_order_relaxed);
    ended->Done();
    ended = next;
  }
}

void SessionImpl::OnCallComplete(Call* call) {
  Call* ended = nullptr;
  std::function<void()> drained;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --num_started_;
    last_heard_ = now_();
    blocks_->Reclaim();
    Pump(&ended);
    drained = TakeDrained();
  }
  call->cancelled_.store(false, std::memory_order_relaxed);
  call->Done();
  RunDone(ended);
  if (drained) drained();
}

// Checks that several calls share.

absl::Status BlockNotFound(uint32_t layer, uint32_t block_id) {
  return Error(absl::StatusCode::kNotFound, Reason::kBlockNotFound,
               absl::StrCat("layer ", layer, " has no block ", block_id))
      .Meta("layer", layer)
      .Meta("block_id", block_id)
      .Resource("block", absl::StrCat(layer, "/", block_id));
}

absl::Status CheckTensor(const TensorView& view, absl::string_view field, DType dtype,
                         absl::Span<const int64_t> dims) {
  if (!view.given()) {
    return InvalidField(field, "not given",
                        absl::StrCat("a tensor of shape [", absl::StrJoin(dims, ", "), "]"));
  }
  if (!view.dtype_known || view.dtype != dtype) {
    return InvalidField(absl::StrCat(field, ".dtype"),
                        view.dtype_known ? DTypeName(view.dtype) : "not a known dtype",
                        DTypeName(dtype));
  }
  if (!view.shape.empty() && view.shape != dims) {
    return InvalidField(absl::StrCat(field, ".shape"),
                        absl::StrCat("[", absl::StrJoin(view.shape, ", "), "]"),
                        absl::StrCat("[", absl::StrJoin(dims, ", "), "]"));
  }
  int64_t bytes = DTypeBytes(dtype);
  for (const int64_t dim : dims) bytes *= dim;
  if (view.bytes != bytes) {
    return InvalidField(absl::StrCat(field, ".data"), absl::StrCat(view.bytes, " bytes"),
                        absl::StrCat(bytes, " bytes, for shape [", absl::StrJoin(dims, ", "), "]"));
  }
  return absl::OkStatus();
}

absl::Status BlockShared(uint32_t layer, uint32_t block_id) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kBlockShared,
               absl::StrCat("block ", block_id,
                            " is in the tables of several sequences and may not be written"))
      .Meta("layer", layer)
      .Meta("block_id", block_id);
}

absl::Status SessionImpl::CheckLayer(int64_t layer, absl::string_view field) const {
  if (layer < spec_.num_layers) return absl::OkStatus();
  return InvalidField(field, layer, absl::StrCat("0..", spec_.num_layers - 1));
}

absl::Status SessionImpl::CheckBlockId(uint32_t block_id, absl::string_view field) const {
  if (block_id < spec_.max_blocks) return absl::OkStatus();
  return InvalidField(field, block_id, absl::StrCat("0..", spec_.max_blocks - 1));
}

absl::Status SessionImpl::CheckOutDtype(DType dtype) const {
  if (dtype == spec_.kv_dtype || dtype == DType::kF32) return absl::OkStatus();
  return InvalidField("output.dtype", DTypeName(dtype),
                      absl::StrCat(DTypeName(spec_.kv_dtype), " or DTYPE_F32"));
}

absl::Status SessionImpl::CheckAttention(const AttentionSpec& attention,
                                         AttendOptions* options) const {
  options->scale =
      attention.has_scale ? attention.scale : 1.0f / std::sqrt(static_cast<float>(spec_.head_dim));
  if (!std::isfinite(options->scale)) {
    return InvalidField("options.scale", attention.scale, "a finite number");
  }
  if (!std::isfinite(attention.logit_softcap) || attention.logit_softcap < 0) {
    return InvalidField("options.logit_softcap", attention.logit_softcap,
                        "0 (none) or a finite positive number");
  }
  if (attention.window_tokens < 0) {
    return InvalidField("options.window_tokens", attention.window_tokens, "0 (none) or more");
  }
  if (attention.sink_tokens < 0) {
    return InvalidField("options.sink_tokens", attention.sink_tokens, "0 or more");
  }
  if (!attention.sink_logits.empty() &&
      std::ssize(attention.sink_logits) != spec_.num_query_heads) {
    return InvalidField("options.sink_logits",
                        absl::StrCat(attention.sink_logits.size(), " values"),
                        absl::StrCat("none, or num_query_heads (", spec_.num_query_heads, ")"));
  }
  for (const float sink : attention.sink_logits) {
    // -infinity is a sink that takes nothing.
    if (std::isnan(sink) || sink == std::numeric_limits<float>::infinity()) {
      return InvalidField("options.sink_logits", sink, "numbers below +infinity");
    }
  }
  options->logit_softcap = attention.logit_softcap;
  options->window_tokens = attention.window_tokens;
  options->sink_tokens = attention.sink_tokens;
  return absl::OkStatus();
}

int64_t SessionImpl::AttendArrayBytes(int64_t context_tokens, int64_t query_tokens) const {
  // The smallest units of any device, and what each is told: kernels/cuda/attend_args.h.
  constexpr int64_t kUnitTokens = 128;
  constexpr int64_t kUnitRows = 8;
  constexpr int64_t kUnitBytes = 64;
  // Teams of blocks of threads and counters of kv heads.
  constexpr int64_t kTeamsBytes = 4096;
  const int64_t rows = query_tokens * spec_.num_query_heads / spec_.num_kv_heads;
  const int64_t num_units = (context_tokens / kUnitTokens + 1) * (rows / kUnitRows + 1);
  return kTeamsBytes + num_units * kUnitBytes + 2 * static_cast<int64_t>(sizeof(AttendSequence)) +
         (context_tokens / spec_.block_tokens + 1) * static_cast<int64_t>(sizeof(std::byte*));
}

void SessionImpl::LaunchAttend(AttendParams params, std::vector<AttendSequence>* pieces) {
  params.workspace = split_workspace_.data();
  const int64_t room_bytes = split_workspace_.bytes();
  if (ops_.AttendWorkspaceBytes(params) <= room_bytes) {
    ops_.Attend(params, *attention_stream_);
    return;
  }
  // Pieces share the workspace one after the other. Bits depend neither on how a batch is cut nor
  // on query_tokens, so every query token may be a sequence of its own; one of them always fits.
  pieces->clear();
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    AttendSequence piece = params.sequences[i];
    const int32_t query_tokens = std::exchange(piece.query_tokens, 1);
    for (int32_t t = 0; t < query_tokens; ++t) {
      pieces->push_back(piece);
      pieces->back().first_row += t;
      if (piece.causal) pieces->back().context_tokens -= query_tokens - 1 - t;
    }
  }
  const AttendSequence* const end = pieces->data() + pieces->size();
  // Batches grow in steps that double and halve: reckoning the workspace of a batch takes as long
  // as the batch is.
  for (params.sequences = pieces->data(); params.sequences != end;
       params.sequences += params.num_sequences) {
    const int64_t most = end - params.sequences;
    int64_t fits = 1;
    for (int64_t step = 1; step > 0;) {
      params.num_sequences = fits + step;
      if (params.num_sequences <= most && ops_.AttendWorkspaceBytes(params) <= room_bytes) {
        fits = params.num_sequences;
        step *= 2;
      } else {
        step /= 2;
      }
    }
    params.num_sequences = fits;
    // What would not fit would write into the memory of others.
    SLUICE_CHECK(fits > 1 || ops_.AttendWorkspaceBytes(params) <= room_bytes);
    ops_.Attend(params, *attention_stream_);
  }
}

absl::Status CheckDevice(const Device& device) {
  absl::Status status = device.status();
  if (status.ok()) return status;
  return Error(absl::StatusCode::kUnavailable, Reason::kDeviceFailed,
               absl::StrCat("the device failed, and the daemon ends: ", status.message()));
}

Error SessionNotFound(absl::string_view name) {
  return Error(absl::StatusCode::kNotFound, Reason::kSessionNotFound,
               absl::StrCat("no session '", name, "'"))
      .Resource("session", name);
}

Error SessionClosing(absl::string_view name) {
  return Error(absl::StatusCode::kFailedPrecondition, Reason::kSessionClosing,
               absl::StrCat("session '", name, "' is being closed"));
}

}  // namespace sluice
