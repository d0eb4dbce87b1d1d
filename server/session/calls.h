// Calls that run on a session's stream: decode steps, scores, tiles, reads of projected keys.
//
// A call object belongs to its caller, who fills in the request, hands it to Session::Submit, keeps
// it and everything that the request's views point to alive until Done() runs, and then may use it
// again (a used object allocates nothing for a call no larger than one before). Done() runs once,
// on a thread of the device or of the submitter; it must be short and must not block. status() is
// the outcome; result fields hold when it is OK.
//
//   class MyStep : public DecodeCall { void Done() override { ... } };
//   step->layer = 3; ...; session->Submit(step);

#ifndef SERVER_SESSION_CALLS_H_
#define SERVER_SESSION_CALLS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"
#include "server/session/types.h"

namespace sluice {

class SessionImpl;
struct TileRun;

class Call {
 public:
  virtual ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // The call is dropped with DEADLINE_EXCEEDED when it has not started by then.
  absl::Time deadline = absl::InfiniteFuture();

  // Drops the call with CANCELLED if it has not started; otherwise it ends as usual. Any thread,
  // between Submit and Done.
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  const absl::Status& status() const { return status_; }
  virtual void Done() = 0;

 protected:
  Call();

 private:
  friend class SessionImpl;
  struct Internal;  // queue link, host task, staging memory
  // Validates against the session's state and enqueues the work; under the session's lock.
  virtual absl::Status Start(SessionImpl& session) = 0;
  // Moves results to where the caller wants them; after the device is done, without the lock.
  virtual void Collect(SessionImpl& session) = 0;
  // While calls wait for an offload, others that have nothing to do with them may pass. LetsPass
  // marks what those must leave alone, or says that nothing may pass this call; MayPass: nothing of
  // this call is marked.
  virtual bool LetsPass(SessionImpl&) const { return false; }
  virtual bool MayPass(const SessionImpl&) const { return false; }

  std::atomic<bool> cancelled_{false};
  absl::Status status_;

 protected:
  std::unique_ptr<Internal> internal_;
};

// Session::DecodeStep in the wire contract.
class DecodeCall : public Call {
 public:
  // Request.
  uint32_t layer = 0;
  absl::Span<const DecodeSequence> sequences;
  TensorView q, k, v;
  AttentionSpec attention;
  DType out_dtype = DType::kBf16;  // the session's kv_dtype or kF32
  bool return_lse = false;

  // Result: rows = sum of query_tokens. Views of the call's own memory, until the call is used
  // again.
  int64_t rows = 0;
  absl::Span<const std::byte> out;            // [rows, num_query_heads, head_dim]
  absl::Span<const float> lse;                // [rows, num_query_heads] when asked for
  std::vector<absl::Status> sequence_status;  // one per sequence
  StepStats stats;

 protected:
  DecodeCall();
  ~DecodeCall() override;

 private:
  friend class SessionImpl;
  friend class DecodeStepBuilder;
  struct Work;
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  bool LetsPass(SessionImpl& session) const override;
  bool MayPass(const SessionImpl& session) const override;
  std::unique_ptr<Work> work_;
};

class ScoreCall : public Call {
 public:
  // Request: a sequence, or a list of blocks.
  uint32_t layer = 0;
  bool by_sequence = false;
  uint32_t sequence_id = 0;
  absl::Span<const uint32_t> block_ids;
  TensorView q;
  ScoreKind kind = ScoreKind::kMass;
  bool has_scale = false;
  float scale = 0;
  uint32_t top_k = 0;

  // Result, in the call's own memory.
  absl::Span<const float> scores;
  absl::Span<const uint8_t> predicted;
  absl::Span<const TopBlock> top;

 protected:
  ScoreCall();
  ~ScoreCall() override;

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status Resolve(SessionImpl& session);
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  std::unique_ptr<Work> work_;
};

class ReadProjectedKeysCall : public Call {
 public:
  uint32_t layer = 0;
  absl::Span<const uint32_t> block_ids;

  // Result, in the call's own memory.
  absl::Span<const std::byte> projected_keys;  // [n, num_kv_heads, block_tokens, rank] BF16
  absl::Span<const uint8_t> predicted;
  absl::Span<const uint32_t> valid_tokens;

 protected:
  ReadProjectedKeysCall();
  ~ReadProjectedKeysCall() override;

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  std::unique_ptr<Work> work_;
};

class BeginTilesCall : public Call {
 public:
  uint32_t layer = 0;
  TensorView q;          // [n, num_query_heads, head_dim]
  int64_t num_rows = 0;  // n; 0: from q's bytes
  AttentionSpec attention;
  absl::Duration timeout = absl::ZeroDuration();  // zero: 60 s

  uint64_t run_id = 0;  // result

 protected:
  BeginTilesCall();
  ~BeginTilesCall() override;

 private:
  friend class SessionImpl;
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  std::shared_ptr<TileRun> run_;
};

class StepTileCall : public Call {
 public:
  uint64_t run_id = 0;
  uint64_t tile_index = 0;
  absl::Span<const TileRow> rows;

  bool folded = false;  // result

 protected:
  StepTileCall();
  ~StepTileCall() override;

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status PlanRow(SessionImpl& session, const TileRow& row, int64_t index);
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  std::unique_ptr<Work> work_;
};

class FinalizeTilesCall : public Call {
 public:
  uint64_t run_id = 0;
  DType out_dtype = DType::kBf16;
  bool return_lse = false;
  bool return_state = false;
  // Results of more bytes are refused, and the run stays. 0: no limit.
  int64_t max_result_bytes = 0;

  // Result, in the call's own memory.
  int64_t rows = 0;
  absl::Span<const std::byte> out;
  absl::Span<const float> lse;
  absl::Span<const float> state_m, state_l, state_o;

 protected:
  FinalizeTilesCall();
  ~FinalizeTilesCall() override;

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
  std::unique_ptr<Work> work_;
};

class AbortTilesCall : public Call {
 public:
  uint64_t run_id = 0;

 protected:
  AbortTilesCall();
  ~AbortTilesCall() override;

 private:
  friend class SessionImpl;
  absl::Status Start(SessionImpl& session) override;
  void Collect(SessionImpl& session) override;
};

// A batch of blocks to store; does not wait for calls on the session's attention stream.
class OffloadCall {
 public:
  virtual ~OffloadCall();
  absl::Span<const OffloadBlock> blocks;
  TensorView k, v;  // [n, block_tokens, num_kv_heads, head_dim]
  PredictMode predict = PredictMode::kRequired;

  const absl::Status& status() const { return status_; }
  OffloadResult result;

  // Once, on a thread of the device or of the submitter; short, not blocking.
  virtual void Done() = 0;

 protected:
  OffloadCall();

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status status_;
  std::unique_ptr<Work> work_;
};

// A piece of a fetch: some blocks, each wholly one version, into the caller's memory.
class FetchCall {
 public:
  virtual ~FetchCall();
  uint32_t layer = 0;
  absl::Span<const uint32_t> block_ids;
  std::byte* k = nullptr;  // out [n, block_tokens, num_kv_heads, head_dim]; room for n blocks
  std::byte* v = nullptr;

  const absl::Status& status() const { return status_; }
  std::vector<BlockInfo> info;  // result: one per block, as read

  virtual void Done() = 0;

 protected:
  FetchCall();

 private:
  friend class SessionImpl;
  struct Work;
  absl::Status status_;
  std::unique_ptr<Work> work_;
};

}  // namespace sluice

#endif  // SERVER_SESSION_CALLS_H_
