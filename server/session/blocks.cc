// What a session tells of its blocks, and dropping them.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {
namespace {

constexpr int64_t kMaxDescribedBlocks = 65'536;
constexpr int64_t kMaxDroppedBlocks = int64_t{1} << 24;
constexpr int64_t kMaxTagBytes = 32;
constexpr int64_t kMaxTags = 4'096;
// Blocks that FindBlocks answers with, and that ListBlocks looks at in one go.
constexpr int64_t kMaxFoundBlocks = 65'536;

}  // namespace

// Needs no lock, and is long for a long list.
absl::Status SessionImpl::CheckBlockSet(const BlockSet& blocks, int64_t max_total) const {
  const int64_t num_layers = blocks.layers.empty() ? spec_.num_layers : std::ssize(blocks.layers);
  const int64_t total = num_layers * std::ssize(blocks.block_ids);
  if (total > max_total) {
    return InvalidField("blocks", absl::StrCat(total, " blocks"),
                        absl::StrCat("at most ", max_total, ", counted in every layer"));
  }
  for (const uint32_t layer : blocks.layers) {
    SLUICE_RETURN_IF_ERROR(CheckLayer(layer, "blocks.layers"));
  }
  if (blocks.block_ids.empty()) {
    return InvalidField("blocks.block_ids", "empty", "at least one id");
  }
  for (const uint32_t block_id : blocks.block_ids) {
    SLUICE_RETURN_IF_ERROR(CheckBlockId(block_id, "blocks.block_ids"));
  }
  std::vector<uint32_t> sorted(blocks.block_ids.begin(), blocks.block_ids.end());
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    return InvalidField("blocks.block_ids", *twice, "no id twice");
  }
  sorted.assign(blocks.layers.begin(), blocks.layers.end());
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    return InvalidField("blocks.layers", *twice, "no layer twice");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<bool>> SessionImpl::LayerFilter(
    absl::Span<const uint32_t> layers) const {
  std::vector<bool> wanted(spec_.num_layers, layers.empty());
  for (const uint32_t layer : layers) {
    SLUICE_RETURN_IF_ERROR(CheckLayer(layer, "layers"));
    wanted[layer] = true;
  }
  return wanted;
}

BlockInfo SessionImpl::InfoOf(uint32_t layer, uint32_t block_id) const {
  const BlockEntry& entry = blocks_->at(layer, block_id);
  BlockInfo info;
  info.layer = layer;
  info.block_id = block_id;
  info.num_tables = blocks_->num_tables(block_id);
  if (!entry.present()) return info;
  info.state = entry.stored() ? BlockState::kStored : BlockState::kReserved;
  const bool in_hbm = entry.slot != nullptr ? blocks_->InHbm(entry.slot) : entry.lent_in_hbm;
  info.tier = in_hbm ? Tier::kHbm : Tier::kHost;
  info.valid_tokens = entry.valid_tokens;
  info.predicted = entry.stored() && entry.projected != nullptr;
  info.version = entry.version;
  info.tag = std::string(blocks_->TagOf(layer, block_id));
  return info;
}

namespace {

// Calls visit(layer, block_id) layer by layer, ids as listed.
template <typename Visit>
void ForEach(const BlockSet& blocks, int64_t num_layers, const Visit& visit) {
  const int64_t count = blocks.layers.empty() ? num_layers : std::ssize(blocks.layers);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t layer = blocks.layers.empty() ? static_cast<uint32_t>(i) : blocks.layers[i];
    for (const uint32_t block_id : blocks.block_ids) visit(layer, block_id);
  }
}

}  // namespace

absl::StatusOr<std::vector<BlockInfo>> SessionImpl::DescribeBlocks(const BlockSet& blocks) const {
  SLUICE_RETURN_IF_ERROR(CheckBlockSet(blocks, kMaxDescribedBlocks));
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(CheckAlive());
  std::vector<BlockInfo> result;
  ForEach(blocks, spec_.num_layers,
          [&](uint32_t layer, uint32_t block_id) { result.push_back(InfoOf(layer, block_id)); });
  return result;
}

