// Who is where: the blocks of one session, by (layer, block_id), and the storage that waits for its
// last readers.
//
// A block's slot and A_g row are addresses. Whoever enqueues work on them resolves the addresses at
// that moment; a block that is replaced or dropped gets new addresses or none, and the old ones are
// retired: they wait in limbo, stamped with how far each stream had been filled, and are free when
// every stream has passed its stamp. So there is no count per reader, and any number of readers.
//
// Threads: not safe; the session's lock guards it. Streams are only asked how far they are.
// Memory: an entry is 48 bytes, its page is committed when the first block of the page is stored.

#ifndef SERVER_SWAP_BLOCK_TABLE_H_
#define SERVER_SWAP_BLOCK_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"
#include "server/store/slot_store.h"
#include "server/swap/lazy_array.h"
#include "server/swap/row_pool.h"

namespace sluice {

// All zero: absent.
struct BlockEntry {
  std::byte* slot = nullptr;       // null: absent, or lent to an offload that fills it
  std::byte* projected = nullptr;  // its A_g row; null: not predicted
  uint64_t version = 0;            // of the session's counter
  StreamPosition last_write = 0;   // attention stream: newest append into the slot
  StreamPosition last_fetch = 0;   // fetch stream: newest read of the slot
  uint16_t valid_tokens = 0;       // 0: reserved only
  uint16_t num_fillers = 0;        // offloads that hold this entry's reserved slot: 0 or 1
  bool tagged = false;
  bool lent_in_hbm = false;  // where the slot lies that a filler holds

  bool stored() const { return valid_tokens > 0; }
  bool present() const { return slot != nullptr || num_fillers > 0; }
};
static_assert(sizeof(BlockEntry) <= 48);

class BlockTable {
 public:
  struct Options {
    int64_t num_layers = 0;
    int64_t max_blocks = 0;
    int64_t slot_bytes = 0;
    // Of this session's slots in either tier, in strides; 0: none of its own.
    int64_t host_budget_bytes = 0;
    int64_t hbm_budget_bytes = 0;
  };
  // Where slots come from: HBM while there is room, then host memory.
  struct Stores {
    SlotStore* hbm = nullptr;  // all in one range of addresses; null: there is none
    SlotStore* host = nullptr;
  };
  // Everything given must outlive the table. `readers` are the streams that can hold addresses.
  BlockTable(const Options& options, const Stores& stores, RowPool* rows,
             std::vector<Stream*> readers);
  // All streams must be idle.
  ~BlockTable();
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  bool valid() const { return entries_.valid() && touched_.valid() && num_tables_.valid(); }

  BlockEntry& at(int64_t layer, int64_t block_id) {
    return entries_[layer * options_.max_blocks + block_id];
  }
  const BlockEntry& at(int64_t layer, int64_t block_id) const {
    return entries_[layer * options_.max_blocks + block_id];
  }
  // Sequence tables that hold the id.
  uint32_t& num_tables(int64_t block_id) { return num_tables_[block_id]; }
  uint32_t num_tables(int64_t block_id) const { return num_tables_[block_id]; }

  // Slots that TakeSlots could give out at the very most; more than these need not be asked for.
  int64_t max_free_slots() const;
  // RESOURCE_EXHAUSTED HOST_MEMORY for `count` slots of which HBM takes none and host memory not
  // all; retryable while slots wait in limbo.
  absl::Status NoRoom(int64_t count) const;
  // Fills `slots`, or takes none: RESOURCE_EXHAUSTED HOST_MEMORY (the store's or the session's
  // budget).
  [[nodiscard]] absl::Status TakeSlots(absl::Span<std::byte*> slots);
  // Slots that nobody has seen.
  void GiveSlots(absl::Span<std::byte* const> slots);
  // A slot and a row (either may be null) that work in flight may still read.
  void Retire(std::byte* slot, std::byte* row);
  // Frees what the streams have passed. Called by Retire and TakeSlots, and when work completes.
  void Reclaim();

  // Puts content into an entry; what it held is retired. Counts, version and tag follow.
  void Store(int64_t layer, int64_t block_id, std::byte* slot, std::byte* row, int64_t valid_tokens,
             absl::string_view tag);
  // Appended or cut tokens of a stored or reserved block.
  void SetValidTokens(BlockEntry& entry, int64_t valid_tokens);
  // Sets a slot and a row aside for an absent block.
  void Reserve(BlockEntry& entry, std::byte* slot, std::byte* row);
  // Makes a block absent, whatever it was; returns the bytes of its slot.
  int64_t Drop(int64_t layer, int64_t block_id);

  // The first key >= `key` (layer * max_blocks + block_id) whose block is present, or -1.
  int64_t NextPresent(int64_t key) const;

  absl::string_view TagOf(int64_t layer, int64_t block_id) const;
  // Keys (layer * max_blocks + block_id) of the stored blocks with a tag, ascending. Valid until a
  // tag is set or cleared.
  const absl::btree_set<int64_t>& KeysWithTag(absl::string_view tag) const;

  int64_t num_stored() const { return num_stored_; }
  int64_t num_predicted() const { return num_predicted_; }
  // Handed out, limbo included.
  int64_t num_slots() const { return num_host_slots_ + num_hbm_slots_; }
  int64_t num_hbm_slots() const { return num_hbm_slots_; }
  bool InHbm(const std::byte* slot) const {
    return slot >= hbm_.data() && slot < hbm_.data() + hbm_.size();
  }
  int64_t stride_bytes() const { return SlotStore::StrideBytes(options_.slot_bytes); }
  RowPool& rows() { return *rows_; }
  void SetBudgets(int64_t host_bytes, int64_t hbm_bytes) {
    options_.host_budget_bytes = host_bytes;
    options_.hbm_budget_bytes = hbm_bytes;
  }

 private:
  struct Retired {
    std::byte* slot;
    std::byte* row;
    StreamPosition stamps[2];
  };

  // Entries of a segment share a flag that says whether one of them was ever used, so that a walk
  // over a table sized for the worst case skips what is empty.
  static constexpr int64_t kSegmentEntries = 4096;

  void Touch(const BlockEntry& entry) { touched_[(&entry - &entries_[0]) / kSegmentEntries] = 1; }
  void ClearTag(int64_t key, BlockEntry& entry);
  bool Passed(const Retired& retired) const;
  // Slots that the session's own budget allows in a tier, where `store` is full at the latest.
  int64_t RoomSlots(const SlotStore* store, int64_t budget_bytes, int64_t num_slots) const;

  Options options_;
  const Stores stores_;
  const absl::Span<const std::byte> hbm_;  // addresses of its slots
  RowPool* const rows_;
  const std::vector<Stream*> readers_;
  LazyArray<BlockEntry> entries_;   // [layer, block_id]
  LazyArray<uint8_t> touched_;      // [segment of entries]
  LazyArray<uint32_t> num_tables_;  // [block_id]
  std::vector<Retired> limbo_;      // in order of retiring; [limbo_begin_, end) wait
  size_t limbo_begin_ = 0;
  absl::flat_hash_map<int64_t, std::string> tags_;  // by key
  // Keys. A set each: a client may give one tag to all of its blocks.
  absl::flat_hash_map<std::string, absl::btree_set<int64_t>> by_tag_;
  uint64_t next_version_ = 1;
  int64_t num_stored_ = 0;
  int64_t num_predicted_ = 0;
  int64_t num_host_slots_ = 0;
  int64_t num_hbm_slots_ = 0;
};

}  // namespace sluice

#endif  // SERVER_SWAP_BLOCK_TABLE_H_
