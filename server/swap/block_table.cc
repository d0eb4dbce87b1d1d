#include "server/swap/block_table.h"

#include <algorithm>
#include <cstring>

#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace sluice {
namespace {

constexpr absl::Duration kLimboRetry = absl::Milliseconds(10);

}  // namespace

BlockTable::BlockTable(const Options& options, const Stores& stores, RowPool* rows,
                       std::vector<Stream*> readers)
    : options_(options),
      stores_(stores),
      hbm_(stores.hbm != nullptr ? stores.hbm->range() : absl::Span<const std::byte>()),
      rows_(rows),
      readers_(std::move(readers)),
      entries_(options.num_layers * options.max_blocks),
      touched_((entries_.count() + kSegmentEntries - 1) / kSegmentEntries),
      num_tables_(options.max_blocks) {}

BlockTable::~BlockTable() {
  Reclaim();
  if (!valid() || num_slots() == 0) return;
  std::vector<std::byte*> slots;
  slots.reserve(num_slots());
  for (int64_t key = NextPresent(0); key >= 0; key = NextPresent(key + 1)) {
    if (entries_[key].slot != nullptr) slots.push_back(entries_[key].slot);
  }
  GiveSlots(slots);
}

int64_t BlockTable::RoomSlots(const SlotStore* store, int64_t budget_bytes,
                              int64_t num_slots) const {
  if (store == nullptr) return 0;
  const int64_t in_store = store->budget_bytes() / stride_bytes();
  if (budget_bytes == 0) return in_store;
  return std::clamp<int64_t>(budget_bytes / stride_bytes() - num_slots, 0, in_store);
}

int64_t BlockTable::max_free_slots() const {
  return RoomSlots(stores_.host, options_.host_budget_bytes, num_host_slots_) +
         RoomSlots(stores_.hbm, options_.hbm_budget_bytes, num_hbm_slots_);
}

absl::Status BlockTable::NoRoom(int64_t count) const {
  const int64_t own_bytes = options_.host_budget_bytes;
  const bool own = own_bytes > 0 && (num_host_slots_ + count) * stride_bytes() > own_bytes;
  const int64_t budget_bytes = own ? own_bytes : stores_.host->budget_bytes();
  const int64_t used_bytes = own ? num_host_slots_ * stride_bytes() : stores_.host->used_bytes();
  Error error(absl::StatusCode::kResourceExhausted, Reason::kHostMemory,
              absl::StrCat("no room for ", count, " blocks of ", stride_bytes(), " bytes in ",
                           own ? "the session's host_budget_bytes: " : "host memory: ", used_bytes,
                           " of ", budget_bytes, " bytes are in use",
                           stores_.hbm != nullptr ? ", and HBM has no more room for them" : ""));
  error.AddMeta("need_bytes", count * stride_bytes());
  error.AddMeta("free_bytes", std::max<int64_t>(0, budget_bytes - used_bytes));
  error.AddMeta("budget_bytes", budget_bytes);
  // What is in limbo is free as soon as its last readers are done.
  if (limbo_begin_ < limbo_.size()) return std::move(error).Retry(kLimboRetry);
  return error;
}

absl::Status BlockTable::TakeSlots(absl::Span<std::byte*> slots) {
  Reclaim();
  const auto count = static_cast<int64_t>(slots.size());
  int64_t in_hbm =
      std::min(count, RoomSlots(stores_.hbm, options_.hbm_budget_bytes, num_hbm_slots_));
  if (in_hbm > 0) {
    in_hbm = stores_.hbm->AllocateUpTo(options_.slot_bytes, slots.subspan(0, in_hbm));
  }
  const int64_t in_host = count - in_hbm;
  if (in_host > 0) {
    absl::Status status;
    if (options_.host_budget_bytes > 0 &&
        (num_host_slots_ + in_host) * stride_bytes() > options_.host_budget_bytes) {
      status = NoRoom(in_host);
    } else {
      status = stores_.host->Allocate(options_.slot_bytes, slots.subspan(in_hbm));
      if (!status.ok() && limbo_begin_ < limbo_.size()) status = NoRoom(in_host);
    }
    if (!status.ok()) {
      if (in_hbm > 0) stores_.hbm->Free(options_.slot_bytes, slots.subspan(0, in_hbm));
      return status;
    }
  }
  num_hbm_slots_ += in_hbm;
  num_host_slots_ += in_host;
  return absl::OkStatus();
}

void BlockTable::GiveSlots(absl::Span<std::byte* const> slots) {
  // In runs of one tier.
  for (size_t begin = 0; begin < slots.size();) {
    const bool in_hbm = InHbm(slots[begin]);
    size_t end = begin + 1;
    while (end < slots.size() && InHbm(slots[end]) == in_hbm) ++end;
    const absl::Span<std::byte* const> run = slots.subspan(begin, end - begin);
    (in_hbm ? stores_.hbm : stores_.host)->Free(options_.slot_bytes, run);
    (in_hbm ? num_hbm_slots_ : num_host_slots_) -= static_cast<int64_t>(run.size());
    begin = end;
  }
}