absl::StatusOr<SessionImpl::BlockPage> SessionImpl::ListBlocks(absl::Span<const uint32_t> layers,
                                                               Tier tier, BlockCursor cursor,
                                                               int64_t limit) const {
  SLUICE_ASSIGN_OR_RETURN(const std::vector<bool> wanted, LayerFilter(layers));
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(CheckAlive());
  BlockPage page;
  int64_t key = blocks_->NextPresent(cursor.layer * spec_.max_blocks + cursor.block_id);
  int64_t num_visited = 0;
  while (key >= 0 && std::ssize(page.blocks) < limit && num_visited < kMaxFoundBlocks) {
    const auto layer = static_cast<uint32_t>(key / spec_.max_blocks);
    if (!wanted[layer]) {
      key = blocks_->NextPresent((layer + 1) * spec_.max_blocks);
      continue;
    }
    ++num_visited;
    BlockInfo info = InfoOf(layer, static_cast<uint32_t>(key % spec_.max_blocks));
    if (tier == Tier::kNone || tier == info.tier) page.blocks.push_back(std::move(info));
    key = blocks_->NextPresent(key + 1);
  }
  page.more = key >= 0;
  if (page.more) {
    page.next = {static_cast<uint32_t>(key / spec_.max_blocks),
                 static_cast<uint32_t>(key % spec_.max_blocks)};
  }
  return page;
}

absl::StatusOr<std::vector<BlockInfo>> SessionImpl::FindBlocks(
    absl::Span<const std::string> tags, absl::Span<const uint32_t> layers) const {
  SLUICE_ASSIGN_OR_RETURN(const std::vector<bool> wanted, LayerFilter(layers));
  if (tags.empty() || std::ssize(tags) > kMaxTags) {
    return InvalidField("tags", absl::StrCat(tags.size(), " tags"), absl::StrCat("1..", kMaxTags));
  }
  for (const std::string& tag : tags) {
    if (tag.empty() || std::ssize(tag) > kMaxTagBytes) {
      return InvalidField("tags", absl::StrCat(tag.size(), " bytes"), "1..32 bytes each");
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(CheckAlive());
  std::vector<BlockInfo> result;
  for (const std::string& tag : tags) {
    const auto& keys = blocks_->KeysWithTag(tag);
    for (auto key = keys.begin(); key != keys.end();) {
      const auto layer = static_cast<uint32_t>(*key / spec_.max_blocks);
      if (!wanted[layer]) {
        key = keys.lower_bound((layer + 1) * spec_.max_blocks);
        continue;
      }
      if (std::ssize(result) == kMaxFoundBlocks) {
        return Error(absl::StatusCode::kResourceExhausted, Reason::kMessageTooLarge,
                     absl::StrCat("more than ", kMaxFoundBlocks,
                                  " blocks carry these tags; ask for fewer tags or layers"))
            .Meta("allowed", kMaxFoundBlocks);
      }
      result.push_back(InfoOf(layer, static_cast<uint32_t>(*key % spec_.max_blocks)));
      ++key;
    }
  }
  return result;
}

absl::StatusOr<SessionImpl::DropResult> SessionImpl::DropBlocks(const BlockSet& blocks,
                                                                bool allow_missing) {
  SLUICE_RETURN_IF_ERROR(CheckBlockSet(blocks, kMaxDroppedBlocks));
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  absl::Status status;
  ForEach(blocks, spec_.num_layers, [&](uint32_t layer, uint32_t block_id) {
    if (!status.ok()) return;
    if (blocks_->num_tables(block_id) > 0) {
      status = Error(absl::StatusCode::kFailedPrecondition, Reason::kBlockInTable,
                     absl::StrCat("block ", block_id, " is in the tables of ",
                                  blocks_->num_tables(block_id), " sequences"))
                   .Meta("block_id", block_id)
                   .Meta("num_tables", blocks_->num_tables(block_id));
    } else if (!allow_missing && !blocks_->at(layer, block_id).present()) {
      status = BlockNotFound(layer, block_id);
    }
  });
  SLUICE_RETURN_IF_ERROR(status);
  DropResult result;
  ForEach(blocks, spec_.num_layers, [&](uint32_t layer, uint32_t block_id) {
    if (!blocks_->at(layer, block_id).present()) return;
    result.freed_bytes += blocks_->Drop(layer, block_id);
    ++result.dropped_blocks;
  });
  return result;
}

}  // namespace sluice
