// Between the wire contract's messages and the core's structs. Views point into the messages, which
// must outlive them.
//
// What the core checks (ranges, shapes, ids) is not checked here; what it cannot see is:
// enumerators that do not exist, durations that are none.

#ifndef SERVER_RPC_CONVERT_H_
#define SERVER_RPC_CONVERT_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/repeated_field.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "google/protobuf/timestamp.pb.h"
#include "server/session/types.h"
#include "sluice/v1/attention.pb.h"
#include "sluice/v1/sequence.pb.h"
#include "sluice/v1/session.pb.h"
#include "sluice/v1/swap.pb.h"
#include "sluice/v1/tensor.pb.h"

namespace sluice {

// The one place that knows where a tensor's bytes are; `given` is whether the request has the field
// at all.
TensorView ViewOf(bool given, const v1::Tensor& tensor);
// An inline tensor; memory that it held before is used again.
void SetTensor(DType dtype, std::initializer_list<int64_t> shape, absl::Span<const std::byte> data,
               v1::Tensor* out);
void SetTensor(std::initializer_list<int64_t> shape, absl::Span<const float> data, v1::Tensor* out);

v1::Dtype ToProto(DType dtype);
// `unspecified` is what DTYPE_UNSPECIFIED stands for.
[[nodiscard]] absl::Status FromProto(v1::Dtype dtype, absl::string_view field, DType unspecified,
                                     DType* out);

// 0 where unset. INVALID_ARGUMENT INVALID_FIELD where the message is no duration.
[[nodiscard]] absl::Status FromProto(const google::protobuf::Duration& duration,
                                     absl::string_view field, absl::Duration* out);
void ToProto(absl::Duration duration, google::protobuf::Duration* out);
void ToProto(absl::Time time, google::protobuf::Timestamp* out);

[[nodiscard]] absl::StatusOr<SessionSpec> FromProto(const v1::SessionSpec& spec);
void ToProto(const SessionInfo& info, v1::Session* out);
void ToProto(const MemoryItem& item, v1::MemoryItem* out);
v1::SessionState StateOf(const SessionInfo& info);

SequenceUpdate FromProto(const v1::SequenceUpdate& update);
void ToProto(const SequenceInfo& info, v1::Sequence* out);

BlockSet FromProto(const v1::BlockSet& blocks);
[[nodiscard]] absl::Status FromProto(v1::Tier tier, absl::string_view field, Tier* out);
void ToProto(const BlockInfo& info, v1::BlockInfo* out);

[[nodiscard]] AttentionSpec FromProto(const v1::AttentionOptions& options);

inline absl::Span<const uint32_t> SpanOf(const google::protobuf::RepeatedField<uint32_t>& field) {
  return {field.data(), static_cast<size_t>(field.size())};
}

// Sets the length of a repeated message field; elements that were there before are used again.
template <typename T>
void SetLength(int64_t length, google::protobuf::RepeatedPtrField<T>* field) {
  while (field->size() > length) field->RemoveLast();
  while (field->size() < length) field->Add();
}

}  // namespace sluice

#endif  // SERVER_RPC_CONVERT_H_
