#include "server/rpc/page_token.h"

#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/base/error.h"

namespace sluice {
namespace {

constexpr size_t kChecksumDigits = 8;

// FNV-1a: enough against accidents, and the same in every build of the daemon.
std::string Checksum(absl::string_view scope, absl::string_view body) {
  uint32_t hash = 2166136261u;
  const auto add = [&](absl::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  };
  add(scope);
  add(absl::string_view("\0", 1));
  add(body);
  return absl::StrFormat("%08x", hash);
}

}  // namespace

std::string EncodePageToken(PageKind kind, absl::string_view scope, absl::string_view cursor) {
  std::string body(1, static_cast<char>(kind));
  absl::StrAppend(&body, cursor);
  return absl::WebSafeBase64Escape(absl::StrCat(Checksum(scope, body), body));
}

absl::StatusOr<std::string> DecodePageToken(PageKind kind, absl::string_view scope,
                                            absl::string_view token) {
  if (token.empty()) return std::string();
  std::string text;
  const bool decoded = absl::WebSafeBase64Unescape(token, &text);
  const absl::string_view body = decoded && text.size() > kChecksumDigits
                                     ? absl::string_view(text).substr(kChecksumDigits)
                                     : absl::string_view();
  if (body.empty() || body[0] != static_cast<char>(kind) ||
      absl::string_view(text).substr(0, kChecksumDigits) != Checksum(scope, body)) {
    return InvalidField("page_token", token,
                        "next_page_token of the page before of the same listing, or nothing");
  }
  return std::string(body.substr(1));
}

absl::StatusOr<int64_t> PageSize(int64_t requested, int64_t default_size, int64_t max_size) {
  if (requested == 0) return default_size;
  if (requested < 0 || requested > max_size) {
    return InvalidField("page_size", requested,
                        absl::StrCat("1..", max_size, ", or 0 for ", default_size));
  }
  return requested;
}

}  // namespace sluice
