#include "server/rpc/fetch_stream.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/status.h"
#include "server/rpc/unary.h"
#include "server/rpc/wire.h"
#include "sluice/v1/swap.pb.h"

namespace sluice {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Blocks that are looked at in one go before anything is sent.
constexpr size_t kCheckedAtOnce = 4096;

// What stands before the bytes of a tensor in a message: the tensor's own field, its head, and its
// data's field.
std::string TensorPrefix(int field, DType dtype, absl::Span<const int64_t> shape,
                         size_t data_bytes) {
  v1::Tensor head;
  head.set_dtype(ToProto(dtype));
  head.mutable_shape()->Add(shape.begin(), shape.end());
  std::string data_tag;
  std::string prefix;
  {
    google::protobuf::io::StringOutputStream stream(&data_tag);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.WriteTag(WireFormatLite::MakeTag(v1::Tensor::kDataFieldNumber,
                                         WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    out.WriteVarint64(data_bytes);
  }
  {
    google::protobuf::io::StringOutputStream stream(&prefix);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    out.WriteVarint64(head.ByteSizeLong() + data_tag.size() + data_bytes);
    head.SerializeToCodedStream(&out);
  }
  return prefix + data_tag;
}

// Every id once, in range, and stored in every layer; the first that is not there is named.
absl::Status CheckFetchable(const Session& session, absl::Span<const uint32_t> layers,
                            absl::Span<const uint32_t> block_ids) {
  const SessionSpec& spec = session.spec();
  if (block_ids.empty()) return InvalidField("blocks.block_ids", "empty", "at least one id");
  if (static_cast<int64_t>(layers.size()) > spec.num_layers) {
    return InvalidField("blocks.layers", absl::StrCat(layers.size(), " layers"),
                        absl::StrCat("at most ", spec.num_layers));
  }
  std::vector<bool> seen(static_cast<size_t>(spec.max_blocks));
  for (size_t i = 0; i < block_ids.size(); ++i) {
    if (block_ids[i] >= spec.max_blocks) {
      return InvalidField(absl::StrCat("blocks.block_ids[", i, "]"), block_ids[i],
                          absl::StrCat("0..", spec.max_blocks - 1));
    }
    if (seen[block_ids[i]]) {
      return InvalidField(absl::StrCat("blocks.block_ids[", i, "]"), block_ids[i], "no id twice");
    }
    seen[block_ids[i]] = true;
  }
  for (const uint32_t layer : layers) {
    for (size_t first = 0; first < block_ids.size(); first += kCheckedAtOnce) {
      SLUICE_ASSIGN_OR_RETURN(
          const std::vector<BlockInfo> infos,
          session.DescribeBlocks({{&layer, 1}, block_ids.subspan(first, kCheckedAtOnce)}));
      for (const BlockInfo& info : infos) {
        if (info.state == BlockState::kStored) continue;
        return Error(absl::StatusCode::kNotFound, Reason::kBlockNotFound,
                     absl::StrCat("block ", info.block_id, " of layer ", info.layer,
                                  " is not stored"))
            .Meta("layer", info.layer)
            .Meta("block_id", info.block_id)
            .Resource("block", absl::StrCat(info.layer, "/", info.block_id));
      }
    }
  }
  return absl::OkStatus();
}

class FetchStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public OpenStream {
 public:
  FetchStream(ServiceContext* context, const grpc::ByteBuffer* request_bytes)
      : context_(*context), pieces_{{Piece(this), Piece(this)}} {
    context_.admission().AddStream(this);
    absl::Status status = Prepare(request_bytes);
    Actions actions;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure_ = std::move(status);
      actions = Decide();
    }
    Act(actions);
  }

  void OnWriteDone(bool ok) override {
    Actions actions;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      writing_ = false;
      Piece& piece = pieces_[num_written_++ % pieces_.size()];
      piece.message.Clear();
      piece.ready = false;
      if (!ok) gone_ = true;
      actions = Decide();
    }
    Act(actions);
  }

  void OnCancel() override {
    Actions actions;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      gone_ = true;
      actions = Decide();
    }
    Act(actions);
  }

  // A fetch that runs is finished, within the grace that the daemon gives.
  void Drain() override {}

  void OnDone() override {
    if (session_ != nullptr) session_->LeaveStream();
    context_.admission().RemoveStream(this);
    delete this;
  }

 private:
  struct Piece final : public FetchCall {
    explicit Piece(FetchStream* owner) : owner(owner) {}
    Piece(Piece&& other) noexcept : owner(other.owner) {}
    void Done() override { owner->Fetched(this); }

    FetchStream* const owner;
    grpc::Slice k_slice;
    grpc::Slice v_slice;
    grpc::ByteBuffer message;
    bool ready = false;
  };
  struct Actions {
    Piece* fetch = nullptr;
    Piece* write = nullptr;
    bool finish = false;
  };

