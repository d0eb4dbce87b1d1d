// The parts of server/rpc that can be tried without a server.

#include <string>

#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/rpc/admission.h"
#include "server/rpc/convert.h"
#include "server/rpc/page_token.h"
#include "server/rpc/status.h"

namespace sluice {
namespace {

TEST(Status, OkHasNothing) {
  google::rpc::Status status;
  status.set_message("old");
  ToRpcStatus(absl::OkStatus(), &status);
  EXPECT_EQ(status.ByteSizeLong(), 0u);
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).error_details().empty());
}

TEST(Status, EveryDetailTravels) {
  google::rpc::Status status;
  ToRpcStatus(Error(absl::StatusCode::kResourceExhausted, Reason::kQueueFull, "full")
                  .Meta("value", 7)
                  .Retry(absl::Milliseconds(1250))
                  .Resource("session", "a"),
              &status);
  EXPECT_EQ(status.code(), 8);
  ASSERT_EQ(status.details_size(), 3);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(status.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  EXPECT_EQ(info.domain(), "sluice");
  EXPECT_EQ(info.metadata().at("value"), "7");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(status.details(1).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 250'000'000);
  google::rpc::ResourceInfo resource;
  ASSERT_TRUE(status.details(2).UnpackTo(&resource));
  EXPECT_EQ(resource.resource_type(), "session");
  EXPECT_EQ(resource.resource_name(), "a");
}

TEST(Status, WhatAClientSentIsCutAndMadeUtf8) {
  const grpc::Status status =
      ToGrpcStatus(InvalidField("tag", std::string("\xff\xc0\xaf ok \xc3\xa9", 9), "x"));
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.metadata().at("value"), "\\xff\\xc0\\xaf ok \xc3\xa9");

  const grpc::Status large = ToGrpcStatus(InvalidField("name", std::string(1 << 20, 'x'), "x"));
  EXPECT_LT(large.error_details().size() + large.error_message().size(), 4096u);
}

TEST(Status, EveryErrorHasAReason) {
  for (const auto& [code, reason] :
       {std::pair{absl::StatusCode::kCancelled, "CANCELLED"},
        std::pair{absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED"},
        std::pair{absl::StatusCode::kUnknown, "INTERNAL"}}) {
    google::rpc::Status status;
    ToRpcStatus(absl::Status(code, "x"), &status);
    google::rpc::ErrorInfo info;
    ASSERT_TRUE(status.details(0).UnpackTo(&info));
    EXPECT_EQ(info.reason(), reason);
  }
}

TEST(PageToken, ComesBackAndIsChecked) {
  for (const std::string cursor : {"a", "", "12:4", "\xff/:"}) {
    const std::string token = EncodePageToken(PageKind::kBlocks, "scope", cursor);
    EXPECT_EQ(*DecodePageToken(PageKind::kBlocks, "scope", token), cursor);
    EXPECT_FALSE(DecodePageToken(PageKind::kSessions, "scope", token).ok());
    EXPECT_FALSE(DecodePageToken(PageKind::kBlocks, "other", token).ok());
    for (size_t i = 0; i < token.size(); ++i) {
      std::string mangled = token;
      mangled[i] = mangled[i] == 'A' ? 'B' : 'A';
      const auto decoded = DecodePageToken(PageKind::kBlocks, "scope", mangled);
      if (decoded.ok()) {
        // Bits behind the last byte mean nothing.
        EXPECT_EQ(*decoded, cursor);
      }
    }
  }
  EXPECT_EQ(*DecodePageToken(PageKind::kBlocks, "scope", ""), "");
  EXPECT_EQ(ReasonOf(DecodePageToken(PageKind::kBlocks, "scope", "bad").status()), "INVALID_FIELD");
}

TEST(PageToken, SizeHasADefaultAndABound) {
  EXPECT_EQ(*PageSize(0, 100, 1000), 100);
  EXPECT_EQ(*PageSize(1000, 100, 1000), 1000);
  EXPECT_EQ(ReasonOf(PageSize(1001, 100, 1000).status()), "INVALID_FIELD");
  EXPECT_EQ(ReasonOf(PageSize(-1, 100, 1000).status()), "INVALID_FIELD");
}

TEST(Admission, CountsBytesUntilTheTicketIsGone) {
  Admission admission(100, 150);
  Admission::Ticket first;
  Admission::Ticket second;
  EXPECT_EQ(ReasonOf(admission.Admit(101, &first)), "MESSAGE_TOO_LARGE");
  ASSERT_TRUE(admission.Admit(100, &first).ok());
  EXPECT_EQ(ReasonOf(admission.Admit(51, &second)), "INFLIGHT_BYTES");
  EXPECT_EQ(admission.inflight_bytes(), 100);
  ASSERT_TRUE(admission.Admit(50, &second).ok());
  Admission::Ticket moved = std::move(second);
  EXPECT_EQ(admission.inflight_bytes(), 150);
  moved.Release();
  first = Admission::Ticket();
  EXPECT_EQ(admission.inflight_bytes(), 0);
}

TEST(Admission, DrainRefusesAndWaitsForTickets) {
  Admission admission(100, 150);
  Admission::Ticket ticket;
  ASSERT_TRUE(admission.Admit(1, &ticket).ok());
  struct Stream final : OpenStream {
    void Drain() override { drained = true; }
    bool drained = false;
  } stream;
  admission.AddStream(&stream);
  admission.Drain();
  EXPECT_TRUE(stream.drained);
  Admission::Ticket refused;
  EXPECT_EQ(ReasonOf(admission.Admit(1, &refused)), "SHUTTING_DOWN");
  EXPECT_FALSE(admission.WaitIdle(absl::Milliseconds(1)));
  ticket.Release();
  EXPECT_FALSE(admission.WaitIdle(absl::Milliseconds(1)));
  admission.RemoveStream(&stream);
  EXPECT_TRUE(admission.WaitIdle(absl::ZeroDuration()));
  EXPECT_EQ(admission.inflight_bytes(), 0);
}

TEST(Convert, TensorWithoutDataIsGivenAndEmpty) {
  v1::Tensor tensor;
  EXPECT_FALSE(ViewOf(false, tensor).given());
  const TensorView view = ViewOf(true, tensor);
  EXPECT_TRUE(view.given());
  EXPECT_EQ(view.bytes, 0);
  EXPECT_FALSE(view.dtype_known);
}

TEST(Convert, DurationsGoBothWays) {
  for (const absl::Duration duration :
       {absl::ZeroDuration(), absl::Milliseconds(1500), absl::Nanoseconds(-1), absl::Hours(24)}) {
    google::protobuf::Duration proto;
    ToProto(duration, &proto);
    absl::Duration back;
    ASSERT_TRUE(FromProto(proto, "lease", &back).ok());
    EXPECT_EQ(back, duration);
  }
}

}  // namespace
}  // namespace sluice
