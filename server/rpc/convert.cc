#include "server/rpc/convert.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

// The bounds that google/protobuf/duration.proto sets: 10,000 years.
constexpr int64_t kMaxDurationSeconds = 315'576'000'000;
constexpr int32_t kMaxDurationNanos = 999'999'999;

v1::Tier TierToProto(Tier tier) {
  switch (tier) {
    case Tier::kNone:
      return v1::TIER_UNSPECIFIED;
    case Tier::kHbm:
      return v1::TIER_HBM;
    case Tier::kHost:
      return v1::TIER_HOST;
    case Tier::kDisk:
      return v1::TIER_DISK;
  }
  return v1::TIER_UNSPECIFIED;
}

v1::BlockState BlockStateToProto(BlockState state) {
  switch (state) {
    case BlockState::kAbsent:
      return v1::BLOCK_STATE_ABSENT;
    case BlockState::kReserved:
      return v1::BLOCK_STATE_RESERVED;
    case BlockState::kStored:
      return v1::BLOCK_STATE_STORED;
  }
  return v1::BLOCK_STATE_UNSPECIFIED;
}

void SpecToProto(const SessionSpec& spec, v1::SessionSpec* out) {
  out->set_name(spec.name);
  out->set_model_fingerprint(spec.model_fingerprint);
  out->set_num_layers(static_cast<uint32_t>(spec.num_layers));
  out->set_num_query_heads(static_cast<uint32_t>(spec.num_query_heads));
  out->set_num_kv_heads(static_cast<uint32_t>(spec.num_kv_heads));
  out->set_head_dim(static_cast<uint32_t>(spec.head_dim));
  out->set_block_tokens(static_cast<uint32_t>(spec.block_tokens));
  out->set_kv_dtype(ToProto(spec.kv_dtype));
  out->set_rank(static_cast<uint32_t>(spec.rank));
  out->set_projection_kind(v1::PROJECTION_KIND_GAUSSIAN);
  out->set_projection_seed(spec.projection_seed);
  out->set_max_blocks(static_cast<uint32_t>(spec.max_blocks));
  out->set_max_sequences(static_cast<uint32_t>(spec.max_sequences));
  out->set_tile_blocks(static_cast<uint32_t>(spec.tile_blocks));
  out->set_host_budget_bytes(spec.host_budget_bytes);
  out->set_hbm_budget_bytes(spec.hbm_budget_bytes);
  ToProto(spec.lease, out->mutable_lease());
  ToProto(spec.retention, out->mutable_retention());
  out->set_durability(v1::DURABILITY_VOLATILE);
}

}  // namespace

TensorView ViewOf(bool given, const v1::Tensor& tensor) {
  TensorView view;
  if (!given) return view;
  // An empty string has an address too, so that a tensor without data is given, and found to be too
  // short.
  view.data = reinterpret_cast<const std::byte*>(tensor.data().data());
  view.bytes = static_cast<int64_t>(tensor.data().size());
  view.shape = {tensor.shape().data(), static_cast<size_t>(tensor.shape_size())};
  view.dtype_known = true;
  switch (tensor.dtype()) {
    case v1::DTYPE_BF16:
      view.dtype = DType::kBf16;
      break;
    case v1::DTYPE_FP16:
      view.dtype = DType::kFp16;
      break;
    case v1::DTYPE_F32:
      view.dtype = DType::kF32;
      break;
    default:
      view.dtype_known = false;
  }
  return view;
}

void SetTensor(DType dtype, std::initializer_list<int64_t> shape, absl::Span<const std::byte> data,
               v1::Tensor* out) {
  out->set_dtype(ToProto(dtype));
  out->mutable_shape()->Clear();
  for (const int64_t extent : shape) out->add_shape(extent);
  out->mutable_data()->assign(reinterpret_cast<const char*>(data.data()), data.size());
}

