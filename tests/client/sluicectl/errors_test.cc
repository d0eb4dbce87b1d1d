#include "client/sluicectl/errors.h"

#include "client/sluicectl/args.h"
#include "client/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace sluice::ctl {
namespace {

TEST(ExitCode, ByKindOfFailure) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("")), 1);
  EXPECT_EQ(ExitCodeOf(UsageError("")), 2);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), 3);
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), 3);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), 4);
  EXPECT_EQ(ExitCodeOf(absl::FailedPreconditionError("")), 5);
  EXPECT_EQ(ExitCodeOf(absl::AbortedError("")), 5);
  EXPECT_EQ(ExitCodeOf(absl::AlreadyExistsError("")), 5);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), 6);
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("")), 7);
}

TEST(DescribeError, ReasonMessageMetadataAndHint) {
  google::rpc::Status status;
  status.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  status.set_message("too many calls wait");
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  (*info.mutable_metadata())["limit"] = "64";
  status.add_details()->PackFrom(info);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(5000000);
  status.add_details()->PackFrom(retry);
  google::rpc::ResourceInfo resource;
  resource.set_resource_type("session");
  resource.set_resource_name("demo");
  status.add_details()->PackFrom(resource);
  EXPECT_EQ(DescribeError(client::FromRpcStatus(status), "x:1"),
            "sluicectl: RESOURCE_EXHAUSTED QUEUE_FULL: too many calls wait\n"
            "  limit: 64\n"
            "  resource: session demo\n"
            "  retry after: 5ms\n"
            "  hint: try again: the session has too many calls under way\n");
}

TEST(DescribeError, UnreachableDaemonNamesTheAddress) {
  const std::string text = DescribeError(absl::UnavailableError("refused"), "10.0.0.1:7464");
  EXPECT_NE(text.find("10.0.0.1:7464"), std::string::npos) << text;
}

}  // namespace
}  // namespace sluice::ctl
