// Offloads and fetches: blocks in and out beside the attention stream.
//
// An offload fills slots that nobody sees yet and then becomes visible at one point, in
// CommitOffload. A block that a table has reserved lends its slot to the offload (num_fillers), so
// that reserved memory is enough; a decode step that would write such a block waits in the queue
// until the offload is done. A fetch copies on the fetch stream: it waits there for appends that
// were enqueued before it, and later appends into the same block wait for it.
//
// Where the device cannot address a message's memory (staging_), K and V of an offload are copied
// into pinned memory between PlanOffload, which takes all that the offload needs and settles
// whether it fails, and LaunchOffload; offloads are launched in the order in which they were
// planned, so that all is ordered as it is without. A fetch waits for pinned memory before it
// begins, since the addresses that it reads are resolved when it is enqueued, and is copied out of
// it behind the device.

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {
namespace {

constexpr int64_t kMaxBatchBlocks = 65'536;
constexpr int64_t kMaxTagBytes = 32;
constexpr absl::Duration kPredictionRetry = absl::Milliseconds(10);

// TokenCopy serves both directions; StoreTokens only reads what k and v point to.
std::byte* Source(const std::byte* data) { return const_cast<std::byte*>(data); }

// What the device is told of a batch.
int64_t ArrayBytes(const OffloadCall& call) {
  constexpr int64_t kAlignmentBytes = 2 * 256;  // of the two lists
  return kAlignmentBytes +
         std::ssize(call.blocks) * static_cast<int64_t>(sizeof(TokenCopy) + sizeof(ProjectBlock));
}

}  // namespace

struct OffloadCall::Work final : public HostTask, public TransferStaging::Transfer {
  struct Target {
    std::byte* slot = nullptr;
    std::byte* row = nullptr;
    bool lent = false;  // the slot is the one that a table reserved
  };

  explicit Work(OffloadCall* call) : call(call) {}
  void Run() override { session->OnTransferComplete(call); }
  void OnMemory() override { session->CopyIn(call); }
  void OnCopied() override { session->OnCopiedIn(call); }

  OffloadCall* const call;
  SessionImpl* session = nullptr;
  OffloadCall* next_staged = nullptr;
  bool copied_in = false;
  std::vector<int64_t> keys;
  std::vector<Target> targets;
  std::vector<std::byte*> fresh_slots;
  std::vector<TokenCopy> copies;
  std::vector<ProjectBlock> projections;
};

OffloadCall::OffloadCall() : work_(std::make_unique<Work>(this)) {}
OffloadCall::~OffloadCall() = default;

struct FetchCall::Work final : public HostTask, public TransferStaging::Transfer {
  explicit Work(FetchCall* call) : call(call) {}
  void Run() override { session->OnGathered(call); }
  void OnMemory() override { session->OnFetchMemory(call); }
  void OnCopied() override { session->OnTransferComplete(call); }

  FetchCall* const call;
  SessionImpl* session = nullptr;
  std::vector<TokenCopy> copies;
};

FetchCall::FetchCall() : work_(std::make_unique<Work>(this)) {}
FetchCall::~FetchCall() = default;

template <typename C>
void SessionImpl::OnTransferComplete(C* call) {
  Call* ended = nullptr;
  std::function<void()> drained;
  if (staging_ != nullptr) staging_->Release(call->work_.get());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A fetch that waited for staging may have failed before it began.
    if (call->status_.ok()) call->status_ = CheckDevice(*device_);
    if constexpr (std::is_same_v<C, OffloadCall>) EndOffload(*call);
    // Before Done, which may hand in the next one.
    --num_transfers_;
    last_heard_ = now_();
    blocks_->Reclaim();
    Pump(&ended);
    drained = TakeDrained();
  }
  // May free the call. The session is not touched any more: who ends it waits for its streams, and
  // so for their tasks, but not for the threads of the staging.
  call->Done();
  RunDone(ended);
  if (drained) drained();
}

void SessionImpl::Offload(OffloadCall* call) {
  call->work_->session = this;
  call->result = OffloadResult();
  call->status_ = CheckOffload(*call);
  if (call->status_.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    call->status_ = Admit();
    if (call->status_.ok()) call->status_ = PlanOffload(*call);
    if (call->status_.ok()) {
      ++num_transfers_;
      if (staging_ == nullptr) {
        LaunchOffload(*call, call->k.data, call->v.data);
      } else {
        StageOffload(call);
      }
      return;
    }
  }
  call->Done();
}

