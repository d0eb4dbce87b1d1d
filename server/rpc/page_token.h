// Page tokens: where the next page begins, opaque to clients, checked when they come back.
//
// A token is base64 of a kind, the cursor and a checksum, which covers the scope too: what is
// listed (the session, filters). So a mangled one, or one of another listing, is told as such
// instead of giving a wrong page. It is no secret: it says nothing that a listing would not.

#ifndef SERVER_RPC_PAGE_TOKEN_H_
#define SERVER_RPC_PAGE_TOKEN_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace sluice {

enum class PageKind : char { kSessions = 's', kSequences = 'q', kBlocks = 'b' };

std::string EncodePageToken(PageKind kind, absl::string_view scope, absl::string_view cursor);
// The cursor; "" for an empty token, the first page. INVALID_ARGUMENT INVALID_FIELD page_token.
[[nodiscard]] absl::StatusOr<std::string> DecodePageToken(PageKind kind, absl::string_view scope,
                                                          absl::string_view token);

// page_size of a request: 0 is the default. INVALID_ARGUMENT INVALID_FIELD page_size.
[[nodiscard]] absl::StatusOr<int64_t> PageSize(int64_t requested, int64_t default_size,
                                               int64_t max_size);

}  // namespace sluice

#endif  // SERVER_RPC_PAGE_TOKEN_H_
