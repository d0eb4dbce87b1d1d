#include "server/rpc/service_context.h"

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace sluice {

absl::StatusOr<std::shared_ptr<Session>> ServiceContext::FindSession(
    const v1::SessionHandle& handle, absl::string_view field) {
  if (handle.name().empty()) {
    return InvalidField(absl::StrCat(field, ".name"), "empty", "the handle that OpenSession gave");
  }
  return sessions_->Find(handle.name(), handle.epoch());
}

}  // namespace sluice
