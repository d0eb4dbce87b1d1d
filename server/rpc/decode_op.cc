#include "server/rpc/decode_op.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/status.h"

namespace sluice {

absl::Status ParseOutput(const v1::OutputOptions& output, const Session& session,
                         DType* out_dtype) {
  SLUICE_RETURN_IF_ERROR(
      FromProto(output.dtype(), "output.dtype", session.spec().kv_dtype, out_dtype));
  if (*out_dtype != DType::kF32 && *out_dtype != session.spec().kv_dtype) {
    return InvalidField("output.dtype", v1::Dtype_Name(output.dtype()),
                        absl::StrCat(v1::Dtype_Name(ToProto(session.spec().kv_dtype)),
                                     ", the session's kv_dtype, or DTYPE_F32"));
  }
  return absl::OkStatus();
}

absl::Status DecodeOp::Parse(const Request& request, const Session& session,
                             const Admission& admission) {
  const SessionSpec& spec = session.spec();
  layer = request.layer();
  parsed_sequences_.resize(static_cast<size_t>(request.sequences_size()));
  int64_t num_rows = 0;
  for (int i = 0; i < request.sequences_size(); ++i) {
    const v1::DecodeSequence& from = request.sequences(i);
    DecodeSequence& to = parsed_sequences_[static_cast<size_t>(i)];
    to.sequence_id = from.sequence_id();
    to.generation = from.generation();
    to.query_tokens = from.query_tokens() == 0 ? 1 : from.query_tokens();
    to.context_tokens = from.context_tokens();
    to.has_update = from.has_update();
    if (to.has_update) {
      to.update = FromProto(from.update());
      if (to.update.sequence_id != 0 && to.update.sequence_id != to.sequence_id) {
        return InvalidField(absl::StrCat("sequences[", i, "].update.sequence_id"),
                            to.update.sequence_id, absl::StrCat("0 or ", to.sequence_id));
      }
      to.update.sequence_id = to.sequence_id;
    }
    // One out of range is refused as such by the session; here it only must not make a reply look
    // large.
    if (to.query_tokens <= kMaxQueryTokens) num_rows += to.query_tokens;
  }
  sequences = parsed_sequences_;
  q = ViewOf(request.has_q(), request.q());
  k = ViewOf(request.has_k(), request.k());
  v = ViewOf(request.has_v(), request.v());
  attention = FromProto(request.options());
  SLUICE_RETURN_IF_ERROR(ParseOutput(request.output(), session, &out_dtype));
  return_lse = request.output().return_lse();

  const int64_t head_bytes = spec.head_dim * DTypeBytes(out_dtype) +
                             (return_lse ? static_cast<int64_t>(sizeof(float)) : 0);
  return admission.CheckReply(num_rows * spec.num_query_heads * head_bytes + kReplyOverheadBytes);
}

absl::Status DecodeOp::Reply(const Session& session, Response* response) {
  const SessionSpec& spec = session.spec();
  SetTensor(out_dtype, {rows, spec.num_query_heads, spec.head_dim}, out, response->mutable_out());
  if (return_lse) {
    SetTensor({rows, spec.num_query_heads}, lse, response->mutable_lse());
  } else {
    response->clear_lse();
  }
  SetLength(static_cast<int64_t>(sequence_status.size()), response->mutable_sequences());
  for (size_t i = 0; i < sequence_status.size(); ++i) {
    v1::SequenceResult* result = response->mutable_sequences(static_cast<int>(i));
    if (sequence_status[i].ok()) {
      result->clear_status();
    } else {
      ToRpcStatus(sequence_status[i], result->mutable_status());
    }
  }
  v1::StepStats* to = response->mutable_stats();
  to->set_hbm_blocks(stats.hbm_blocks);
  to->set_host_blocks(stats.host_blocks);
  to->set_hbm_bytes(stats.hbm_bytes);
  to->set_host_bytes(stats.host_bytes);
  to->set_queued_us(stats.queued_us);
  to->set_device_us(stats.device_us);
  to->set_total_us(stats.total_us);
  return absl::OkStatus();
}

}  // namespace sluice
