#include "client/decode.h"

#include <mutex>
#include <utility>

#include "client/core.h"
#include "client/status.h"
#include "client/tensor.h"

namespace sluice::client {

DecodeBatch::DecodeBatch(const Session& session)
    : handle_(session.handle()), kv_dtype_(session.spec().kv_dtype()) {
  Clear();
}

void DecodeBatch::Clear() {
  request_.Clear();
  *request_.mutable_session() = handle_;
}

v1::DecodeSequence* DecodeBatch::AddSequence(uint32_t sequence_id, int64_t context_tokens,
                                             uint32_t query_tokens) {
  v1::DecodeSequence* sequence = request_.add_sequences();
  sequence->set_sequence_id(sequence_id);
  sequence->set_context_tokens(context_tokens);
  sequence->set_query_tokens(query_tokens);
  return sequence;
}

void DecodeBatch::SetQ(absl::Span<const uint16_t> q) {
  SetTensor(kv_dtype_, {}, q, request_.mutable_q());
}

void DecodeBatch::SetKv(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  SetTensor(kv_dtype_, {}, k, request_.mutable_k());
  SetTensor(kv_dtype_, {}, v, request_.mutable_v());
}

void DecodeBatch::ClearKv() {
  request_.clear_k();
  request_.clear_v();
}

absl::Span<const uint16_t> DecodeBatch::out() const {
  if (response_.out().dtype() == v1::DTYPE_F32) return {};
  return Bits(response_.out());
}

absl::Span<const float> DecodeBatch::out_f32() const {
  if (response_.out().dtype() != v1::DTYPE_F32) return {};
  return Floats(response_.out());
}

absl::Span<const float> DecodeBatch::lse() const { return Floats(response_.lse()); }

absl::Status DecodeBatch::SequenceStatus(int index) const {
  if (index < 0 || index >= response_.sequences_size()) {
    return absl::InternalError("the reply has no such sequence");
  }
  const v1::SequenceResult& result = response_.sequences(index);
  return result.has_status() ? FromRpcStatus(result.status()) : absl::OkStatus();
}

absl::Status DecodeBatch::FirstSequenceError() const {
  for (int i = 0; i < response_.sequences_size(); ++i) {
    if (absl::Status status = SequenceStatus(i); !status.ok()) return status;
  }
  return absl::OkStatus();
}

struct DecodeStream::Impl {
  // Before `stream`, which uses both to its end.
  std::shared_ptr<Core> core;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeStreamRequest, v1::DecodeStreamResponse>>
      stream;

  // Of the sending thread.
  v1::DecodeStreamRequest request;
  bool sends_done = false;
  // Of the receiving thread.
  v1::DecodeStreamResponse response;

  // Who notices first that the stream has ended asks for its status; gRPC tells it once.
  std::mutex mutex;
  bool finished = false;
  absl::Status final_status;

  absl::Status FinalStatus() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!finished) {
      final_status = FromGrpcStatus(stream->Finish());
      finished = true;
    }
    return final_status;
  }
};

DecodeStream::DecodeStream(std::shared_ptr<Core> core, const CallOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->core = std::move(core);
  SetDeadline(options.timeout, &impl_->context);
  impl_->stream = impl_->core->attention->DecodeStream(&impl_->context);
}

DecodeStream::DecodeStream(DecodeStream&&) noexcept = default;

DecodeStream& DecodeStream::operator=(DecodeStream&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

DecodeStream::~DecodeStream() {
  if (impl_ == nullptr || impl_->finished) return;
  impl_->context.TryCancel();
  impl_->FinalStatus().IgnoreError();
}

absl::Status DecodeStream::Send(uint64_t request_id, DecodeBatch* batch, absl::Duration timeout) {
  v1::DecodeStreamRequest& request = impl_->request;
  request.set_request_id(request_id);
  if (timeout == absl::InfiniteDuration()) {
    request.clear_timeout();
  } else {
    request.mutable_timeout()->set_seconds(absl::IDivDuration(timeout, absl::Seconds(1), &timeout));
    request.mutable_timeout()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(timeout)));
  }
  // Both have their memory on the heap, so that this swaps pointers.
  request.mutable_step()->Swap(&batch->request_);
  const bool sent = impl_->stream->Write(request);
  request.mutable_step()->Swap(&batch->request_);
  if (sent) return absl::OkStatus();
  // Its status is known once what was received is read, which is for the receiving thread to do.
  return absl::UnavailableError("the stream has ended; Receive and Finish say why");
}

absl::StatusOr<DecodeReply> DecodeStream::Receive(DecodeBatch* batch) {
  v1::DecodeStreamResponse& response = impl_->response;
  if (!impl_->stream->Read(&response)) {
    absl::Status status = impl_->FinalStatus();
    if (!status.ok()) return status;
    return absl::OutOfRangeError("the stream has ended");
  }
  DecodeReply reply;
  reply.request_id = response.request_id();
  if (response.has_status()) reply.status = FromRpcStatus(response.status());
  batch->response_.Swap(response.mutable_step());
  return reply;
}

void DecodeStream::SendsDone() {
  if (std::exchange(impl_->sends_done, true)) return;
  impl_->stream->WritesDone();
}

absl::Status DecodeStream::Finish() {
  if (!impl_->finished) {
    SendsDone();
    while (impl_->stream->Read(&impl_->response)) {
    }
  }
  return impl_->FinalStatus();
}

void DecodeStream::Cancel() { impl_->context.TryCancel(); }

}  // namespace sluice::client