  absl::Status Prepare(const grpc::ByteBuffer* request_bytes) {
    SLUICE_RETURN_IF_ERROR(
        context_.admission().Admit(static_cast<int64_t>(request_bytes->Length()), &ticket_));
    SLUICE_RETURN_IF_ERROR(ParseMessage(Consume(request_bytes), &request_));
    SLUICE_ASSIGN_OR_RETURN(session_, context_.FindSession(request_.session()));
    session_->EnterStream();
    const SessionSpec& spec = session_->spec();
    layers_.assign(request_.blocks().layers().begin(), request_.blocks().layers().end());
    if (layers_.empty()) {
      for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
        layers_.push_back(static_cast<uint32_t>(layer));
      }
    }
    SLUICE_RETURN_IF_ERROR(
        context_.admission().CheckReply(session_->slot_bytes() + kBlockInfoBytes));
    SLUICE_RETURN_IF_ERROR(
        CheckFetchable(*session_, layers_, SpanOf(request_.blocks().block_ids())));
    const int64_t piece_bytes = std::min(kPieceBytes, context_.admission().max_message_bytes());
    piece_blocks_ = static_cast<size_t>(
        std::max<int64_t>(1, piece_bytes / (session_->slot_bytes() + kBlockInfoBytes)));
    return absl::OkStatus();
  }

  // What can be done now, marked as begun; the lock is held.
  Actions Decide() {
    Actions actions;
    if (finished_) return actions;
    const bool failed = gone_ || !failure_.ok();
    if (!gone_ && !writing_ && num_written_ < num_fetched_) {
      Piece& piece = pieces_[num_written_ % pieces_.size()];
      if (piece.ready) {
        actions.write = &piece;
        writing_ = true;
      }
    }
    if (!failed && !fetching_ && layer_index_ < layers_.size() &&
        num_fetched_ - num_written_ < pieces_.size()) {
      actions.fetch = &pieces_[num_fetched_ % pieces_.size()];
      fetching_ = true;
    }
    const bool all_fetched = failed || layer_index_ == layers_.size();
    if (all_fetched && !fetching_ && !writing_ && (gone_ || num_written_ == num_fetched_)) {
      finished_ = true;
      actions.finish = true;
    }
    return actions;
  }

  // Without the lock; the stream may be gone afterwards.
  void Act(const Actions& actions) {
    if (actions.finish) {
      Finish(ToGrpcStatus(
          gone_ ? Error(absl::StatusCode::kCancelled, Reason::kCancelled, "the client went away")
                      .Build()
                : failure_));
      return;
    }
    // The fetch goes first: while a write is outstanding, its end cannot end the stream.
    Piece* const write = actions.write;
    if (actions.fetch != nullptr) Fetch(actions.fetch);
    if (write != nullptr) StartWrite(&write->message);
  }

  void Fetch(Piece* piece) {
    const absl::Span<const uint32_t> ids = SpanOf(request_.blocks().block_ids());
    piece->layer = layers_[layer_index_];
    piece->block_ids = ids.subspan(block_index_, piece_blocks_);
    const size_t half_bytes =
        piece->block_ids.size() * static_cast<size_t>(session_->slot_bytes() / 2);
    piece->k_slice = grpc::Slice(half_bytes);
    piece->v_slice = grpc::Slice(half_bytes);
    // Nobody else has the slices yet, so that they may be written to.
    piece->k = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(piece->k_slice.begin()));
    piece->v = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(piece->v_slice.begin()));
    session_->Fetch(piece);
  }

  void Fetched(Piece* piece) {
    if (piece->status().ok()) MakeMessage(piece);
    Actions actions;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fetching_ = false;
      if (piece->status().ok()) {
        piece->ready = true;
        ++num_fetched_;
        block_index_ += piece->block_ids.size();
        if (block_index_ == static_cast<size_t>(request_.blocks().block_ids_size())) {
          block_index_ = 0;
          ++layer_index_;
        }
      } else {
        failure_ = piece->status();
      }
      actions = Decide();
    }
    Act(actions);
  }

  void MakeMessage(Piece* piece) {
    const SessionSpec& spec = session_->spec();
    v1::FetchBlocksResponse head;
    for (const BlockInfo& info : piece->info) ToProto(info, head.add_blocks());
    const std::array<int64_t, 4> shape = {static_cast<int64_t>(piece->block_ids.size()),
                                          spec.block_tokens, spec.num_kv_heads, spec.head_dim};
    const std::array<grpc::Slice, 4> slices = {
        grpc::Slice(head.SerializeAsString() + TensorPrefix(v1::FetchBlocksResponse::kKFieldNumber,
                                                            spec.kv_dtype, shape,
                                                            piece->k_slice.size())),
        std::move(piece->k_slice),
        grpc::Slice(TensorPrefix(v1::FetchBlocksResponse::kVFieldNumber, spec.kv_dtype, shape,
                                 piece->v_slice.size())),
        std::move(piece->v_slice)};
    piece->message = grpc::ByteBuffer(slices.data(), slices.size());
  }

  // A BlockInfo with the longest tag, at most.
  static constexpr int64_t kBlockInfoBytes = 128;

  ServiceContext& context_;
  Admission::Ticket ticket_;
  v1::FetchBlocksRequest request_;
  std::shared_ptr<Session> session_;
  std::vector<uint32_t> layers_;
  size_t piece_blocks_ = 1;

  std::mutex mutex_;
  std::array<Piece, 2> pieces_;
  uint64_t num_fetched_ = 0;
  uint64_t num_written_ = 0;
  size_t layer_index_ = 0;  // of the next piece; changed only while no fetch runs
  size_t block_index_ = 0;
  absl::Status failure_;
  bool fetching_ = false;
  bool writing_ = false;
  bool gone_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* NewFetchStream(ServiceContext* context,
                                                           const grpc::ByteBuffer* request_bytes) {
  return new FetchStream(context, request_bytes);
}

}  // namespace sluice
