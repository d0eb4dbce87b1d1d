// Sequences of a session: tables of block ids, their generations, and the slots that they set
// aside.

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {

absl::Status SequenceNotFound(uint32_t sequence_id) {
  return Error(absl::StatusCode::kNotFound, Reason::kSequenceNotFound,
               absl::StrCat("no sequence ", sequence_id))
      .Meta("sequence_id", sequence_id)
      .Resource("sequence", absl::StrCat(sequence_id));
}

absl::Status StaleGeneration(uint32_t sequence_id, uint64_t given, uint64_t current) {
  return Error(absl::StatusCode::kAborted, Reason::kStaleGeneration,
               absl::StrCat("sequence ", sequence_id, " has generation ", current, ", not ", given))
      .Meta("sequence_id", sequence_id)
      .Meta("generation", given)
      .Meta("current_generation", current);
}

SequenceState* SessionImpl::FindSequence(uint32_t sequence_id) {
  return sequence_id < sequences_.size() ? sequences_[sequence_id].get() : nullptr;
}

// What can be wrong with an update whatever the session's state.
absl::Status SessionImpl::CheckUpdate(const SequenceUpdate& update, absl::string_view field) {
  if (update.sequence_id >= spec_.max_sequences) {
    return InvalidField(absl::StrCat(field, ".sequence_id"), update.sequence_id,
                        absl::StrCat("0..", spec_.max_sequences - 1));
  }
  if (update.generation == 0) {
    return InvalidField(absl::StrCat(field, ".generation"), 0, "1 or more");
  }
  const uint64_t stamp = next_stamp_++;
  for (const uint32_t block_id : update.block_ids) {
    if (block_id >= spec_.max_blocks)
      return CheckBlockId(block_id, absl::StrCat(field, ".block_ids"));
    if (std::exchange(block_marks_[block_id], stamp) == stamp) {
      return InvalidField(absl::StrCat(field, ".block_ids"), block_id, "no id twice in one table");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SessionImpl::PutResult> SessionImpl::ApplyUpdate(const SequenceUpdate& update) {
  SequenceState* sequence = FindSequence(update.sequence_id);
  const size_t length = sequence == nullptr ? 0 : sequence->block_ids.size();
  if (sequence != nullptr && update.generation < sequence->generation) {
    return StaleGeneration(update.sequence_id, update.generation, sequence->generation);
  }
  if (update.base_blocks > length) {
    return Error(absl::StatusCode::kFailedPrecondition, Reason::kBaseBeyondTable,
                 absl::StrCat("base_blocks is ", update.base_blocks, ", but the table of sequence ",
                              update.sequence_id, " has ", length, " blocks"))
        .Meta("sequence_id", update.sequence_id)
        .Meta("base_blocks", update.base_blocks)
        .Meta("table_blocks", length);
  }
  const size_t new_length = update.base_blocks + update.block_ids.size();
  // Where the table and the update agree nothing changes: all of it, when the update is a repeated
  // one.
  size_t same = update.base_blocks;
  while (same < std::min(length, new_length) &&
         sequence->block_ids[same] == update.block_ids[same - update.base_blocks]) {
    ++same;
  }
  const absl::Span<const uint32_t> added = update.block_ids.subspan(same - update.base_blocks);
  // The ids that stay must not come again.
  const uint64_t stamp = next_stamp_++;
  for (const uint32_t block_id : added) block_marks_[block_id] = stamp;
  for (size_t i = 0; i < same && !added.empty(); ++i) {
    if (block_marks_[sequence->block_ids[i]] == stamp) {
      return InvalidField("update.block_ids", sequence->block_ids[i], "no id twice in one table");
    }
  }
  SLUICE_ASSIGN_OR_RETURN(const int64_t reserved, ReserveBlocks(added));
  if (sequence == nullptr) {
    sequences_[update.sequence_id] = std::make_unique<SequenceState>();
    sequence = sequences_[update.sequence_id].get();
    ++num_sequences_;
  }
  sequence->generation = update.generation;
  // Added before removed: an id that only changes its place keeps its slot.
  AddToTables(added);
  RemoveFromTables(absl::MakeConstSpan(sequence->block_ids).subspan(same));
  sequence->block_ids.resize(same);
  sequence->block_ids.insert(sequence->block_ids.end(), added.begin(), added.end());
  return PutResult{static_cast<uint32_t>(new_length), reserved};
}

// Sets a slot and an A_g row aside in every layer that has none, or nothing at all.
absl::StatusOr<int64_t> SessionImpl::ReserveBlocks(absl::Span<const uint32_t> block_ids) {
  // A table of ids in many layers can ask for far more than the host has: the count ends where that
  // is clear.
  blocks_->Reclaim();
  const int64_t most = blocks_->max_free_slots();
  int64_t count = 0;
  for (const uint32_t block_id : block_ids) {
    for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
      count += blocks_->at(layer, block_id).present() ? 0 : 1;
    }
    if (count > most) return blocks_->NoRoom(std::ssize(block_ids) * spec_.num_layers);
  }
  if (count == 0) return 0;
  scratch_slots_.resize(count);
  SLUICE_RETURN_IF_ERROR(blocks_->TakeSlots(absl::MakeSpan(scratch_slots_)));
  if (rows_->free_rows() < count) {
    blocks_->GiveSlots(scratch_slots_);
    return Error(absl::StatusCode::kResourceExhausted, Reason::kPredictionMemory,
                 absl::StrCat("no A_g memory for ", count,
                              " blocks while replaced ones are still being read"))
        .Retry(absl::Milliseconds(10));
  }
  // Rows are within what the session has reserved, but their pages may not be to be had.
  scratch_rows_.clear();
  for (int64_t i = 0; i < count; ++i) {
    std::byte* const row = rows_->Take();
    if (row == nullptr) {
      for (std::byte* const given : scratch_rows_) rows_->Give(given);
      blocks_->GiveSlots(scratch_slots_);
      return NoMemory(rows_->status(), Reason::kDeviceMemory);
    }
    scratch_rows_.push_back(row);
  }
  int64_t taken = 0;
  for (const uint32_t block_id : block_ids) {
    for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
      BlockEntry& entry = blocks_->at(layer, block_id);
      if (entry.present()) continue;
      blocks_->Reserve(entry, scratch_slots_[taken], scratch_rows_[taken]);
      ++taken;
    }
  }
  return count;
}

void SessionImpl::AddToTables(absl::Span<const uint32_t> block_ids) {
  for (const uint32_t block_id : block_ids) ++blocks_->num_tables(block_id);
}

void SessionImpl::RemoveFromTables(absl::Span<const uint32_t> block_ids) {
  for (const uint32_t block_id : block_ids) {
    if (--blocks_->num_tables(block_id) > 0) continue;
    for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
      const BlockEntry& entry = blocks_->at(layer, block_id);
      if (entry.slot != nullptr && !entry.stored()) blocks_->Drop(layer, block_id);
    }
  }
}

int64_t SessionImpl::TokensPresent(const SequenceState& sequence, int64_t layer) const {
  int64_t tokens = 0;
  for (const uint32_t block_id : sequence.block_ids) {
    const int64_t valid_tokens = blocks_->at(layer, block_id).valid_tokens;
    tokens += valid_tokens;
    if (valid_tokens < spec_.block_tokens) break;
  }
  return tokens;
}

absl::StatusOr<SessionImpl::PutResult> SessionImpl::PutSequence(const SequenceUpdate& update) {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  SLUICE_RETURN_IF_ERROR(CheckUpdate(update, "update"));
  return ApplyUpdate(update);
}

absl::StatusOr<uint32_t> SessionImpl::ForkSequence(uint32_t source_sequence_id,
                                                   uint64_t source_generation,
                                                   uint32_t target_sequence_id,
                                                   uint64_t target_generation,
                                                   int64_t context_tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  for (const auto& [field, id] : {std::pair("source_sequence_id", source_sequence_id),
                                  std::pair("target_sequence_id", target_sequence_id)}) {
    if (id >= spec_.max_sequences) {
      return InvalidField(field, id, absl::StrCat("0..", spec_.max_sequences - 1));
    }
  }
  if (target_sequence_id == source_sequence_id) {
    return InvalidField("target_sequence_id", target_sequence_id,
                        "another than source_sequence_id");
  }
  if (target_generation == 0) return InvalidField("target_generation", 0, "1 or more");
  const SequenceState* source = FindSequence(source_sequence_id);
  if (source == nullptr) return SequenceNotFound(source_sequence_id);
  if (source_generation != source->generation) {
    return StaleGeneration(source_sequence_id, source_generation, source->generation);
  }
  const int64_t table_tokens = std::ssize(source->block_ids) * spec_.block_tokens;
  if (context_tokens < 0 || context_tokens > table_tokens) {
    return InvalidField("context_tokens", context_tokens, absl::StrCat("0..", table_tokens));
  }
  const int64_t num_blocks = context_tokens == 0
                                 ? std::ssize(source->block_ids)
                                 : (context_tokens + spec_.block_tokens - 1) / spec_.block_tokens;
  std::vector<uint32_t> shared(source->block_ids.begin(), source->block_ids.begin() + num_blocks);
  if (const SequenceState* target = FindSequence(target_sequence_id); target != nullptr) {
    // A repeated fork finds what the first one made.
    if (target->generation == target_generation && target->block_ids == shared) {
      return static_cast<uint32_t>(num_blocks);
    }
    return Error(absl::StatusCode::kAlreadyExists, Reason::kSequenceExists,
                 absl::StrCat("sequence ", target_sequence_id, " exists"))
        .Meta("sequence_id", target_sequence_id);
  }
  AddToTables(shared);
  sequences_[target_sequence_id] =
      std::make_unique<SequenceState>(SequenceState{target_generation, std::move(shared)});
  ++num_sequences_;
  return static_cast<uint32_t>(num_blocks);
}

absl::StatusOr<uint32_t> SessionImpl::TruncateSequence(uint32_t sequence_id, uint64_t generation,
                                                       int64_t context_tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  if (sequence_id >= spec_.max_sequences) {
    return InvalidField("sequence_id", sequence_id, absl::StrCat("0..", spec_.max_sequences - 1));
  }
  SequenceState* sequence = FindSequence(sequence_id);
  if (sequence == nullptr) return SequenceNotFound(sequence_id);
  // The same request again: it raised the generation to this one when it came first.
  if (generation == sequence->generation && generation == sequence->truncated_generation &&
      context_tokens == sequence->truncated_tokens) {
    return static_cast<uint32_t>(sequence->block_ids.size());
  }
  if (generation <= sequence->generation) {
    return Error(absl::StatusCode::kAborted, Reason::kStaleGeneration,
                 absl::StrCat("sequence ", sequence_id, " has generation ", sequence->generation,
                              "; a truncation needs a higher one than that, not ", generation))
        .Meta("sequence_id", sequence_id)
        .Meta("generation", generation)
        .Meta("current_generation", sequence->generation);
  }
  const int64_t table_tokens = std::ssize(sequence->block_ids) * spec_.block_tokens;
  if (context_tokens < 0 || context_tokens > table_tokens) {
    return InvalidField("context_tokens", context_tokens, absl::StrCat("0..", table_tokens));
  }
  const int64_t num_blocks = (context_tokens + spec_.block_tokens - 1) / spec_.block_tokens;
  RemoveFromTables(absl::MakeConstSpan(sequence->block_ids).subspan(num_blocks));
  sequence->block_ids.resize(num_blocks);
  sequence->generation = generation;
  sequence->truncated_generation = generation;
  sequence->truncated_tokens = context_tokens;
  const int64_t tail_tokens = context_tokens % spec_.block_tokens;
  if (tail_tokens > 0 && blocks_->num_tables(sequence->block_ids.back()) == 1) {
    for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
      BlockEntry& entry = blocks_->at(layer, sequence->block_ids.back());
      if (entry.valid_tokens > tail_tokens) blocks_->SetValidTokens(entry, tail_tokens);
    }
  }
  return static_cast<uint32_t>(num_blocks);
}