// Under the lock, so that memory is asked for in the order of the list: were it not, the first of
// the list could wait for memory that those behind it hold while they wait for it.
void SessionImpl::StageOffload(OffloadCall* call) {
  call->work_->copied_in = false;
  call->work_->next_staged = nullptr;
  (staged_tail_ == nullptr ? staged_head_ : staged_tail_->work_->next_staged) = call;
  staged_tail_ = call;
  if (staging_->Take(call->work_.get(), call->k.bytes + call->v.bytes)) CopyIn(call);
}

// Needs no lock.
void SessionImpl::CopyIn(OffloadCall* call) {
  std::byte* const staged = call->work_->data();
  staging_->Copy(call->work_.get(), {staged, call->k.data, call->k.bytes},
                 {staged + call->k.bytes, call->v.data, call->v.bytes});
}

void SessionImpl::OnCopiedIn(OffloadCall* call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call->work_->copied_in = true;
  while (staged_head_ != nullptr && staged_head_->work_->copied_in) {
    OffloadCall& first = *staged_head_;
    staged_head_ = std::exchange(first.work_->next_staged, nullptr);
    if (staged_head_ == nullptr) staged_tail_ = nullptr;
    LaunchOffload(first, first.work_->data(), first.work_->data() + first.k.bytes);
  }
}

absl::Status SessionImpl::CheckStaged(int64_t bytes, absl::string_view message) const {
  if (staging_ == nullptr || bytes <= staging_->capacity_bytes()) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, Reason::kMessageTooLarge,
               absl::StrCat("K and V have ", bytes, " bytes; --transfer_staging_bytes is ",
                            staging_->capacity_bytes()))
      .Meta("message", message)
      .Meta("size_bytes", bytes)
      .Meta("limit_bytes", staging_->capacity_bytes());
}

// Needs no lock.
absl::Status SessionImpl::CheckOffload(OffloadCall& call) {
  const int64_t num_blocks = std::ssize(call.blocks);
  if (num_blocks < 1 || num_blocks > kMaxBatchBlocks) {
    return InvalidField("blocks", absl::StrCat(num_blocks, " blocks"),
                        absl::StrCat("1..", kMaxBatchBlocks));
  }
  std::vector<int64_t>& keys = call.work_->keys;
  keys.clear();
  for (const OffloadBlock& block : call.blocks) {
    SLUICE_RETURN_IF_ERROR(CheckLayer(block.layer, "blocks.layer"));
    SLUICE_RETURN_IF_ERROR(CheckBlockId(block.block_id, "blocks.block_id"));
    if (block.valid_tokens > spec_.block_tokens) {
      return InvalidField("blocks.valid_tokens", block.valid_tokens,
                          absl::StrCat("0 (all) .. ", spec_.block_tokens));
    }
    if (std::ssize(block.tag) > kMaxTagBytes) {
      return InvalidField("blocks.tag", absl::StrCat(block.tag.size(), " bytes"),
                          "at most 32 bytes");
    }
    keys.push_back(block.layer * spec_.max_blocks + block.block_id);
  }
  std::sort(keys.begin(), keys.end());
  if (const auto twice = std::adjacent_find(keys.begin(), keys.end()); twice != keys.end()) {
    const int64_t layer = *twice / spec_.max_blocks;
    const int64_t block_id = *twice % spec_.max_blocks;
    return Error(absl::StatusCode::kInvalidArgument, Reason::kDuplicateBlock,
                 absl::StrCat("layer ", layer, " block ", block_id, " is twice in the batch"))
        .Meta("layer", layer)
        .Meta("block_id", block_id);
  }
  if (call.k.shape.size() == 4 && call.v.shape.size() == 4 && call.k.shape[3] != call.v.shape[3]) {
    return Error(absl::StatusCode::kInvalidArgument, Reason::kUnequalKv,
                 absl::StrCat("K has head_dim ", call.k.shape[3], " and V has ", call.v.shape[3],
                              "; unequal ones, and MLA, are not supported"))
        .Meta("field", "v.shape")
        .Meta("value", call.v.shape[3])
        .Meta("allowed", call.k.shape[3]);
  }
  const int64_t dims[] = {num_blocks, spec_.block_tokens, spec_.num_kv_heads, spec_.head_dim};
  SLUICE_RETURN_IF_ERROR(CheckTensor(call.k, "k", spec_.kv_dtype, dims));
  SLUICE_RETURN_IF_ERROR(CheckTensor(call.v, "v", spec_.kv_dtype, dims));
  return CheckStaged(call.k.bytes + call.v.bytes, "request");
}

