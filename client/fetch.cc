#include "client/fetch.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/core.h"
#include "client/tensor.h"

namespace sluice::client {

struct FetchReader::Impl {
  // Before `stream`, which uses both to its end.
  std::shared_ptr<Core> core;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::FetchBlocksResponse>> stream;

  int64_t block_elements = 0;
  v1::FetchBlocksResponse response;
  int next_index = 0;  // in response
  std::optional<FetchedBlock> block;
  bool at_end = false;
  bool finished = false;
  absl::Status malformed;
  absl::Status final_status;

  // Reads messages until one has blocks. False: no more.
  bool ReadMessage() {
    do {
      if (!stream->Read(&response)) return false;
    } while (response.blocks_size() == 0);
    next_index = 0;
    const auto expected = static_cast<size_t>(response.blocks_size() * block_elements);
    const size_t k_elements = Bits(response.k()).size();
    const size_t v_elements = Bits(response.v()).size();
    if (k_elements == expected && v_elements == expected) return true;
    malformed = absl::InternalError(absl::StrCat(
        "the daemon sent ", k_elements, " elements of K and ", v_elements, " of V for ",
        response.blocks_size(), " blocks; expected: ", expected, " each"));
    context.TryCancel();
    return false;
  }
};

FetchReader::FetchReader(std::shared_ptr<Core> core, const v1::FetchBlocksRequest& request,
                         int64_t block_elements, const CallOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->core = std::move(core);
  impl_->block_elements = block_elements;
  SetDeadline(options.timeout, &impl_->context);
  impl_->stream = impl_->core->swap->FetchBlocks(&impl_->context, request);
}

FetchReader::FetchReader(FetchReader&&) noexcept = default;

FetchReader& FetchReader::operator=(FetchReader&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}

FetchReader::~FetchReader() {
  if (impl_ != nullptr) Finish().IgnoreError();
}

const FetchedBlock* FetchReader::Next() {
  if (impl_->at_end) return nullptr;
  if (impl_->next_index == impl_->response.blocks_size() && !impl_->ReadMessage()) {
    impl_->at_end = true;
    return nullptr;
  }
  const int64_t elements = impl_->block_elements;
  const int64_t offset = impl_->next_index * elements;
  const v1::FetchBlocksResponse& response = impl_->response;
  impl_->block.emplace(FetchedBlock{response.blocks(impl_->next_index),
                                    Bits(response.k()).subspan(offset, elements),
                                    Bits(response.v()).subspan(offset, elements)});
  ++impl_->next_index;
  return &*impl_->block;
}

absl::Status FetchReader::Finish() {
  if (!std::exchange(impl_->finished, true)) {
    if (!impl_->at_end) impl_->context.TryCancel();
    while (!impl_->at_end && impl_->stream->Read(&impl_->response)) {
    }
    const bool cut_short = !std::exchange(impl_->at_end, true);
    impl_->final_status = FromGrpcStatus(impl_->stream->Finish());
    if (!impl_->malformed.ok()) {
      impl_->final_status = impl_->malformed;
    } else if (cut_short && impl_->final_status.ok()) {
      impl_->final_status = absl::CancelledError("the fetch was finished before its last block");
    }
  }
  return impl_->final_status;
}

}  // namespace sluice::client