void SetTensor(std::initializer_list<int64_t> shape, absl::Span<const float> data,
               v1::Tensor* out) {
  SetTensor(DType::kF32, shape,
            {reinterpret_cast<const std::byte*>(data.data()), data.size() * sizeof(float)}, out);
}

v1::Dtype ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kFp16:
      return v1::DTYPE_FP16;
    case DType::kF32:
      return v1::DTYPE_F32;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::Status FromProto(v1::Dtype dtype, absl::string_view field, DType unspecified, DType* out) {
  switch (dtype) {
    case v1::DTYPE_UNSPECIFIED:
      *out = unspecified;
      return absl::OkStatus();
    case v1::DTYPE_BF16:
      *out = DType::kBf16;
      return absl::OkStatus();
    case v1::DTYPE_FP16:
      *out = DType::kFp16;
      return absl::OkStatus();
    case v1::DTYPE_F32:
      *out = DType::kF32;
      return absl::OkStatus();
    default:
      return InvalidField(field, static_cast<int>(dtype),
                          field == "spec.kv_dtype" ? "DTYPE_BF16 or DTYPE_FP16"
                                                   : "DTYPE_BF16, DTYPE_FP16 or DTYPE_F32");
  }
}

absl::Status FromProto(const google::protobuf::Duration& duration, absl::string_view field,
                       absl::Duration* out) {
  const int64_t seconds = duration.seconds();
  const int32_t nanos = duration.nanos();
  const bool in_range = seconds >= -kMaxDurationSeconds && seconds <= kMaxDurationSeconds &&
                        nanos >= -kMaxDurationNanos && nanos <= kMaxDurationNanos;
  const bool one_sign = (seconds <= 0 || nanos >= 0) && (seconds >= 0 || nanos <= 0);
  if (!in_range || !one_sign) {
    return InvalidField(field, absl::StrCat(seconds, " s and ", nanos, " ns"),
                        "seconds and nanos of one sign, nanos below one second");
  }
  *out = absl::Seconds(seconds) + absl::Nanoseconds(nanos);
  return absl::OkStatus();
}

void ToProto(absl::Duration duration, google::protobuf::Duration* out) {
  absl::Duration rest;
  out->set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
}

