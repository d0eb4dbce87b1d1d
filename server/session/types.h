// What goes into and comes out of a session: plain structs, no RPC types.

#ifndef SERVER_SESSION_TYPES_H_
#define SERVER_SESSION_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/ops/params.h"

namespace sluice {

// An array that a client sent, wherever its bytes are. Does not own them. `shape` may be empty: the
// length alone is checked then. Not given at all: data is null.
struct TensorView {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  bool dtype_known = false;  // false: the client left dtype out, or sent a value that no DType has
  DType dtype = DType::kBf16;
  absl::Span<const int64_t> shape;

  bool given() const { return data != nullptr; }
};

// See SessionSpec in proto/sluice/v1/session.proto; ranges are checked by SessionManager::Open.
struct SessionSpec {
  std::string name;
  std::string model_fingerprint;
  int64_t num_layers = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t block_tokens = 0;
  DType kv_dtype = DType::kBf16;
  int64_t rank = 0;  // 0: min(32, head_dim)
  uint64_t projection_seed = 0;
  int64_t max_blocks = 0;
  int64_t max_sequences = 0;  // 0: 64
  int64_t tile_blocks = 0;    // 0: 256
  int64_t host_budget_bytes = 0;
  int64_t hbm_budget_bytes = 0;
  absl::Duration lease = absl::ZeroDuration();  // zero: 60 s
  absl::Duration retention = absl::ZeroDuration();
};

struct MemoryItem {
  std::string name;
  int64_t reserved_bytes = 0;
  int64_t used_bytes = 0;
  std::string formula;
};

struct SessionInfo {
  std::string name;
  uint64_t epoch = 0;
  SessionSpec spec;  // defaults filled in
  bool attached = false;
  absl::Time create_time;
  absl::Time expire_time;
  int64_t num_blocks = 0;
  int64_t num_predicted_blocks = 0;
  int64_t num_sequences = 0;
  std::vector<MemoryItem> memory;
};

struct MemoryPoolUsage {
  std::string name;
  int64_t budget_bytes = 0;
  int64_t used_bytes = 0;
};

enum class Tier : uint8_t { kNone, kHbm, kHost, kDisk };
enum class BlockState : uint8_t { kAbsent, kReserved, kStored };

struct BlockInfo {
  uint32_t layer = 0;
  uint32_t block_id = 0;
  BlockState state = BlockState::kAbsent;
  Tier tier = Tier::kNone;
  uint32_t valid_tokens = 0;
  bool predicted = false;
  uint64_t version = 0;
  std::string tag;
  uint32_t num_tables = 0;
};

// Every id in every layer; no layers: all layers.
struct BlockSet {
  absl::Span<const uint32_t> layers;
  absl::Span<const uint32_t> block_ids;
};

struct SequenceUpdate {
  uint32_t sequence_id = 0;
  uint64_t generation = 0;
  uint32_t base_blocks = 0;
  absl::Span<const uint32_t> block_ids;
};

struct SequenceInfo {
  uint32_t sequence_id = 0;
  uint64_t generation = 0;
  std::vector<uint32_t> block_ids;
  int64_t tokens = 0;
};

struct OffloadBlock {
  uint32_t layer = 0;
  uint32_t block_id = 0;
  uint32_t valid_tokens = 0;  // 0: all
  absl::string_view tag;
};
enum class PredictMode : uint8_t { kRequired, kBestEffort, kOff };
struct OffloadResult {
  int64_t stored_blocks = 0;
  int64_t predicted_blocks = 0;
  int64_t stored_bytes = 0;
  int64_t replaced_blocks = 0;
};

struct AttentionSpec {
  bool has_scale = false;  // false: 1 / sqrt(head_dim)
  float scale = 0;
  float logit_softcap = 0;
  int64_t window_tokens = 0;
  int64_t sink_tokens = 0;
  absl::Span<const float> sink_logits;  // empty or num_query_heads
};

struct DecodeSequence {
  uint32_t sequence_id = 0;
  uint64_t generation = 0;  // 0: not compared
  uint32_t query_tokens = 1;
  int64_t context_tokens = 0;
  bool has_update = false;
  SequenceUpdate update;
};

struct StepStats {
  int64_t hbm_blocks = 0;
  int64_t host_blocks = 0;
  int64_t hbm_bytes = 0;
  int64_t host_bytes = 0;
  int64_t queued_us = 0;
  int64_t device_us = 0;
  int64_t total_us = 0;
};

struct TopBlock {
  uint32_t index = 0;
  uint32_t block_id = 0;
  float score = 0;
  bool predicted = false;
};

struct TileRow {
  absl::Span<const uint32_t> block_ids;
  uint32_t last_block_valid_tokens = 0;  // 0: all valid ones
};

}  // namespace sluice

#endif  // SERVER_SESSION_TYPES_H_
