// BeginTiles, StepTile, FinalizeTiles and AbortTiles.

#ifndef SERVER_RPC_TILE_OPS_H_
#define SERVER_RPC_TILE_OPS_H_

#include <vector>

#include "absl/status/status.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_op.h"
#include "server/session/calls.h"
#include "server/session/session.h"
#include "sluice/v1/attention.pb.h"

namespace sluice {

class BeginTilesOp : public CallOp<BeginTilesCall> {
 public:
  using Request = v1::BeginTilesRequest;
  using Response = v1::BeginTilesResponse;

  // Not kept: such a call may hold on to its run's memory until it is gone.
  static constexpr bool kKept = false;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);
};

class StepTileOp : public CallOp<StepTileCall> {
 public:
  using Request = v1::StepTileRequest;
  using Response = v1::StepTileResponse;

  // Not kept: such a call may hold on to its run's memory until it is gone.
  static constexpr bool kKept = false;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);

 private:
  std::vector<TileRow> parsed_rows_;
};

class FinalizeTilesOp : public CallOp<FinalizeTilesCall> {
 public:
  using Request = v1::FinalizeTilesRequest;
  using Response = v1::FinalizeTilesResponse;

  // Not kept: such a call may hold on to its run's memory until it is gone.
  static constexpr bool kKept = false;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);
};

class AbortTilesOp : public CallOp<AbortTilesCall> {
 public:
  using Request = v1::AbortTilesRequest;
  using Response = v1::AbortTilesResponse;

  // Not kept: such a call may hold on to its run's memory until it is gone.
  static constexpr bool kKept = false;

  [[nodiscard]] absl::Status Parse(const Request& request, const Session& session,
                                   const Admission& admission);
  [[nodiscard]] absl::Status Reply(const Session& session, Response* response);
};

}  // namespace sluice

#endif  // SERVER_RPC_TILE_OPS_H_