// An A_g row for each target that a reserved block does not bring along; all of them, unless
// prediction is best effort.
absl::Status SessionImpl::TakeRows(OffloadCall& call) {
  if (call.predict == PredictMode::kOff) return absl::OkStatus();
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    OffloadCall::Work::Target& target = call.work_->targets[i];
    const BlockEntry& entry = blocks_->at(call.blocks[i].layer, call.blocks[i].block_id);
    if (target.lent && entry.projected != nullptr) continue;
    target.row = rows_->Take();
    if (target.row != nullptr || call.predict == PredictMode::kBestEffort) continue;
    const int64_t free_rows = rows_->free_rows();
    for (OffloadCall::Work::Target& taken : call.work_->targets) {
      if (taken.row != nullptr) rows_->Give(taken.row);
    }
    if (free_rows > 0) return NoMemory(rows_->status(), Reason::kDeviceMemory);
    return Error(absl::StatusCode::kResourceExhausted, Reason::kPredictionMemory,
                 absl::StrCat("no A_g memory for ", call.blocks.size(),
                              " blocks while the ones they replace are still being read"))
        .Meta("need_rows", call.blocks.size())
        .Meta("free_rows", free_rows + static_cast<int64_t>(i))
        .Retry(kPredictionRetry);
  }
  return absl::OkStatus();
}

// Takes slots and rows; nothing can fail after it.
absl::Status SessionImpl::PlanOffload(OffloadCall& call) {
  OffloadCall::Work& work = *call.work_;
  const bool predict = call.predict != PredictMode::kOff;
  int64_t num_fresh = 0;
  work.targets.assign(call.blocks.size(), {});
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    const OffloadBlock& block = call.blocks[i];
    const BlockEntry& entry = blocks_->at(block.layer, block.block_id);
    if (entry.stored() && blocks_->num_tables(block.block_id) > 1) {
      return BlockShared(block.layer, block.block_id);
    }
    work.targets[i].lent = entry.slot != nullptr && !entry.stored();
    num_fresh += work.targets[i].lent ? 0 : 1;
  }
  // Beside what is planned and not launched yet.
  SLUICE_RETURN_IF_ERROR(MakeRoom(*ingest_stream_, planned_array_bytes_ + ArrayBytes(call)));
  work.fresh_slots.resize(num_fresh);
  SLUICE_RETURN_IF_ERROR(blocks_->TakeSlots(absl::MakeSpan(work.fresh_slots)));
  if (absl::Status status = TakeRows(call); !status.ok()) {
    blocks_->GiveSlots(work.fresh_slots);
    return status;
  }

  int64_t next_fresh = 0;
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    const OffloadBlock& block = call.blocks[i];
    OffloadCall::Work::Target& target = work.targets[i];
    if (target.lent) {
      BlockEntry& entry = blocks_->at(block.layer, block.block_id);
      target.slot = std::exchange(entry.slot, nullptr);
      // What the table set aside, where TakeRows has not found another.
      std::byte* row = std::exchange(entry.projected, nullptr);
      if (predict && target.row == nullptr) std::swap(target.row, row);
      if (row != nullptr) rows_->Give(row);
      entry.num_fillers = 1;
      entry.lent_in_hbm = blocks_->InHbm(target.slot);
    } else {
      target.slot = work.fresh_slots[next_fresh++];
    }
  }
  planned_array_bytes_ += ArrayBytes(call);
  return absl::OkStatus();
}

void SessionImpl::LaunchOffload(OffloadCall& call, const std::byte* k, const std::byte* v) {
  OffloadCall::Work& work = *call.work_;
  planned_array_bytes_ -= ArrayBytes(call);
  work.copies.clear();
  work.projections.clear();
  const int64_t wire_bytes = slot_bytes_ / 2;
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    const OffloadBlock& block = call.blocks[i];
    const OffloadCall::Work::Target& target = work.targets[i];
    const int64_t valid_tokens = block.valid_tokens == 0 ? spec_.block_tokens : block.valid_tokens;
    work.copies.push_back({target.slot, Source(k) + i * wire_bytes, Source(v) + i * wire_bytes, 0,
                           static_cast<int32_t>(valid_tokens),
                           static_cast<int32_t>(spec_.block_tokens - valid_tokens)});
    if (target.row != nullptr) {
      work.projections.push_back({target.slot, target.row, 0, static_cast<int32_t>(valid_tokens)});
    }
  }
  ops_.StoreTokens({layout_, work.copies.data(), std::ssize(work.copies)}, *ingest_stream_);
  if (!work.projections.empty()) {
    ops_.ProjectKeys({layout_, static_cast<int32_t>(spec_.rank), projection_.data(), 0,
                      work.projections.data(), std::ssize(work.projections)},
                     *ingest_stream_);
  }
  ingest_stream_->Enqueue(&work);
}

void SessionImpl::EndOffload(OffloadCall& call) {
  if (call.status_.ok()) {
    CommitOffload(call);
  } else {
    AbandonOffload(call);
  }
}

