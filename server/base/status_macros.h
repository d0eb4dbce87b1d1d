// Early returns for absl::Status and absl::StatusOr.
//
//   SLUICE_RETURN_IF_ERROR(CheckRank(rank));
//   SLUICE_ASSIGN_OR_RETURN(Buffer buffer, device->Reserve(MemoryKind::kHost, bytes));

#ifndef SERVER_BASE_STATUS_MACROS_H_
#define SERVER_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define SLUICE_RETURN_IF_ERROR(expression)                                             \
  do {                                                                                 \
    if (absl::Status sluice_status = (expression); !sluice_status.ok()) [[unlikely]] { \
      return sluice_status;                                                            \
    }                                                                                  \
  } while (false)

#define SLUICE_STATUS_CONCAT_INNER(a, b) a##b
#define SLUICE_STATUS_CONCAT(a, b) SLUICE_STATUS_CONCAT_INNER(a, b)
#define SLUICE_ASSIGN_OR_RETURN(declaration, expression)                                        \
  SLUICE_ASSIGN_OR_RETURN_INNER(SLUICE_STATUS_CONCAT(sluice_status_or_, __LINE__), declaration, \
                                expression)
#define SLUICE_ASSIGN_OR_RETURN_INNER(holder, declaration, expression) \
  auto holder = (expression);                                          \
  if (!holder.ok()) [[unlikely]]                                       \
    return std::move(holder).status();                                 \
  declaration = *std::move(holder)

#endif  // SERVER_BASE_STATUS_MACROS_H_
