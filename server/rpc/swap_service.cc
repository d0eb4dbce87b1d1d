#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/fetch_stream.h"
#include "server/rpc/offload_op.h"
#include "server/rpc/offload_stream.h"
#include "server/rpc/page_token.h"
#include "server/rpc/services.h"
#include "server/rpc/submit_rpc.h"
#include "server/rpc/unary.h"
#include "sluice/v1/swap.grpc.pb.h"

namespace sluice {
namespace {

constexpr int64_t kDefaultPageSize = 1000;
constexpr int64_t kMaxPageSize = 10'000;

using Base = v1::SwapService::WithRawCallbackMethod_OffloadBlocks<
    v1::SwapService::WithRawCallbackMethod_OffloadStream<
        v1::SwapService::WithRawCallbackMethod_FetchBlocks<
            v1::SwapService::WithRawCallbackMethod_DescribeBlocks<
                v1::SwapService::WithRawCallbackMethod_ListBlocks<
                    v1::SwapService::WithRawCallbackMethod_FindBlocks<
                        v1::SwapService::WithRawCallbackMethod_DropBlocks<
                            v1::SwapService::Service>>>>>>>;

// What a ListBlocks request lists, pages apart.
std::string ScopeOf(const v1::ListBlocksRequest& request) {
  return absl::StrCat(request.session().name(), "|", request.tier(), "|",
                      absl::StrJoin(request.layers(), ","));
}

std::string EncodeCursor(const std::string& scope, const Session::BlockCursor& cursor) {
  return EncodePageToken(PageKind::kBlocks, scope,
                         absl::StrCat(cursor.layer, ":", cursor.block_id));
}

absl::StatusOr<Session::BlockCursor> DecodeCursor(const std::string& scope,
                                                  const std::string& page_token) {
  SLUICE_ASSIGN_OR_RETURN(const std::string text,
                          DecodePageToken(PageKind::kBlocks, scope, page_token));
  Session::BlockCursor cursor;
  if (text.empty()) return cursor;
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, ':');
  if (!absl::SimpleAtoi(parts.first, &cursor.layer) ||
      !absl::SimpleAtoi(parts.second, &cursor.block_id)) {
    return InvalidField("page_token", page_token, "next_page_token of the page before");
  }
  return cursor;
}

void AddBlocks(const std::vector<BlockInfo>& infos,
               google::protobuf::RepeatedPtrField<v1::BlockInfo>* out) {
  out->Reserve(static_cast<int>(infos.size()));
  for (const BlockInfo& info : infos) ToProto(info, out->Add());
}

class SwapServiceImpl final : public Base {
 public:
  explicit SwapServiceImpl(ServiceContext* context) : context_(*context), offload_(context) {}

  grpc::ServerUnaryReactor* OffloadBlocks(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request_bytes,
                                          grpc::ByteBuffer* reply_bytes) override {
    return offload_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* OffloadStream(
      grpc::CallbackServerContext*) override {
    return NewOffloadStream(&context_);
  }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* FetchBlocks(
      grpc::CallbackServerContext*, const grpc::ByteBuffer* request_bytes) override {
    return NewFetchStream(&context_, request_bytes);
  }

  grpc::ServerUnaryReactor* DescribeBlocks(grpc::CallbackServerContext* call,
                                           const grpc::ByteBuffer* request_bytes,
                                           grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::DescribeBlocksRequest, v1::DescribeBlocksResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::DescribeBlocksRequest& request,
               v1::DescribeBlocksResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(const std::vector<BlockInfo> infos,
                                  session->DescribeBlocks(FromProto(request.blocks())));
          AddBlocks(infos, response->mutable_blocks());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ListBlocks(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::ListBlocksRequest, v1::ListBlocksResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::ListBlocksRequest& request,
               v1::ListBlocksResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(const int64_t page_size,
                                  PageSize(request.page_size(), kDefaultPageSize, kMaxPageSize));
          SLUICE_ASSIGN_OR_RETURN(const Session::BlockCursor cursor,
                                  DecodeCursor(ScopeOf(request), request.page_token()));
          Tier tier = Tier::kNone;
          SLUICE_RETURN_IF_ERROR(FromProto(request.tier(), "tier", &tier));
          SLUICE_ASSIGN_OR_RETURN(
              const Session::BlockPage page,
              session->ListBlocks(SpanOf(request.layers()), tier, cursor, page_size));
          AddBlocks(page.blocks, response->mutable_blocks());
          if (page.more) {
            response->set_next_page_token(EncodeCursor(ScopeOf(request), page.next));
          }
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* FindBlocks(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::FindBlocksRequest, v1::FindBlocksResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::FindBlocksRequest& request,
               v1::FindBlocksResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          const std::vector<std::string> tags(request.tags().begin(), request.tags().end());
          SLUICE_ASSIGN_OR_RETURN(const std::vector<BlockInfo> infos,
                                  session->FindBlocks(tags, SpanOf(request.layers())));
          AddBlocks(infos, response->mutable_blocks());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* DropBlocks(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return Answer<v1::DropBlocksRequest, v1::DropBlocksResponse>(
        context_, call, request_bytes, reply_bytes,
        [this](const v1::DropBlocksRequest& request,
               v1::DropBlocksResponse* response) -> absl::Status {
          SLUICE_ASSIGN_OR_RETURN(const auto session, context_.FindSession(request.session()));
          SLUICE_ASSIGN_OR_RETURN(
              const Session::DropResult result,
              session->DropBlocks(FromProto(request.blocks()), request.allow_missing()));
          response->set_dropped_blocks(result.dropped_blocks);
          response->set_freed_bytes(result.freed_bytes);
          return absl::OkStatus();
        });
  }

 private:
  ServiceContext& context_;
  SubmitRpc<OffloadOp> offload_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewSwapService(ServiceContext* context) {
  return std::make_unique<SwapServiceImpl>(context);
}

}  // namespace sluice
