// A session: its blocks, its sequences, attention over them.
//
//   client::OffloadBatch prompt(session);              // client/offload.h
//   prompt.AddBlock(/*layer=*/0, /*block_id=*/7);
//   prompt.SetKv(k, v);
//   session.OffloadBlocks(prompt);
//   session.PutSequence(/*sequence_id=*/0, /*generation=*/1, /*base_blocks=*/0, {7});
//   client::DecodeBatch step(session);                 // client/decode.h
//   step.AddSequence(/*sequence_id=*/0, /*context_tokens=*/16);
//   step.SetQ(q);
//   session.DecodeStep(&step);
//   Use(step.out());
//
// There is a method for each RPC, named after it. Those that carry no arrays take the request as it
// is in proto/sluice/v1, whose comments say what each does and which errors it has; the session's
// handle is filled in here.
//
// Errors, retries and blocking: as client/client.h says. "Not repeated" below: an error comes back
// even where it has a RetryInfo, because the call might have been done and done again would say or
// do something else. Threads: every method may be called from any thread, any number at a time.
// Ownership: a Session is a cheap copy. Destroying it closes nothing: its lease does, or Close.

#ifndef CLIENT_SESSION_H_
#define CLIENT_SESSION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/options.h"
#include "sluice/v1/attention.pb.h"
#include "sluice/v1/sequence.pb.h"
#include "sluice/v1/session.pb.h"
#include "sluice/v1/swap.pb.h"

namespace sluice::client {

class Core;
class DecodeBatch;
class DecodeStream;
class FetchReader;
class OffloadBatch;
class OffloadWriter;
struct OffloadWriterOptions;

class Session {
 public:
  // Clients make sessions.
  Session(std::shared_ptr<Core> core, v1::Session info, bool attached);

  // As it was when it was opened, every default filled in. GetSession tells how it is now.
  const v1::Session& info() const { return *info_; }
  const v1::SessionSpec& spec() const { return info_->spec(); }
  const v1::SessionHandle& handle() const { return info_->handle(); }
  // Whether OpenSession found the session there and attached to it.
  bool attached() const { return attached_; }
  // Elements of K, or of V, of one block: block_tokens x num_kv_heads x head_dim.
  int64_t block_elements() const;

  // SessionService.
  [[nodiscard]] absl::StatusOr<v1::Session> GetSession(const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::RenewSessionResponse> RenewSession(
      const CallOptions& options = {}) const;
  // Not repeated. The session is of no more use on success.
  [[nodiscard]] absl::StatusOr<v1::CloseSessionResponse> CloseSession(
      v1::CloseMode mode, const CallOptions& options = {}) const;

  // SequenceService.
  [[nodiscard]] absl::StatusOr<v1::PutSequenceResponse> PutSequence(
      v1::PutSequenceRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::PutSequenceResponse> PutSequence(
      uint32_t sequence_id, uint64_t generation, uint32_t base_blocks,
      absl::Span<const uint32_t> block_ids, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::ForkSequenceResponse> ForkSequence(
      v1::ForkSequenceRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::TruncateSequenceResponse> TruncateSequence(
      v1::TruncateSequenceRequest request, const CallOptions& options = {}) const;
  // Not repeated.
  [[nodiscard]] absl::StatusOr<v1::ReleaseSequenceResponse> ReleaseSequence(
      v1::ReleaseSequenceRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::ListSequencesResponse> ListSequences(
      v1::ListSequencesRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<std::vector<v1::Sequence>> ListAllSequences(
      const CallOptions& options = {}) const;

  // SwapService. The streams and their messages: client/offload.h and client/fetch.h.
  [[nodiscard]] absl::StatusOr<v1::OffloadBlocksResponse> OffloadBlocks(
      const OffloadBatch& batch, const CallOptions& options = {}) const;
  // Opens a stream. Where the daemon cannot be reached, the stream's calls say so.
  OffloadWriter OffloadStream(const OffloadWriterOptions& writer_options,
                              const CallOptions& options = {}) const;
  // Every named id in every named layer (no layer: all), in that order.
  FetchReader FetchBlocks(const v1::BlockSet& blocks, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::DescribeBlocksResponse> DescribeBlocks(
      v1::DescribeBlocksRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::ListBlocksResponse> ListBlocks(
      v1::ListBlocksRequest request, const CallOptions& options = {}) const;
  // All pages, from the one that the request starts at.
  [[nodiscard]] absl::StatusOr<std::vector<v1::BlockInfo>> ListAllBlocks(
      v1::ListBlocksRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::FindBlocksResponse> FindBlocks(
      v1::FindBlocksRequest request, const CallOptions& options = {}) const;
  // Not repeated unless the request has allow_missing.
  [[nodiscard]] absl::StatusOr<v1::DropBlocksResponse> DropBlocks(
      v1::DropBlocksRequest request, const CallOptions& options = {}) const;

  // AttentionService. Steps and their stream: client/decode.h.
  [[nodiscard]] absl::StatusOr<v1::ScoreBlocksResponse> ScoreBlocks(
      v1::ScoreBlocksRequest request, const CallOptions& options = {}) const;
  // With q [num_query_heads, head_dim] put into the request.
  [[nodiscard]] absl::StatusOr<v1::ScoreBlocksResponse> ScoreBlocks(
      v1::ScoreBlocksRequest request, absl::Span<const uint16_t> q,
      const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::ReadProjectedKeysResponse> ReadProjectedKeys(
      v1::ReadProjectedKeysRequest request, const CallOptions& options = {}) const;
  // The outputs are in the batch; so is a status per sequence, which may be an error when this one
  // is OK.
  [[nodiscard]] absl::Status DecodeStep(DecodeBatch* batch, const CallOptions& options = {}) const;
  // Opens a stream. Where the daemon cannot be reached, the stream's calls say so.
  DecodeStream OpenDecodeStream(const CallOptions& options = {}) const;
  // Not repeated.
  [[nodiscard]] absl::StatusOr<v1::BeginTilesResponse> BeginTiles(
      v1::BeginTilesRequest request, const CallOptions& options = {}) const;
  // With q [rows, num_query_heads, head_dim] put into the request. Not repeated.
  [[nodiscard]] absl::StatusOr<v1::BeginTilesResponse> BeginTiles(
      v1::BeginTilesRequest request, absl::Span<const uint16_t> q,
      const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::StepTileResponse> StepTile(
      v1::StepTileRequest request, const CallOptions& options = {}) const;
  // Not repeated.
  [[nodiscard]] absl::StatusOr<v1::FinalizeTilesResponse> FinalizeTiles(
      v1::FinalizeTilesRequest request, const CallOptions& options = {}) const;
  [[nodiscard]] absl::StatusOr<v1::AbortTilesResponse> AbortTiles(
      v1::AbortTilesRequest request, const CallOptions& options = {}) const;

 private:
  std::shared_ptr<Core> core_;
  std::shared_ptr<const v1::Session> info_;
  bool attached_;
};

}  // namespace sluice::client

#endif  // CLIENT_SESSION_H_
