#include "server/rpc/score_op.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "server/base/error.h"
#include "server/rpc/convert.h"

namespace sluice {
namespace {

// A score, whether it is predicted; and a TopBlock with all its tags.
constexpr int64_t kScoreBytes = 5;
constexpr int64_t kTopBlockBytes = 22;

void SetPredicted(absl::Span<const uint8_t> predicted, google::protobuf::RepeatedField<bool>* out) {
  out->Resize(static_cast<int>(predicted.size()), false);
  for (size_t i = 0; i < predicted.size(); ++i) out->Set(static_cast<int>(i), predicted[i] != 0);
}

}  // namespace

absl::Status ScoreOp::Parse(const Request& request, const Session&, const Admission& admission) {
  layer = request.layer();
  by_sequence = false;
  block_ids = {};
  switch (request.target_case()) {
    case Request::kBlocks:
      block_ids = SpanOf(request.blocks().block_ids());
      break;
    case Request::kSequenceId:
      by_sequence = true;
      sequence_id = request.sequence_id();
      break;
    case Request::TARGET_NOT_SET:
      return InvalidField("target", "not set", "blocks or sequence_id");
  }
  switch (request.kind()) {
    case v1::SCORE_KIND_UNSPECIFIED:
    case v1::SCORE_KIND_MASS:
      kind = ScoreKind::kMass;
      break;
    case v1::SCORE_KIND_MAX_DOT:
      kind = ScoreKind::kMaxDot;
      break;
    default:
      return InvalidField("kind", static_cast<int>(request.kind()),
                          "SCORE_KIND_MASS or SCORE_KIND_MAX_DOT");
  }
  q = ViewOf(request.has_q(), request.q());
  has_scale = request.has_scale();
  scale = request.scale();
  top_k = request.top_k();
  top_only_ = request.top_only();
  // A sequence's length is the session's to know; such a reply is checked when it is there.
  const auto num_blocks = static_cast<int64_t>(block_ids.size());
  return admission.CheckReply((top_only_ ? 0 : num_blocks * kScoreBytes) +
                              std::min<int64_t>(top_k, num_blocks) * kTopBlockBytes);
}

absl::Status ScoreOp::Reply(const Session&, Response* response) {
  if (top_only_) {
    response->mutable_scores()->Clear();
    response->mutable_predicted()->Clear();
  } else {
    response->mutable_scores()->Resize(static_cast<int>(scores.size()), 0);
    std::copy(scores.begin(), scores.end(), response->mutable_scores()->begin());
    SetPredicted(predicted, response->mutable_predicted());
  }
  SetLength(static_cast<int64_t>(top.size()), response->mutable_top());
  for (size_t i = 0; i < top.size(); ++i) {
    v1::TopBlock* to = response->mutable_top(static_cast<int>(i));
    to->set_index(top[i].index);
    to->set_block_id(top[i].block_id);
    to->set_score(top[i].score);
    to->set_predicted(top[i].predicted);
  }
  return absl::OkStatus();
}

absl::Status ReadProjectedKeysOp::Parse(const Request& request, const Session& session,
                                        const Admission& admission) {
  const SessionSpec& spec = session.spec();
  layer = request.layer();
  block_ids = SpanOf(request.block_ids());
  const int64_t block_bytes =
      spec.num_kv_heads * spec.block_tokens * spec.rank * DTypeBytes(DType::kBf16);
  // The flag, and a valid_tokens of at most two bytes.
  return admission.CheckReply(static_cast<int64_t>(block_ids.size()) * (block_bytes + 3) +
                              kReplyOverheadBytes);
}

absl::Status ReadProjectedKeysOp::Reply(const Session& session, Response* response) {
  const SessionSpec& spec = session.spec();
  SetTensor(
      DType::kBf16,
      {static_cast<int64_t>(block_ids.size()), spec.num_kv_heads, spec.block_tokens, spec.rank},
      projected_keys, response->mutable_projected_keys());
  SetPredicted(predicted, response->mutable_predicted());
  response->mutable_valid_tokens()->Resize(static_cast<int>(valid_tokens.size()), 0);
  std::copy(valid_tokens.begin(), valid_tokens.end(), response->mutable_valid_tokens()->begin());
  return absl::OkStatus();
}

}  // namespace sluice
