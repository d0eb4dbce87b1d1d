#include "server/base/error.h"

#include "gtest/gtest.h"

namespace sluice {
namespace {

TEST(Error, CarriesReasonAndMetadata) {
  const absl::Status status = Error(absl::StatusCode::kNotFound, Reason::kBlockNotFound, "gone")
                                  .Meta("layer", 2)
                                  .Meta("block_id", 7u)
                                  .Resource("block", "2/7");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "gone");
  EXPECT_EQ(ReasonOf(status), "BLOCK_NOT_FOUND");
  EXPECT_EQ(MetaOf(status, "layer"), "2");
  EXPECT_EQ(MetaOf(status, "block_id"), "7");
  EXPECT_EQ(MetaOf(status, "position"), "");
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

TEST(Error, StatusWithoutReasonHasNone) {
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), "");
  EXPECT_EQ(MetaOf(absl::InternalError("x"), "field"), "");
}

}  // namespace
}  // namespace sluice
