#include <memory>

#include "server/rpc/decode_op.h"
#include "server/rpc/decode_stream.h"
#include "server/rpc/score_op.h"
#include "server/rpc/services.h"
#include "server/rpc/submit_rpc.h"
#include "server/rpc/tile_ops.h"
#include "sluice/v1/attention.grpc.pb.h"

namespace sluice {
namespace {

using Base = v1::AttentionService::WithRawCallbackMethod_ScoreBlocks<
    v1::AttentionService::WithRawCallbackMethod_ReadProjectedKeys<
        v1::AttentionService::WithRawCallbackMethod_DecodeStep<
            v1::AttentionService::WithRawCallbackMethod_DecodeStream<
                v1::AttentionService::WithRawCallbackMethod_BeginTiles<
                    v1::AttentionService::WithRawCallbackMethod_StepTile<
                        v1::AttentionService::WithRawCallbackMethod_FinalizeTiles<
                            v1::AttentionService::WithRawCallbackMethod_AbortTiles<
                                v1::AttentionService::Service>>>>>>>>;

class AttentionServiceImpl final : public Base {
 public:
  explicit AttentionServiceImpl(ServiceContext* context)
      : context_(*context),
        score_(context),
        read_projected_keys_(context),
        decode_(context),
        begin_tiles_(context),
        step_tile_(context),
        finalize_tiles_(context),
        abort_tiles_(context) {}

  grpc::ServerUnaryReactor* ScoreBlocks(grpc::CallbackServerContext* call,
                                        const grpc::ByteBuffer* request_bytes,
                                        grpc::ByteBuffer* reply_bytes) override {
    return score_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerUnaryReactor* ReadProjectedKeys(grpc::CallbackServerContext* call,
                                              const grpc::ByteBuffer* request_bytes,
                                              grpc::ByteBuffer* reply_bytes) override {
    return read_projected_keys_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerUnaryReactor* DecodeStep(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return decode_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* DecodeStream(
      grpc::CallbackServerContext* call) override {
    return NewDecodeStream(&context_, call);
  }

  grpc::ServerUnaryReactor* BeginTiles(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return begin_tiles_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerUnaryReactor* StepTile(grpc::CallbackServerContext* call,
                                     const grpc::ByteBuffer* request_bytes,
                                     grpc::ByteBuffer* reply_bytes) override {
    return step_tile_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerUnaryReactor* FinalizeTiles(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request_bytes,
                                          grpc::ByteBuffer* reply_bytes) override {
    return finalize_tiles_.Start(call, request_bytes, reply_bytes);
  }

  grpc::ServerUnaryReactor* AbortTiles(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request_bytes,
                                       grpc::ByteBuffer* reply_bytes) override {
    return abort_tiles_.Start(call, request_bytes, reply_bytes);
  }

 private:
  ServiceContext& context_;
  SubmitRpc<ScoreOp> score_;
  SubmitRpc<ReadProjectedKeysOp> read_projected_keys_;
  SubmitRpc<DecodeOp> decode_;
  SubmitRpc<BeginTilesOp> begin_tiles_;
  SubmitRpc<StepTileOp> step_tile_;
  SubmitRpc<FinalizeTilesOp> finalize_tiles_;
  SubmitRpc<AbortTilesOp> abort_tiles_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewAttentionService(ServiceContext* context) {
  return std::make_unique<AttentionServiceImpl>(context);
}

}  // namespace sluice