absl::StatusOr<int64_t> SessionImpl::ReleaseSequence(absl::Span<const uint32_t> sequence_ids,
                                                     bool drop_blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(AdmitChange());
  const uint64_t stamp = next_stamp_++;
  for (const uint32_t sequence_id : sequence_ids) {
    if (sequence_id >= spec_.max_sequences) {
      return InvalidField("sequence_ids", sequence_id,
                          absl::StrCat("0..", spec_.max_sequences - 1));
    }
    if (std::exchange(sequence_marks_[sequence_id], stamp) == stamp) {
      return InvalidField("sequence_ids", sequence_id, "no id twice");
    }
    if (FindSequence(sequence_id) == nullptr) return SequenceNotFound(sequence_id);
  }
  int64_t dropped_blocks = 0;
  for (const uint32_t sequence_id : sequence_ids) {
    const std::unique_ptr<SequenceState> sequence = std::move(sequences_[sequence_id]);
    --num_sequences_;
    RemoveFromTables(sequence->block_ids);
    for (const uint32_t block_id : sequence->block_ids) {
      if (!drop_blocks || blocks_->num_tables(block_id) > 0) continue;
      for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
        if (!blocks_->at(layer, block_id).stored()) continue;
        blocks_->Drop(layer, block_id);
        ++dropped_blocks;
      }
    }
  }
  return dropped_blocks;
}

std::vector<SequenceInfo> SessionImpl::ListSequences(uint32_t first_sequence_id,
                                                     int64_t limit) const {
  std::vector<SequenceInfo> result;
  // Locked anew for each one: counting the tokens of a long sequence visits every block in every
  // layer.
  for (size_t id = first_sequence_id; std::ssize(result) < limit; ++id) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (id < sequences_.size() && sequences_[id] == nullptr) ++id;
    if (id >= sequences_.size()) break;
    const SequenceState* sequence = sequences_[id].get();
    SequenceInfo info;
    info.sequence_id = static_cast<uint32_t>(id);
    info.generation = sequence->generation;
    info.block_ids = sequence->block_ids;
    info.tokens = std::ssize(sequence->block_ids) * spec_.block_tokens;
    for (int64_t layer = 0; layer < spec_.num_layers; ++layer) {
      info.tokens = std::min(info.tokens, TokensPresent(*sequence, layer));
    }
    result.push_back(std::move(info));
  }
  return result;
}

}  // namespace sluice