void ToProto(absl::Time time, google::protobuf::Timestamp* out) {
  const int64_t nanos = absl::ToUnixNanos(time);
  out->set_seconds(nanos / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

absl::StatusOr<SessionSpec> FromProto(const v1::SessionSpec& spec) {
  if (spec.projection_kind() != v1::PROJECTION_KIND_UNSPECIFIED &&
      spec.projection_kind() != v1::PROJECTION_KIND_GAUSSIAN) {
    return InvalidField("spec.projection_kind", static_cast<int>(spec.projection_kind()),
                        "PROJECTION_KIND_GAUSSIAN");
  }
  if (spec.durability() != v1::DURABILITY_UNSPECIFIED &&
      spec.durability() != v1::DURABILITY_VOLATILE) {
    return InvalidField("spec.durability", static_cast<int>(spec.durability()),
                        "DURABILITY_VOLATILE");
  }
  SessionSpec out;
  SLUICE_RETURN_IF_ERROR(FromProto(spec.kv_dtype(), "spec.kv_dtype", DType::kBf16, &out.kv_dtype));
  SLUICE_RETURN_IF_ERROR(FromProto(spec.lease(), "spec.lease", &out.lease));
  SLUICE_RETURN_IF_ERROR(FromProto(spec.retention(), "spec.retention", &out.retention));
  out.name = spec.name();
  out.model_fingerprint = spec.model_fingerprint();
  out.num_layers = spec.num_layers();
  out.num_query_heads = spec.num_query_heads();
  out.num_kv_heads = spec.num_kv_heads();
  out.head_dim = spec.head_dim();
  out.block_tokens = spec.block_tokens();
  out.rank = spec.rank();
  out.projection_seed = spec.projection_seed();
  out.max_blocks = spec.max_blocks();
  out.max_sequences = spec.max_sequences();
  out.tile_blocks = spec.tile_blocks();
  out.host_budget_bytes = spec.host_budget_bytes();
  out.hbm_budget_bytes = spec.hbm_budget_bytes();
  return out;
}

v1::SessionState StateOf(const SessionInfo& info) {
  return info.attached ? v1::SESSION_STATE_ATTACHED : v1::SESSION_STATE_DETACHED;
}

void ToProto(const MemoryItem& item, v1::MemoryItem* out) {
  out->set_name(item.name);
  out->set_reserved_bytes(item.reserved_bytes);
  out->set_used_bytes(item.used_bytes);
  out->set_formula(item.formula);
}

void ToProto(const SessionInfo& info, v1::Session* out) {
  out->mutable_handle()->set_name(info.name);
  out->mutable_handle()->set_epoch(info.epoch);
  SpecToProto(info.spec, out->mutable_spec());
  // The daemon makes a name where the client gave none; the spec says so too.
  out->mutable_spec()->set_name(info.name);
  out->set_state(StateOf(info));
  ToProto(info.create_time, out->mutable_create_time());
  ToProto(info.expire_time, out->mutable_expire_time());
  out->set_num_blocks(info.num_blocks);
  out->set_num_predicted_blocks(info.num_predicted_blocks);
  out->set_num_sequences(info.num_sequences);
  for (const MemoryItem& item : info.memory) ToProto(item, out->add_memory());
}

SequenceUpdate FromProto(const v1::SequenceUpdate& update) {
  SequenceUpdate out;
  out.sequence_id = update.sequence_id();
  out.generation = update.generation();
  out.base_blocks = update.base_blocks();
  out.block_ids = SpanOf(update.block_ids());
  return out;
}

void ToProto(const SequenceInfo& info, v1::Sequence* out) {
  out->set_sequence_id(info.sequence_id);
  out->set_generation(info.generation);
  out->mutable_block_ids()->Add(info.block_ids.begin(), info.block_ids.end());
  out->set_tokens(info.tokens);
}

BlockSet FromProto(const v1::BlockSet& blocks) {
  return {SpanOf(blocks.layers()), SpanOf(blocks.block_ids())};
}

absl::Status FromProto(v1::Tier tier, absl::string_view field, Tier* out) {
  switch (tier) {
    case v1::TIER_UNSPECIFIED:
      *out = Tier::kNone;
      return absl::OkStatus();
    case v1::TIER_HBM:
      *out = Tier::kHbm;
      return absl::OkStatus();
    case v1::TIER_HOST:
      *out = Tier::kHost;
      return absl::OkStatus();
    case v1::TIER_DISK:
      *out = Tier::kDisk;
      return absl::OkStatus();
    default:
      return InvalidField(field, static_cast<int>(tier), "TIER_HBM, TIER_HOST or TIER_DISK");
  }
}

void ToProto(const BlockInfo& info, v1::BlockInfo* out) {
  out->set_layer(info.layer);
  out->set_block_id(info.block_id);
  out->set_state(BlockStateToProto(info.state));
  out->set_tier(TierToProto(info.tier));
  out->set_valid_tokens(info.valid_tokens);
  out->set_predicted(info.predicted);
  out->set_version(info.version);
  out->set_tag(info.tag);
  out->set_num_tables(info.num_tables);
}

AttentionSpec FromProto(const v1::AttentionOptions& options) {
  AttentionSpec out;
  out.has_scale = options.has_scale();
  out.scale = options.scale();
  out.logit_softcap = options.logit_softcap();
  out.window_tokens = options.window_tokens();
  out.sink_tokens = options.sink_tokens();
  out.sink_logits = {options.sink_logits().data(), static_cast<size_t>(options.sink_logits_size())};
  return out;
}

}  // namespace sluice
