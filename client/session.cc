#include "client/session.h"

#include <iterator>
#include <utility>

#include "client/core.h"
#include "client/decode.h"
#include "client/fetch.h"
#include "client/offload.h"
#include "client/tensor.h"

namespace sluice::client {
namespace {

constexpr int kSequencesPerPage = 1000;
constexpr int kBlocksPerPage = 10000;

}  // namespace

Session::Session(std::shared_ptr<Core> core, v1::Session info, bool attached)
    : core_(std::move(core)),
      info_(std::make_shared<const v1::Session>(std::move(info))),
      attached_(attached) {}

int64_t Session::block_elements() const {
  return int64_t{spec().block_tokens()} * spec().num_kv_heads() * spec().head_dim();
}

absl::StatusOr<v1::Session> Session::GetSession(const CallOptions& options) const {
  v1::GetSessionRequest request;
  *request.mutable_session() = handle();
  auto response = core_->Call(*core_->sessions, &v1::SessionService::Stub::GetSession, request,
                              options, Repeat::kSafe);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_session());
}

absl::StatusOr<v1::RenewSessionResponse> Session::RenewSession(const CallOptions& options) const {
  v1::RenewSessionRequest request;
  *request.mutable_session() = handle();
  return core_->Call(*core_->sessions, &v1::SessionService::Stub::RenewSession, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::CloseSessionResponse> Session::CloseSession(v1::CloseMode mode,
                                                               const CallOptions& options) const {
  v1::CloseSessionRequest request;
  *request.mutable_session() = handle();
  request.set_mode(mode);
  return core_->Call(*core_->sessions, &v1::SessionService::Stub::CloseSession, request, options,
                     Repeat::kUnsafe);
}

absl::StatusOr<v1::PutSequenceResponse> Session::PutSequence(v1::PutSequenceRequest request,
                                                             const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->sequences, &v1::SequenceService::Stub::PutSequence, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::PutSequenceResponse> Session::PutSequence(uint32_t sequence_id,
                                                             uint64_t generation,
                                                             uint32_t base_blocks,
                                                             absl::Span<const uint32_t> block_ids,
                                                             const CallOptions& options) const {
  v1::PutSequenceRequest request;
  v1::SequenceUpdate& update = *request.mutable_update();
  update.set_sequence_id(sequence_id);
  update.set_generation(generation);
  update.set_base_blocks(base_blocks);
  update.mutable_block_ids()->Assign(block_ids.begin(), block_ids.end());
  return PutSequence(std::move(request), options);
}

absl::StatusOr<v1::ForkSequenceResponse> Session::ForkSequence(v1::ForkSequenceRequest request,
                                                               const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->sequences, &v1::SequenceService::Stub::ForkSequence, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::TruncateSequenceResponse> Session::TruncateSequence(
    v1::TruncateSequenceRequest request, const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->sequences, &v1::SequenceService::Stub::TruncateSequence, request,
                     options, Repeat::kSafe);
}

absl::StatusOr<v1::ReleaseSequenceResponse> Session::ReleaseSequence(
    v1::ReleaseSequenceRequest request, const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->sequences, &v1::SequenceService::Stub::ReleaseSequence, request,
                     options, Repeat::kUnsafe);
}

absl::StatusOr<v1::ListSequencesResponse> Session::ListSequences(v1::ListSequencesRequest request,
                                                                 const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->sequences, &v1::SequenceService::Stub::ListSequences, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<std::vector<v1::Sequence>> Session::ListAllSequences(
    const CallOptions& options) const {
  std::vector<v1::Sequence> sequences;
  v1::ListSequencesRequest request;
  request.set_page_size(kSequencesPerPage);
  do {
    absl::StatusOr<v1::ListSequencesResponse> page = ListSequences(request, options);
    if (!page.ok()) return page.status();
    std::move(page->mutable_sequences()->begin(), page->mutable_sequences()->end(),
              std::back_inserter(sequences));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return sequences;
}

absl::StatusOr<v1::OffloadBlocksResponse> Session::OffloadBlocks(const OffloadBatch& batch,
                                                                 const CallOptions& options) const {
  // Storing the same bytes again changes nothing; only replaced_blocks can differ.
  return core_->Call(*core_->swap, &v1::SwapService::Stub::OffloadBlocks, batch.request(), options,
                     Repeat::kSafe);
}

OffloadWriter Session::OffloadStream(const OffloadWriterOptions& writer_options,
                                     const CallOptions& options) const {
  return OffloadWriter(core_, writer_options, options);
}

FetchReader Session::FetchBlocks(const v1::BlockSet& blocks, const CallOptions& options) const {
  v1::FetchBlocksRequest request;
  *request.mutable_session() = handle();
  *request.mutable_blocks() = blocks;
  return FetchReader(core_, request, block_elements(), options);
}

absl::StatusOr<v1::DescribeBlocksResponse> Session::DescribeBlocks(
    v1::DescribeBlocksRequest request, const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->swap, &v1::SwapService::Stub::DescribeBlocks, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::ListBlocksResponse> Session::ListBlocks(v1::ListBlocksRequest request,
                                                           const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->swap, &v1::SwapService::Stub::ListBlocks, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<std::vector<v1::BlockInfo>> Session::ListAllBlocks(
    v1::ListBlocksRequest request, const CallOptions& options) const {
  std::vector<v1::BlockInfo> blocks;
  request.set_page_size(kBlocksPerPage);
  do {
    absl::StatusOr<v1::ListBlocksResponse> page = ListBlocks(request, options);
    if (!page.ok()) return page.status();
    std::move(page->mutable_blocks()->begin(), page->mutable_blocks()->end(),
              std::back_inserter(blocks));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return blocks;
}

absl::StatusOr<v1::FindBlocksResponse> Session::FindBlocks(v1::FindBlocksRequest request,
                                                           const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->swap, &v1::SwapService::Stub::FindBlocks, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::DropBlocksResponse> Session::DropBlocks(v1::DropBlocksRequest request,
                                                           const CallOptions& options) const {
  *request.mutable_session() = handle();
  const Repeat repeat = request.allow_missing() ? Repeat::kSafe : Repeat::kUnsafe;
  return core_->Call(*core_->swap, &v1::SwapService::Stub::DropBlocks, request, options, repeat);
}

absl::StatusOr<v1::ScoreBlocksResponse> Session::ScoreBlocks(v1::ScoreBlocksRequest request,
                                                             const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::ScoreBlocks, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::ScoreBlocksResponse> Session::ScoreBlocks(v1::ScoreBlocksRequest request,
                                                             absl::Span<const uint16_t> q,
                                                             const CallOptions& options) const {
  SetTensor(spec().kv_dtype(), {}, q, request.mutable_q());
  return ScoreBlocks(std::move(request), options);
}

absl::StatusOr<v1::ReadProjectedKeysResponse> Session::ReadProjectedKeys(
    v1::ReadProjectedKeysRequest request, const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::ReadProjectedKeys, request,
                     options, Repeat::kSafe);
}

absl::Status Session::DecodeStep(DecodeBatch* batch, const CallOptions& options) const {
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::DecodeStep, batch->request_,
                     &batch->response_, options, Repeat::kSafe);
}

DecodeStream Session::OpenDecodeStream(const CallOptions& options) const {
  return DecodeStream(core_, options);
}

absl::StatusOr<v1::BeginTilesResponse> Session::BeginTiles(v1::BeginTilesRequest request,
                                                           const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::BeginTiles, request, options,
                     Repeat::kUnsafe);
}

absl::StatusOr<v1::BeginTilesResponse> Session::BeginTiles(v1::BeginTilesRequest request,
                                                           absl::Span<const uint16_t> q,
                                                           const CallOptions& options) const {
  const int64_t heads = spec().num_query_heads();
  const int64_t head_dim = spec().head_dim();
  // Nothing else in the request says how many rows there are.
  const int64_t rows = static_cast<int64_t>(q.size()) / (heads * head_dim);
  SetTensor(spec().kv_dtype(), {rows, heads, head_dim}, q, request.mutable_q());
  return BeginTiles(std::move(request), options);
}

absl::StatusOr<v1::StepTileResponse> Session::StepTile(v1::StepTileRequest request,
                                                       const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::StepTile, request, options,
                     Repeat::kSafe);
}

absl::StatusOr<v1::FinalizeTilesResponse> Session::FinalizeTiles(v1::FinalizeTilesRequest request,
                                                                 const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::FinalizeTiles, request,
                     options, Repeat::kUnsafe);
}

absl::StatusOr<v1::AbortTilesResponse> Session::AbortTiles(v1::AbortTilesRequest request,
                                                           const CallOptions& options) const {
  *request.mutable_session() = handle();
  return core_->Call(*core_->attention, &v1::AttentionService::Stub::AbortTiles, request, options,
                     Repeat::kSafe);
}

}  // namespace sluice::client
