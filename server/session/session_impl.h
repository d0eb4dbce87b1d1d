// The one implementation of Session. Its parts are in session_impl.cc (life and queue),
// sequences.cc, blocks.cc, transfer.cc (offload and fetch), decode_call.cc, score_call.cc,
// tile_calls.cc.
//
// One lock guards all bookkeeping and is held for bookkeeping only. Work runs on three streams:
// attention (calls, in order), ingest (offloads) and fetch.

#ifndef SERVER_SESSION_SESSION_IMPL_H_
#define SERVER_SESSION_SESSION_IMPL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/device/device.h"
#include "kernels/ops/ops.h"
#include "server/base/error.h"
#include "server/session/reservation.h"
#include "server/session/session.h"
#include "server/session/staging.h"
#include "server/session/transfer_staging.h"
#include "server/swap/block_table.h"
#include "server/swap/lazy_array.h"
#include "server/swap/row_pool.h"

namespace sluice {

struct SequenceState {
  uint64_t generation = 0;
  std::vector<uint32_t> block_ids;
  // What the newest truncation made of it, to know the same request when it comes again.
  uint64_t truncated_generation = 0;
  int64_t truncated_tokens = 0;
};

// A run of tiles: q, the running states, and how far it is. Work in flight shares it.
struct TileRun {
  uint32_t layer = 0;
  int64_t num_rows = 0;
  uint64_t next_tile = 0;
  absl::Time deadline;
  AttendOptions options;  // sink_logits apart, which act when the run is finalized
  Buffer memory;          // q, sink_logits, m, l, o
  std::byte* q = nullptr;
  const float* sink_logits = nullptr;
  RunningState state;
};

struct Call::Internal final : public HostTask {
  explicit Internal(Call* call) : call(call) {}
  void Run() override;

  Call* const call;
  Call* next = nullptr;  // in the session's queue
  class SessionImpl* session = nullptr;
  absl::Time submit_time;
  absl::Time start_time;
  Staging staging;
};

class SessionImpl final : public Session {
 public:
  struct Options {
    SessionSpec spec;  // checked, defaults filled in
    Reservation reservation;
    uint64_t epoch = 0;
    int64_t max_queued_calls = 0;
    int64_t max_tile_runs = 0;
    std::function<absl::Time()> now;
    // Told, from any thread and with no lock held, that nothing is in flight any more after
    // BeginClose.
    std::function<void()> on_drained;
  };
  // `staging`: null where the device reads any host memory.
  [[nodiscard]] static absl::StatusOr<std::shared_ptr<SessionImpl>> Create(
      Options options, Device* device, BlockTable::Stores stores, TransferStaging* staging);
  ~SessionImpl() override;

  const SessionSpec& spec() const override { return spec_; }
  int64_t slot_bytes() const override { return slot_bytes_; }
  SessionInfo Info() const override;
  absl::Status CheckHandle(uint64_t epoch) override;
  void EnterStream() override;
  void LeaveStream() override;
  absl::Time LeaseExpiry() const override;
  void Submit(Call* call) override;
  void Offload(OffloadCall* call) override;
  void Fetch(FetchCall* call) override;
  absl::StatusOr<PutResult> PutSequence(const SequenceUpdate& update) override;
  absl::StatusOr<uint32_t> ForkSequence(uint32_t source_sequence_id, uint64_t source_generation,
                                        uint32_t target_sequence_id, uint64_t target_generation,
                                        int64_t context_tokens) override;
  absl::StatusOr<uint32_t> TruncateSequence(uint32_t sequence_id, uint64_t generation,
                                            int64_t context_tokens) override;
  absl::StatusOr<int64_t> ReleaseSequence(absl::Span<const uint32_t> sequence_ids,
                                          bool drop_blocks) override;
  std::vector<SequenceInfo> ListSequences(uint32_t first_sequence_id, int64_t limit) const override;
  absl::StatusOr<std::vector<BlockInfo>> DescribeBlocks(const BlockSet& blocks) const override;
  absl::StatusOr<BlockPage> ListBlocks(absl::Span<const uint32_t> layers, Tier tier,
                                       BlockCursor cursor, int64_t limit) const override;
  absl::StatusOr<std::vector<BlockInfo>> FindBlocks(
      absl::Span<const std::string> tags, absl::Span<const uint32_t> layers) const override;
  absl::StatusOr<DropResult> DropBlocks(const BlockSet& blocks, bool allow_missing) override;

  // For the manager.