void SessionImpl::CommitOffload(OffloadCall& call) {
  const OffloadCall::Work& work = *call.work_;
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    const OffloadBlock& block = call.blocks[i];
    const OffloadCall::Work::Target& target = work.targets[i];
    BlockEntry& entry = blocks_->at(block.layer, block.block_id);
    if (target.lent) entry.num_fillers = 0;
    call.result.replaced_blocks += entry.stored() ? 1 : 0;
    call.result.predicted_blocks += target.row != nullptr ? 1 : 0;
    blocks_->Store(block.layer, block.block_id, target.slot, target.row,
                   block.valid_tokens == 0 ? spec_.block_tokens : block.valid_tokens, block.tag);
  }
  call.result.stored_blocks = std::ssize(call.blocks);
  call.result.stored_bytes = std::ssize(call.blocks) * blocks_->stride_bytes();
}

// Nothing of the batch was ever seen.
void SessionImpl::AbandonOffload(OffloadCall& call) {
  const OffloadCall::Work& work = *call.work_;
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    const OffloadCall::Work::Target& target = work.targets[i];
    BlockEntry& entry = blocks_->at(call.blocks[i].layer, call.blocks[i].block_id);
    if (target.lent) entry.num_fillers = 0;
    if (target.lent && entry.slot == nullptr && blocks_->num_tables(call.blocks[i].block_id) > 0) {
      blocks_->Reserve(entry, target.slot, target.row);
    } else {
      blocks_->Retire(target.slot, target.row);
    }
  }
}

void SessionImpl::Fetch(FetchCall* call) {
  FetchCall::Work& work = *call->work_;
  work.session = this;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call->status_ = Admit();
    const int64_t bytes = std::ssize(call->block_ids) * slot_bytes_;
    if (call->status_.ok()) call->status_ = CheckStaged(bytes, "reply");
    if (call->status_.ok()) {
      ++num_transfers_;
      // OnFetchMemory goes on.
      if (staging_ != nullptr && !staging_->Take(&work, bytes)) return;
      call->status_ = StartFetch(*call);
      if (call->status_.ok()) return;
      --num_transfers_;
      if (staging_ != nullptr) staging_->Release(&work);
    }
  }
  call->Done();
}

void SessionImpl::OnFetchMemory(FetchCall* call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call->status_ = StartFetch(*call);
    if (call->status_.ok()) return;
  }
  OnTransferComplete(call);
}

void SessionImpl::OnGathered(FetchCall* call) {
  if (staging_ == nullptr) {
    OnTransferComplete(call);
    return;
  }
  const int64_t half_bytes = std::ssize(call->block_ids) * slot_bytes_ / 2;
  const std::byte* const staged = call->work_->data();
  staging_->Copy(call->work_.get(), {call->k, staged, half_bytes},
                 {call->v, staged + half_bytes, half_bytes});
}

absl::Status SessionImpl::StartFetch(FetchCall& call) {
  SLUICE_RETURN_IF_ERROR(CheckLayer(call.layer));
  FetchCall::Work& work = *call.work_;
  work.copies.clear();
  call.info.clear();
  const int64_t wire_bytes = slot_bytes_ / 2;
  const bool staged = staging_ != nullptr;
  std::byte* const k = staged ? work.data() : call.k;
  std::byte* const v = staged ? k + std::ssize(call.block_ids) * wire_bytes : call.v;
  StreamPosition last_write = 0;
  for (size_t i = 0; i < call.block_ids.size(); ++i) {
    const uint32_t block_id = call.block_ids[i];
    SLUICE_RETURN_IF_ERROR(CheckBlockId(block_id, "blocks.block_ids"));
    const BlockEntry& entry = blocks_->at(call.layer, block_id);
    if (!entry.stored()) return BlockNotFound(call.layer, block_id);
    last_write = std::max(last_write, entry.last_write);
    work.copies.push_back({entry.slot, k + i * wire_bytes, v + i * wire_bytes, 0,
                           entry.valid_tokens,
                           static_cast<int32_t>(spec_.block_tokens - entry.valid_tokens)});
    call.info.push_back(InfoOf(call.layer, block_id));
  }
  SLUICE_RETURN_IF_ERROR(
      MakeRoom(*fetch_stream_, std::ssize(work.copies) * static_cast<int64_t>(sizeof(TokenCopy))));
  if (last_write > attention_stream_->completed()) {
    fetch_stream_->WaitFor(*attention_stream_, last_write);
  }
  const StreamPosition position =
      ops_.GatherTokens({layout_, work.copies.data(), std::ssize(work.copies)}, *fetch_stream_);
  for (const uint32_t block_id : call.block_ids) {
    blocks_->at(call.layer, block_id).last_fetch = position;
  }
  fetch_stream_->Enqueue(&work);
  return absl::OkStatus();
}

}  // namespace sluice