bool BlockTable::Passed(const Retired& retired) const {
  for (size_t i = 0; i < readers_.size(); ++i) {
    if (readers_[i]->completed() < retired.stamps[i]) return false;
  }
  return true;
}

void BlockTable::Retire(std::byte* slot, std::byte* row) {
  if (slot == nullptr && row == nullptr) return;
  Retired retired{slot, row, {}};
  for (size_t i = 0; i < readers_.size(); ++i) retired.stamps[i] = readers_[i]->enqueued();
  limbo_.push_back(retired);
  Reclaim();
}

void BlockTable::Reclaim() {
  while (limbo_begin_ < limbo_.size() && Passed(limbo_[limbo_begin_])) {
    const Retired& retired = limbo_[limbo_begin_++];
    if (retired.slot != nullptr) GiveSlots(absl::MakeConstSpan(&retired.slot, 1));
    if (retired.row != nullptr) rows_->Give(retired.row);
  }
  if (limbo_begin_ == limbo_.size()) {
    limbo_.clear();
    limbo_begin_ = 0;
  } else if (limbo_begin_ > limbo_.size() / 2) {
    limbo_.erase(limbo_.begin(), limbo_.begin() + static_cast<ptrdiff_t>(limbo_begin_));
    limbo_begin_ = 0;
  }
}

void BlockTable::ClearTag(int64_t key, BlockEntry& entry) {
  if (!entry.tagged) return;
  const auto tag = tags_.find(key);
  const auto keys = by_tag_.find(tag->second);
  keys->second.erase(key);
  if (keys->second.empty()) by_tag_.erase(keys);
  tags_.erase(tag);
  entry.tagged = false;
}

void BlockTable::Store(int64_t layer, int64_t block_id, std::byte* slot, std::byte* row,
                       int64_t valid_tokens, absl::string_view tag) {
  BlockEntry& entry = at(layer, block_id);
  const int64_t key = layer * options_.max_blocks + block_id;
  num_stored_ += entry.stored() ? 0 : 1;
  num_predicted_ -= entry.stored() && entry.projected != nullptr ? 1 : 0;
  num_predicted_ += row != nullptr ? 1 : 0;
  Retire(entry.slot, entry.projected);
  Touch(entry);
  entry.slot = slot;
  entry.projected = row;
  entry.valid_tokens = static_cast<uint16_t>(valid_tokens);
  entry.version = next_version_++;
  // The new slot has no readers and no writers yet.
  entry.last_write = 0;
  entry.last_fetch = 0;
  ClearTag(key, entry);
  if (!tag.empty()) {
    tags_.emplace(key, tag);
    by_tag_[tag].insert(key);
    entry.tagged = true;
  }
}

void BlockTable::SetValidTokens(BlockEntry& entry, int64_t valid_tokens) {
  if (!entry.stored() && valid_tokens > 0) {
    ++num_stored_;
    num_predicted_ += entry.projected != nullptr ? 1 : 0;
  }
  entry.valid_tokens = static_cast<uint16_t>(valid_tokens);
  entry.version = next_version_++;
}

void BlockTable::Reserve(BlockEntry& entry, std::byte* slot, std::byte* row) {
  Touch(entry);
  entry.slot = slot;
  entry.projected = row;
  entry.last_write = 0;
  entry.last_fetch = 0;
}

int64_t BlockTable::Drop(int64_t layer, int64_t block_id) {
  BlockEntry& entry = at(layer, block_id);
  if (entry.stored()) {
    --num_stored_;
    num_predicted_ -= entry.projected != nullptr ? 1 : 0;
  }
  const int64_t freed_bytes = entry.slot != nullptr ? stride_bytes() : 0;
  Retire(entry.slot, entry.projected);
  ClearTag(layer * options_.max_blocks + block_id, entry);
  const uint16_t num_fillers = entry.num_fillers;
  const bool lent_in_hbm = entry.lent_in_hbm;
  entry = BlockEntry();
  entry.num_fillers = num_fillers;
  entry.lent_in_hbm = lent_in_hbm;
  return freed_bytes;
}

int64_t BlockTable::NextPresent(int64_t key) const {
  while (key < entries_.count()) {
    const int64_t segment = key / kSegmentEntries;
    const void* next = std::memchr(&touched_[segment], 1, touched_.count() - segment);
    if (next == nullptr) break;
    key = std::max(key, (static_cast<const uint8_t*>(next) - &touched_[0]) * kSegmentEntries);
    const int64_t end = std::min(entries_.count(), (key / kSegmentEntries + 1) * kSegmentEntries);
    for (; key < end; ++key) {
      if (entries_[key].present()) return key;
    }
  }
  return -1;
}

absl::string_view BlockTable::TagOf(int64_t layer, int64_t block_id) const {
  if (!at(layer, block_id).tagged) return "";
  return tags_.find(layer * options_.max_blocks + block_id)->second;
}

const absl::btree_set<int64_t>& BlockTable::KeysWithTag(absl::string_view tag) const {
  static const absl::btree_set<int64_t> none;
  const auto it = by_tag_.find(tag);
  return it == by_tag_.end() ? none : it->second;
}

}  // namespace sluice
