#include "client/offload.h"

#include <algorithm>
#include <string>
#include <utility>

#include "client/core.h"
#include "client/status.h"
#include "client/tensor.h"

namespace sluice::client {

OffloadBatch::OffloadBatch(const Session& session)
    : handle_(session.handle()), kv_dtype_(session.spec().kv_dtype()) {
  Clear();
}

void OffloadBatch::Clear() {
  request_.Clear();
  *request_.mutable_session() = handle_;
}

void OffloadBatch::AddBlock(uint32_t layer, uint32_t block_id, uint32_t valid_tokens,
                            absl::string_view tag) {
  v1::OffloadBlock* block = request_.add_blocks();
  block->set_layer(layer);
  block->set_block_id(block_id);
  block->set_valid_tokens(valid_tokens);
  block->set_tag(tag.data(), tag.size());
}

void OffloadBatch::SetKv(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  SetTensor(kv_dtype_, {}, k, request_.mutable_k());
  SetTensor(kv_dtype_, {}, v, request_.mutable_v());
}

struct OffloadWriter::Impl {
  // Before `stream`, which uses both to its end.
  std::shared_ptr<Core> core;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::OffloadStreamRequest, v1::OffloadStreamResponse>>
      stream;

  OffloadWriterOptions options;
  v1::OffloadStreamRequest request;
  v1::OffloadStreamResponse response;
  uint64_t next_batch_id = 0;
  int64_t unacked = 0;
  v1::OffloadBlocksResponse total;
  absl::Status first_batch_error;
  bool finished = false;
  absl::Status final_status;

  absl::Status FinishStream() {
    if (!std::exchange(finished, true)) final_status = FromGrpcStatus(stream->Finish());
    return final_status;
  }

  // Waits for one ack. False: the stream has ended.
  bool ReadAck() {
    if (!stream->Read(&response)) return false;
    --unacked;
    OffloadAck ack;
    ack.batch_id = response.batch_id();
    if (response.has_status()) ack.status = FromRpcStatus(response.status());
    if (ack.status.ok()) {
      ack.result.Swap(response.mutable_result());
      total.set_stored_blocks(total.stored_blocks() + ack.result.stored_blocks());
      total.set_predicted_blocks(total.predicted_blocks() + ack.result.predicted_blocks());
      total.set_stored_bytes(total.stored_bytes() + ack.result.stored_bytes());
      total.set_replaced_blocks(total.replaced_blocks() + ack.result.replaced_blocks());
    } else if (first_batch_error.ok()) {
      first_batch_error = ack.status;
    }
    if (options.on_ack) options.on_ack(ack);
    return true;
  }

  // Why a stream that was not to end has ended.
  absl::Status Failure() {
    absl::Status status = FinishStream();
    return status.ok() ? absl::InternalError("the daemon ended the stream") : status;
  }
};

OffloadWriter::OffloadWriter(std::shared_ptr<Core> core, const OffloadWriterOptions& writer_options,
                             const CallOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->core = std::move(core);
  impl_->options = writer_options;
  SetDeadline(options.timeout, &impl_->context);
  impl_->stream = impl_->core->swap->OffloadStream(&impl_->context);
}

OffloadWriter::OffloadWriter(OffloadWriter&&) noexcept = default;

OffloadWriter& OffloadWriter::operator=(OffloadWriter&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

OffloadWriter::~OffloadWriter() {
  if (impl_ == nullptr || impl_->finished) return;
  impl_->context.TryCancel();
  impl_->FinishStream().IgnoreError();
}

absl::StatusOr<uint64_t> OffloadWriter::Write(OffloadBatch* batch) {
  if (impl_->finished) return absl::FailedPreconditionError("the stream was finished");
  while (impl_->unacked >= std::max(impl_->options.max_unacked_batches, 1)) {
    if (!impl_->ReadAck()) return impl_->Failure();
  }
  v1::OffloadStreamRequest& request = impl_->request;
  const uint64_t batch_id = impl_->next_batch_id++;
  request.set_batch_id(batch_id);
  // Both have their memory on the heap, so that this swaps pointers.
  request.mutable_batch()->Swap(batch->mutable_request());
  const bool sent = impl_->stream->Write(request);
  request.mutable_batch()->Swap(batch->mutable_request());
  if (!sent) {
    while (impl_->ReadAck()) {
    }
    return impl_->Failure();
  }
  ++impl_->unacked;
  return batch_id;
}

absl::Status OffloadWriter::Finish() {
  if (!impl_->finished) {
    impl_->stream->WritesDone();
    while (impl_->ReadAck()) {
    }
  }
  absl::Status status = impl_->FinishStream();
  if (!status.ok()) return status;
  if (!impl_->first_batch_error.ok()) return impl_->first_batch_error;
  if (impl_->unacked > 0) return absl::InternalError("the daemon left batches unacknowledged");
  return absl::OkStatus();
}

int64_t OffloadWriter::unacked_batches() const { return impl_->unacked; }

const v1::OffloadBlocksResponse& OffloadWriter::total() const { return impl_->total; }

}  // namespace sluice::client
