#include "client/status.h"

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace sluice::client {
namespace {

google::rpc::Status Detailed() {
  google::rpc::Status status;
  status.set_code(static_cast<int>(absl::StatusCode::kNotFound));
  status.set_message("block 7 of layer 2 is not stored");
  google::rpc::ErrorInfo info;
  info.set_reason("BLOCK_NOT_FOUND");
  info.set_domain("sluice");
  (*info.mutable_metadata())["layer"] = "2";
  (*info.mutable_metadata())["block_id"] = "7";
  status.add_details()->PackFrom(info);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500000000);
  status.add_details()->PackFrom(retry);
  google::rpc::ResourceInfo resource;
  resource.set_resource_type("block");
  resource.set_resource_name("2/7");
  status.add_details()->PackFrom(resource);
  return status;
}

TEST(Status, KeepsEveryDetail) {
  const absl::Status status = FromRpcStatus(Detailed());
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "block 7 of layer 2 is not stored");
  const StatusDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "BLOCK_NOT_FOUND");
  EXPECT_EQ(details.domain, "sluice");
  EXPECT_EQ(details.metadata,
            (std::map<std::string, std::string>{{"layer", "2"}, {"block_id", "7"}}));
  EXPECT_EQ(details.retry_delay, absl::Milliseconds(1500));
  EXPECT_EQ(details.resource_type, "block");
  EXPECT_EQ(details.resource_name, "2/7");
  EXPECT_EQ(ReasonOf(status), "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetadataOf(status, "layer"), "2");
  EXPECT_EQ(RetryDelayOf(status), absl::Milliseconds(1500));
}

TEST(Status, SurvivesCopies) {
  absl::Status copy;
  {
    const absl::Status status = FromRpcStatus(Detailed());
    copy = status;
  }
  EXPECT_EQ(ReasonOf(copy), "BLOCK_NOT_FOUND");
}

TEST(Status, WithoutDetailsHasNone) {
  const absl::Status status = absl::InternalError("plain");
  EXPECT_EQ(ReasonOf(status), "");
  EXPECT_EQ(MetadataOf(status, "layer"), "");
  EXPECT_EQ(RetryDelayOf(status), std::nullopt);
  EXPECT_TRUE(DetailsOf(status).metadata.empty());
}

TEST(Status, UnknownMetadataKeyIsEmpty) {
  EXPECT_EQ(MetadataOf(FromRpcStatus(Detailed()), "position"), "");
}

TEST(Status, CodeZeroIsOk) {
  google::rpc::Status status = Detailed();
  status.set_code(0);
  EXPECT_TRUE(FromRpcStatus(status).ok());
}

TEST(Status, UnknownCodeIsUnknown) {
  google::rpc::Status status;
  status.set_code(4711);
  EXPECT_EQ(FromRpcStatus(status).code(), absl::StatusCode::kUnknown);
}

TEST(Status, DetailThatDoesNotParseIsNoDetail) {
  google::rpc::Status status;
  status.set_code(5);
  google::protobuf::Any* detail = status.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value("\xff\xff\xff");
  EXPECT_EQ(ReasonOf(FromRpcStatus(status)), "");
}

}  // namespace
}  // namespace sluice::client
