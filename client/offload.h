// Putting blocks in: a batch of them, and a stream of batches.
//
//   client::OffloadBatch batch(session);
//   batch.AddBlock(/*layer=*/0, /*block_id=*/7);
//   batch.AddBlock(/*layer=*/0, /*block_id=*/8, /*valid_tokens=*/3, /*tag=*/prefix_hash);
//   batch.SetKv(k, v);                        // [2, block_tokens, num_kv_heads, head_dim] each
//   session.OffloadBlocks(batch);
//
//   client::OffloadWriter writer = session.OffloadStream({.on_ack = [](const client::OffloadAck&
//   ack) { ... }}); for (...) writer.Write(&batch); absl::Status status = writer.Finish();    //
//   OK: every batch was stored
//
// Threads: a batch, and a writer, is one thread's at a time. on_ack is called by that thread.
// Ownership: what a batch is given it copies. A writer keeps its connection, not its batches.

#ifndef CLIENT_OFFLOAD_H_
#define CLIENT_OFFLOAD_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/options.h"
#include "client/session.h"
#include "sluice/v1/swap.pb.h"

namespace sluice::client {

// Blocks to store, all or none of them. Keeps its memory, so that a loop over batches of one shape
// allocates nothing for them.
class OffloadBatch {
 public:
  explicit OffloadBatch(const Session& session);

  // Starts anew: no blocks, no arrays, the defaults.
  void Clear();
  // valid_tokens 0: all. A tag has at most 32 bytes.
  void AddBlock(uint32_t layer, uint32_t block_id, uint32_t valid_tokens = 0,
                absl::string_view tag = "");
  // [blocks, block_tokens, num_kv_heads, head_dim] each, of the session's kv_dtype, in the order of
  // AddBlock.
  void SetKv(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v);
  void set_predict(v1::PredictMode predict) { request_.set_predict(predict); }

  int num_blocks() const { return request_.blocks_size(); }
  const v1::OffloadBlocksRequest& request() const { return request_; }
  // All of it, for what has no method here. The session's handle is in it.
  v1::OffloadBlocksRequest* mutable_request() { return &request_; }

 private:
  v1::SessionHandle handle_;
  v1::Dtype kv_dtype_;
  v1::OffloadBlocksRequest request_;
};

// The answer to a batch of a stream.
struct OffloadAck {
  uint64_t batch_id = 0;
  absl::Status status;               // why nothing of the batch was stored
  v1::OffloadBlocksResponse result;  // where status is OK
};

struct OffloadWriterOptions {
  // Batches that may be under way, sent and not acknowledged; Write waits for an ack beyond that.
  // At least 1.
  int max_unacked_batches = 8;
  // Called for each ack, in order, from within Write or Finish. May be empty.
  std::function<void(const OffloadAck&)> on_ack;
};

// A stream of batches. A batch that fails disturbs no other.
class OffloadWriter {
 public:
  // Sessions open writers.
  OffloadWriter(std::shared_ptr<Core> core, const OffloadWriterOptions& writer_options,
                const CallOptions& options);
  OffloadWriter(OffloadWriter&&) noexcept;
  OffloadWriter& operator=(OffloadWriter&&) noexcept;
  // Cancels what has not been finished: batches without an ack may have been stored, or not.
  ~OffloadWriter();

  // Sends a batch, which may be changed or used again at once, and gives its id: they count from 0.
  // Waits where max_unacked_batches are under way, and where the connection takes no more.
  // An error means that the stream has failed; a failed batch is told to on_ack and by Finish.
  [[nodiscard]] absl::StatusOr<uint64_t> Write(OffloadBatch* batch);
  // Waits for the acks of all batches and ends the stream. OK: every batch was stored. Otherwise
  // the stream's error, or else that of the first batch that failed. Again: the same.
  [[nodiscard]] absl::Status Finish();

  int64_t unacked_batches() const;
  // Sum over the batches that were acknowledged as stored.
  const v1::OffloadBlocksResponse& total() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::client

#endif  // CLIENT_OFFLOAD_H_