  // Compares what is fixed at the first opening; FAILED_PRECONDITION SESSION_MISMATCH names the
  // first difference.
  [[nodiscard]] absl::Status CheckSameSession(const SessionSpec& spec) const;
  // A new epoch takes over: budgets, lease and retention are those of `spec`.
  void Attach(const SessionSpec& spec, uint64_t epoch);
  // Applies lease, retention and the deadlines of tile runs as of `now`. True: the retention is
  // over.
  bool Expire(absl::Time now);
  // Refuses new work with SESSION_CLOSING; on_drained follows, perhaps at once. FAILED_PRECONDITION
  // when already closing.
  [[nodiscard]] absl::Status BeginClose();
  // Blocks until nothing is queued or in flight; new work keeps it waiting.
  void WaitUntilIdle();
  // After on_drained: detaches, and accepts a new Attach.
  void EndCloseKeeping();
  // After on_drained, never on a thread of the device: gives everything back; returns the bytes of
  // blocks. Calls that come later are NOT_FOUND.
  int64_t Teardown();
  uint64_t epoch() const;

 private:
  friend struct Call::Internal;
  friend class DecodeCall;
  friend class DecodeStepBuilder;
  friend class ScoreCall;
  friend class ReadProjectedKeysCall;
  friend class BeginTilesCall;
  friend class StepTileCall;
  friend class FinalizeTilesCall;
  friend class AbortTilesCall;
  friend struct OffloadCall::Work;
  friend struct FetchCall::Work;

  // Calls started and not complete; more wait in the queue, where they can still be dropped.
  static constexpr int kMaxStartedCalls = 2;

  SessionImpl(Options options, Device* device, BlockTable::Stores stores, TransferStaging* staging);
  [[nodiscard]] absl::Status Init();

  // The queue; the lock is held. Calls that ended without the device are linked to *ended.
  absl::Status CheckAlive() const;   // NOT_FOUND once torn down
  absl::Status AdmitChange() const;  // CheckAlive, SESSION_CLOSING and DEVICE_FAILED
  absl::Status Admit() const;        // AdmitChange, and QUEUE_FULL
  // Memory for a call's arrays, before it changes anything: staging's own, and what the device
  // needs for `array_bytes` of tables and lists. RESOURCE_EXHAUSTED HOST_MEMORY, UNAVAILABLE
  // DEVICE_FAILED.
  absl::Status CommitStaging(Staging& staging, int64_t array_bytes);
  absl::Status MakeRoom(Stream& stream, int64_t array_bytes);
  // What there is to say of memory that the device did not give.
  absl::Status NoMemory(const absl::Status& status, Reason reason) const;
  void Pump(Call** ended);
  static void RunDone(Call* ended);
  void OnCallComplete(Call* call);
  bool Idle() const;
  // To be called under the lock when work ended: wakes WaitUntilIdle, and returns on_drained when
  // it is due, to be called after the lock is let go.
  std::function<void()> TakeDrained();

  // Sequences; the lock is held.
  SequenceState* FindSequence(uint32_t sequence_id);
  absl::Status CheckUpdate(const SequenceUpdate& update, absl::string_view field);
  absl::StatusOr<PutResult> ApplyUpdate(const SequenceUpdate& update);
  absl::StatusOr<int64_t> ReserveBlocks(absl::Span<const uint32_t> block_ids);
  void AddToTables(absl::Span<const uint32_t> block_ids);
  void RemoveFromTables(absl::Span<const uint32_t> block_ids);
  int64_t TokensPresent(const SequenceState& sequence, int64_t layer) const;

  // Blocks; the lock is held.
  absl::Status CheckLayer(int64_t layer, absl::string_view field = "layer") const;
  absl::Status CheckBlockId(uint32_t block_id, absl::string_view field) const;
  absl::Status CheckBlockSet(const BlockSet& blocks, int64_t max_total) const;
  absl::StatusOr<std::vector<bool>> LayerFilter(absl::Span<const uint32_t> layers) const;
  BlockInfo InfoOf(uint32_t layer, uint32_t block_id) const;
  absl::Status CheckOffload(OffloadCall& call);
  absl::Status TakeRows(OffloadCall& call);
  absl::Status PlanOffload(OffloadCall& call);
  void StageOffload(OffloadCall* call);
  void CopyIn(OffloadCall* call);
  void OnCopiedIn(OffloadCall* call);
  void LaunchOffload(OffloadCall& call, const std::byte* k, const std::byte* v);
  void EndOffload(OffloadCall& call);
  void CommitOffload(OffloadCall& call);
  void AbandonOffload(OffloadCall& call);
  // MESSAGE_TOO_LARGE for more than staging can ever hold; `message` is "request" or "reply".
  absl::Status CheckStaged(int64_t bytes, absl::string_view message) const;
  // Of an OffloadCall or a FetchCall; ends in its Done.
  template <typename C>
  void OnTransferComplete(C* call);
  absl::Status StartFetch(FetchCall& call);
  void OnFetchMemory(FetchCall* call);
  void OnGathered(FetchCall* call);

