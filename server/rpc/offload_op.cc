#include "server/rpc/offload_op.h"

#include <cstddef>

#include "server/base/error.h"
#include "server/rpc/convert.h"

namespace sluice {

absl::Status OffloadOp::Parse(const Request& request, const Session&, const Admission&) {
  parsed_blocks_.resize(static_cast<size_t>(request.blocks_size()));
  for (int i = 0; i < request.blocks_size(); ++i) {
    const v1::OffloadBlock& from = request.blocks(i);
    parsed_blocks_[static_cast<size_t>(i)] = {from.layer(), from.block_id(), from.valid_tokens(),
                                              from.tag()};
  }
  blocks = parsed_blocks_;
  k = ViewOf(request.has_k(), request.k());
  v = ViewOf(request.has_v(), request.v());
  switch (request.predict()) {
    case v1::PREDICT_MODE_UNSPECIFIED:
    case v1::PREDICT_MODE_REQUIRED:
      predict = PredictMode::kRequired;
      break;
    case v1::PREDICT_MODE_BEST_EFFORT:
      predict = PredictMode::kBestEffort;
      break;
    case v1::PREDICT_MODE_OFF:
      predict = PredictMode::kOff;
      break;
    default:
      return InvalidField("predict", static_cast<int>(request.predict()),
                          "PREDICT_MODE_REQUIRED, PREDICT_MODE_BEST_EFFORT or PREDICT_MODE_OFF");
  }
  if (request.ack() != v1::ACK_LEVEL_UNSPECIFIED && request.ack() != v1::ACK_LEVEL_MEMORY) {
    return InvalidField("ack", static_cast<int>(request.ack()), "ACK_LEVEL_MEMORY");
  }
  return absl::OkStatus();
}

absl::Status OffloadOp::Reply(const Session&, Response* response) {
  response->set_stored_blocks(result.stored_blocks);
  response->set_predicted_blocks(result.predicted_blocks);
  response->set_stored_bytes(result.stored_bytes);
  response->set_replaced_blocks(result.replaced_blocks);
  return absl::OkStatus();
}

}  // namespace sluice
