#include "server/base/error.h"

#include <set>
#include <string>

#include "gtest/gtest.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

TEST(Error, CarriesReasonMetadataRetryAndResource) {
  const absl::Status status = Error(absl::StatusCode::kNotFound, Reason::kBlockNotFound, "no block")
                                  .Meta("layer", 3)
                                  .Meta("block_id", 77u)
                                  .Resource("block", "3/77")
                                  .Retry(absl::Milliseconds(25));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "no block");
  EXPECT_EQ(ReasonOf(status), "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(status, "layer"), "3");
  EXPECT_EQ(MetaOf(status, "block_id"), "77");
  EXPECT_EQ(MetaOf(status, "other"), "");
  EXPECT_EQ(status.GetPayload("sluice/retry_ms"), absl::Cord("25"));
  EXPECT_EQ(status.GetPayload("sluice/resource_type"), absl::Cord("block"));
  EXPECT_EQ(status.GetPayload("sluice/resource_name"), absl::Cord("3/77"));
}

TEST(Error, InvalidFieldNamesFieldValueAndWhatIsAllowed) {
  const absl::Status status = InvalidField("spec.rank", 200, "1..128");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "spec.rank is 200; allowed: 1..128");
  EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
  EXPECT_EQ(MetaOf(status, "field"), "spec.rank");
  EXPECT_EQ(MetaOf(status, "value"), "200");
  EXPECT_EQ(MetaOf(status, "allowed"), "1..128");
}

TEST(Error, AStatusOfSomebodyElseHasNoReason) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), "");
  EXPECT_EQ(MetaOf(absl::InternalError("x"), "field"), "");
}

TEST(Error, EveryReasonHasANameOfItsOwn) {
  std::set<std::string> names;
  const int count = static_cast<int>(Reason::kInternal) + 1;
  for (int i = 0; i < count; ++i) {
    const std::string name(ReasonName(static_cast<Reason>(i)));
    EXPECT_FALSE(name.empty()) << i;
    EXPECT_EQ(name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ_"), std::string::npos) << name;
    names.insert(name);
  }
  EXPECT_EQ(static_cast<int>(names.size()), count);
}

absl::StatusOr<int> HalfOf(int value) {
  if (value % 2 != 0) return InvalidField("value", value, "even");
  return value / 2;
}
absl::Status Quarter(int value, int* out) {
  SLUICE_ASSIGN_OR_RETURN(const int half, HalfOf(value));
  SLUICE_ASSIGN_OR_RETURN(*out, HalfOf(half));
  SLUICE_RETURN_IF_ERROR(absl::OkStatus());
  return absl::OkStatus();
}

TEST(StatusMacros, ReturnTheErrorWithItsDetails) {
  int quarter = 0;
  EXPECT_TRUE(Quarter(12, &quarter).ok());
  EXPECT_EQ(quarter, 3);
  EXPECT_EQ(MetaOf(Quarter(6, &quarter), "value"), "3");
}

}  // namespace
}  // namespace sluice
