#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/page_token.h"
#include "server/rpc/services.h"
#include "server/rpc/unary.h"
#include "sluice/v1/sequence.grpc.pb.h"

namespace sluice {
namespace {

constexpr int64_t kDefaultPageSize = 100;
constexpr int64_t kMaxPageSize = 1000;
// Tables can be long: sequences are read a few at a time, and a page is cut before it is too large
// for a message.
constexpr int64_t kReadAtOnce = 16;

using Base = v1::SequenceService::WithRawCallbackMethod_PutSequence<
    v1::SequenceService::WithRawCallbackMethod_ForkSequence<
        v1::SequenceService::WithRawCallbackMethod_TruncateSequence<
            v1::SequenceService::WithRawCallbackMethod_ReleaseSequence<
                v1::SequenceService::WithRawCallbackMethod_ListSequences<
                    v1::SequenceService::Service>>>>>;

class SequenceServiceImpl final : public Base {
 public:
  explicit SequenceServiceImpl(ServiceContext* context) : context_(*context) {}

  grpc::ServerUnaryReactor* PutSequence(grpc::CallbackServerContext* call,
                                        const grpc::ByteBuffer* request_bytes,
                                        grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::PutSequenceRequest, v1::PutSequenceResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::PutSequenceRequest& request,
               v1::PutSequenceResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(const Session::PutResult result,
                                  session->PutSequence(FromProto(request.update())));
          response->set_num_blocks(result.num_blocks);
          response->set_reserved_blocks(result.reserved_blocks);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer* request_bytes,
                                         grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::ForkSequenceRequest, v1::ForkSequenceResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::ForkSequenceRequest& request,
               v1::ForkSequenceResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(
              const uint32_t num_blocks,
              session->ForkSequence(request.source_sequence_id(), request.source_generation(),
                                    request.target_sequence_id(), request.target_generation(),
                                    request.context_tokens()));
          response->set_num_blocks(num_blocks);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* call,
                                             const grpc::ByteBuffer* request_bytes,
                                             grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::TruncateSequenceRequest, v1::TruncateSequenceResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::TruncateSequenceRequest& request,
               v1::TruncateSequenceResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(
              const uint32_t num_blocks,
              session->TruncateSequence(request.sequence_id(), request.generation(),
                                        request.context_tokens()));
          response->set_num_blocks(num_blocks);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ReleaseSequence(grpc::CallbackServerContext* call,
                                            const grpc::ByteBuffer* request_bytes,
                                            grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::ReleaseSequenceRequest, v1::ReleaseSequenceResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::ReleaseSequenceRequest& request,
               v1::ReleaseSequenceResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(
              const int64_t dropped_blocks,
              session->ReleaseSequence(SpanOf(request.sequence_ids()), request.drop_blocks()));
          response->set_dropped_blocks(dropped_blocks);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request_bytes,
                                          grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::ListSequencesRequest, v1::ListSequencesResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::ListSequencesRequest& request, v1::ListSequencesResponse* response) {
          return List(request, response);
        });
  }

 private:
  absl::Status List(const v1::ListSequencesRequest& request, v1::ListSequencesResponse* response) {
    SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
    SLUICE_ASSIGN_OR_RETURN(const int64_t page_size,
                            PageSize(request.page_size(), kDefaultPageSize, kMaxPageSize));
    SLUICE_ASSIGN_OR_RETURN(
        const std::string cursor,
        DecodePageToken(PageKind::kSequences, request.session().name(), request.page_token()));
    uint32_t first_id = 0;
    if (!cursor.empty() && !absl::SimpleAtoi(cursor, &first_id)) {
      return InvalidField("page_token", request.page_token(), "next_page_token of the page before");
    }
    const int64_t page_bytes = context_.admission().max_message_bytes() / 2;
    int64_t listed_bytes = 0;
    while (true) {
      const std::vector<SequenceInfo> infos = session->ListSequences(first_id, kReadAtOnce);
      for (const SequenceInfo& info : infos) {
        if (response->sequences_size() == page_size || listed_bytes > page_bytes) {
          response->set_next_page_token(EncodePageToken(
              PageKind::kSequences, request.session().name(), absl::StrCat(info.sequence_id)));
          return absl::OkStatus();
        }
        v1::Sequence* const sequence = response->add_sequences();
        ToProto(info, sequence);
        listed_bytes += static_cast<int64_t>(sequence->ByteSizeLong());
        first_id = info.sequence_id + 1;
      }
      if (static_cast<int64_t>(infos.size()) < kReadAtOnce) return absl::OkStatus();
    }
  }

  ServiceContext& context_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewSequenceService(ServiceContext* context) {
  return std::make_unique<SequenceServiceImpl>(context);
}

}  // namespace sluice