  // Attention.
  absl::Status CheckAttention(const AttentionSpec& attention, AttendOptions* options) const;
  absl::Status CheckOutDtype(DType dtype) const;
  // What the device is told about attention over a sequence, at most: its table and its units.
  // Pieces of a step that is cut may need more; memory that is out then is the device's failure.
  int64_t AttendArrayBytes(int64_t context_tokens, int64_t query_tokens) const;
  // Launches in pieces that fit the split workspace; `pieces` must live as long as the params.
  void LaunchAttend(AttendParams params, std::vector<AttendSequence>* pieces);
  absl::StatusOr<std::shared_ptr<TileRun>> FindRun(uint64_t run_id);
  void FreeRun(uint64_t run_id);
  void ExpireRuns(absl::Time now);

  KvLayout layout_;
  int64_t slot_bytes_ = 0;
  int64_t row_bytes_ = 0;
  Device* const device_;
  Ops& ops_;
  const BlockTable::Stores stores_;
  TransferStaging* const staging_;  // null: transfers read and write a message's memory
  const std::function<absl::Time()> now_;
  const std::function<void()> on_drained_;
  const int64_t max_queued_calls_;
  const int64_t max_tile_runs_;
  const absl::Time create_time_;
  Reservation reservation_;

  // Fixed after Init.
  SessionSpec spec_;
  Buffer projection_;         // P, [head_dim, rank] BF16
  Buffer projection_upload_;  // the same in host memory, where it was made
  ByteCopy projection_copy_;
  Buffer split_workspace_;  // of the attention stream
  Buffer score_workspace_;
  std::unique_ptr<Stream> attention_stream_;
  std::unique_ptr<Stream> ingest_stream_;
  std::unique_ptr<Stream> fetch_stream_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  // All below are guarded by mutex_, the two atomics apart.
  enum class Life { kAttached, kDetached, kClosing, kGone };
  Life life_ = Life::kAttached;
  bool drained_told_ = false;
  uint64_t epoch_ = 0;
  absl::Time last_heard_;
  absl::Time detach_time_;
  int64_t open_streams_ = 0;

  std::unique_ptr<RowPool> rows_;
  std::unique_ptr<BlockTable> blocks_;
  std::vector<std::unique_ptr<SequenceState>> sequences_;
  int64_t num_sequences_ = 0;

  Call* queue_head_ = nullptr;
  Call* queue_tail_ = nullptr;
  int64_t num_queued_ = 0;
  int num_started_ = 0;
  int64_t num_transfers_ = 0;  // offloads and fetches in flight, or waiting for staging
  // Offloads that are planned and not launched, in order, and what they will take of MakeRoom's.
  OffloadCall* staged_head_ = nullptr;
  OffloadCall* staged_tail_ = nullptr;
  int64_t planned_array_bytes_ = 0;

  absl::flat_hash_map<uint64_t, std::shared_ptr<TileRun>> runs_;
  uint64_t next_run_id_ = 1;
  int64_t run_rows_ = 0;

  // Marks for checks without allocation: an element is marked when it equals the newest stamp.
  uint64_t next_stamp_ = 1;
  std::vector<uint64_t> sequence_marks_;  // [max_sequences]
  std::vector<uint64_t>
      waiting_marks_;  // [max_sequences]: sequences of calls that wait for an offload
  uint64_t waiting_stamp_ = 0;
  LazyArray<uint64_t> block_marks_;    // [max_blocks]: stamp
  LazyArray<uint32_t> block_writers_;  // [max_blocks]: index of the sequence that writes it
  std::vector<std::byte*> scratch_slots_;
  std::vector<std::byte*> scratch_rows_;
};

// UNAVAILABLE DEVICE_FAILED where the device has failed. Asked once work has been seen complete: an
// OK then means that its results are sound.
[[nodiscard]] absl::Status CheckDevice(const Device& device);
// Told to the queue alone: an offload fills a block that the call writes.
inline absl::Status WaitForOffload() { return absl::UnavailableError(""); }
Error SessionNotFound(absl::string_view name);
Error SessionClosing(absl::string_view name);
absl::Status SequenceNotFound(uint32_t sequence_id);
absl::Status StaleGeneration(uint32_t sequence_id, uint64_t given, uint64_t current);
absl::Status BlockShared(uint32_t layer, uint32_t block_id);
absl::Status BlockNotFound(uint32_t layer, uint32_t block_id);

// A tensor of a request against what the session wants: INVALID_FIELD names `field`.
// `dims` are the shape; a view without a shape passes on its bytes alone.
[[nodiscard]] absl::Status CheckTensor(const TensorView& view, absl::string_view field, DType dtype,
                                       absl::Span<const int64_t> dims);

}  // namespace sluice

#endif  // SERVER_SESSION_SESSION_IMPL_H_
