#include "server/rpc/tile_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/decode_op.h"

namespace sluice {

absl::Status BeginTilesOp::Parse(const Request& request, const Session&, const Admission&) {
  layer = request.layer();
  q = ViewOf(request.has_q(), request.q());
  num_rows = q.shape.empty() ? 0 : q.shape[0];
  attention = FromProto(request.options());
  timeout = absl::ZeroDuration();
  if (request.has_timeout()) {
    SLUICE_RETURN_IF_ERROR(FromProto(request.timeout(), "timeout", &timeout));
    // Zero means the default to the session; a client that says zero means zero.
    if (timeout <= absl::ZeroDuration()) {
      return InvalidField("timeout", absl::FormatDuration(timeout), "1 ms .. 1 h");
    }
  }
  return absl::OkStatus();
}

absl::Status BeginTilesOp::Reply(const Session&, Response* response) {
  response->set_run_id(run_id);
  return absl::OkStatus();
}

absl::Status StepTileOp::Parse(const Request& request, const Session&, const Admission&) {
  run_id = request.run_id();
  tile_index = request.tile_index();
  parsed_rows_.resize(static_cast<size_t>(request.rows_size()));
  for (int i = 0; i < request.rows_size(); ++i) {
    TileRow& row = parsed_rows_[static_cast<size_t>(i)];
    row.block_ids = SpanOf(request.rows(i).block_ids());
    row.last_block_valid_tokens = request.rows(i).last_block_valid_tokens();
  }
  rows = parsed_rows_;
  return absl::OkStatus();
}

absl::Status StepTileOp::Reply(const Session&, Response* response) {
  response->set_folded(folded);
  return absl::OkStatus();
}

absl::Status FinalizeTilesOp::Parse(const Request& request, const Session& session,
                                    const Admission& admission) {
  run_id = request.run_id();
  SLUICE_RETURN_IF_ERROR(ParseOutput(request.output(), session, &out_dtype));
  return_lse = request.output().return_lse();
  return_state = request.return_state();
  max_result_bytes = std::max<int64_t>(1, admission.max_message_bytes() - 4 * kReplyOverheadBytes);
  return absl::OkStatus();
}

absl::Status FinalizeTilesOp::Reply(const Session& session, Response* response) {
  const int64_t heads = session.spec().num_query_heads;
  const int64_t head_dim = session.spec().head_dim;
  SetTensor(out_dtype, {rows, heads, head_dim}, out, response->mutable_out());
  if (return_lse) {
    SetTensor({rows, heads}, lse, response->mutable_lse());
  } else {
    response->clear_lse();
  }
  if (return_state) {
    SetTensor({rows, heads}, state_m, response->mutable_state_m());
    SetTensor({rows, heads}, state_l, response->mutable_state_l());
    SetTensor({rows, heads, head_dim}, state_o, response->mutable_state_o());
  } else {
    response->clear_state_m();
    response->clear_state_l();
    response->clear_state_o();
  }
  return absl::OkStatus();
}

absl::Status AbortTilesOp::Parse(const Request& request, const Session&, const Admission&) {
  run_id = request.run_id();
  return absl::OkStatus();
}

absl::Status AbortTilesOp::Reply(const Session&, Response*) { return absl::OkStatus(); }

}  // namespace sluice
