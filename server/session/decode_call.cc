// A decode step: tables updated, new tokens written and projected, attention computed, one layer.
//
// Nothing here allocates once a call object has served a step as large as this one.

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/session/session_impl.h"

namespace sluice {
namespace {

// So many entries are asked for ahead of use.
constexpr int64_t kPrefetchBlocks = 16;

}  // namespace

struct DecodeCall::Work {
  std::vector<AttendSequence> attend;
  std::vector<AttendSequence> pieces;
  std::vector<const std::byte*> addresses;
  std::vector<TokenCopy> copies;
  std::vector<ProjectBlock> projections;
  int64_t out_offset = 0;
  int64_t lse_offset = 0;
};

DecodeCall::DecodeCall() : work_(std::make_unique<Work>()) {}
DecodeCall::~DecodeCall() = default;

// The steps of Start, with what they share.
class DecodeStepBuilder {
 public:
  DecodeStepBuilder(SessionImpl& session, DecodeCall& call, DecodeCall::Work& work,
                    Staging& staging)
      : session_(session), call_(call), work_(work), staging_(staging) {}

  absl::Status Check();
  absl::Status Stage();
  void Plan();
  void Launch();

 private:
  absl::Status CheckSequence(const DecodeSequence& sequence) const;
  absl::Status CheckWriters() const;
  int64_t ArrayBytes() const;
  uint32_t BlockAt(const DecodeSequence& sequence, int64_t index, bool* known) const;
  absl::Status PlanSequence(const DecodeSequence& sequence, int64_t first_row);
  absl::Status ReadTable(const SequenceState& state, const DecodeSequence& sequence);
  void PlanWrites(const SequenceState& state, const DecodeSequence& sequence, int64_t first_row);
  void CountReads(int64_t context_tokens);

  bool writes() const { return call_.k.given(); }
  int64_t first_position(const DecodeSequence& sequence) const {
    return sequence.context_tokens - sequence.query_tokens;
  }

  SessionImpl& session_;
  DecodeCall& call_;
  DecodeCall::Work& work_;
  Staging& staging_;
  AttendOptions options_;
  int64_t k_offset_ = 0;
  int64_t v_offset_ = 0;
  int64_t q_offset_ = 0;
  int64_t sinks_offset_ = 0;
  StreamPosition last_fetch_ = 0;  // of the blocks that are written
  int64_t num_host_blocks_ = 0;    // of the sequence at hand
};

absl::Status DecodeStepBuilder::CheckSequence(const DecodeSequence& sequence) const {
  const SessionSpec& spec = session_.spec_;
  if (sequence.sequence_id >= spec.max_sequences) {
    return InvalidField("sequences.sequence_id", sequence.sequence_id,
                        absl::StrCat("0..", spec.max_sequences - 1));
  }
  if (sequence.query_tokens < 1 || sequence.query_tokens > kMaxQueryTokens) {
    return InvalidField("sequences.query_tokens", sequence.query_tokens,
                        absl::StrCat("1..", kMaxQueryTokens));
  }
  const int64_t most_tokens = spec.max_blocks * spec.block_tokens;
  if (sequence.context_tokens < sequence.query_tokens || sequence.context_tokens > most_tokens) {
    return InvalidField("sequences.context_tokens", sequence.context_tokens,
                        absl::StrCat("query_tokens (", sequence.query_tokens, ") .. max_blocks x ",
                                     "block_tokens (", most_tokens, ")"));
  }
  if (!sequence.has_update) return absl::OkStatus();
  if (sequence.update.sequence_id != sequence.sequence_id) {
    return InvalidField("sequences.update.sequence_id", sequence.update.sequence_id,
                        absl::StrCat("the sequence's own (", sequence.sequence_id, ")"));
  }
  return session_.CheckUpdate(sequence.update, "sequences.update");
}

// All that makes a request malformed, before anything is written.
absl::Status DecodeStepBuilder::Check() {
  const SessionSpec& spec = session_.spec_;
  SLUICE_RETURN_IF_ERROR(session_.CheckLayer(call_.layer));
  const int64_t num_sequences = std::ssize(call_.sequences);
  if (num_sequences < 1 || num_sequences > spec.max_sequences) {
    return InvalidField("sequences", absl::StrCat(num_sequences, " sequences"),
                        absl::StrCat("1..", spec.max_sequences));
  }
  call_.rows = 0;
  for (const DecodeSequence& sequence : call_.sequences) {
    SLUICE_RETURN_IF_ERROR(CheckSequence(sequence));
    call_.rows += sequence.query_tokens;
  }
  const uint64_t stamp = session_.next_stamp_++;
  for (const DecodeSequence& sequence : call_.sequences) {
    if (std::exchange(session_.sequence_marks_[sequence.sequence_id], stamp) == stamp) {
      return Error(absl::StatusCode::kInvalidArgument, Reason::kDuplicateSequence,
                   absl::StrCat("sequence ", sequence.sequence_id, " is twice in the step"))
          .Meta("sequence_id", sequence.sequence_id);
    }
  }
  const int64_t q_dims[] = {call_.rows, spec.num_query_heads, spec.head_dim};
  SLUICE_RETURN_IF_ERROR(CheckTensor(call_.q, "q", spec.kv_dtype, q_dims));
  if (call_.k.given() != call_.v.given()) {
    return InvalidField(call_.k.given() ? "v" : "k", "not given", "k and v together, or neither");
  }
  if (writes()) {
    const int64_t kv_dims[] = {call_.rows, spec.num_kv_heads, spec.head_dim};
    SLUICE_RETURN_IF_ERROR(CheckTensor(call_.k, "k", spec.kv_dtype, kv_dims));
    SLUICE_RETURN_IF_ERROR(CheckTensor(call_.v, "v", spec.kv_dtype, kv_dims));
  }
  SLUICE_RETURN_IF_ERROR(session_.CheckAttention(call_.attention, &options_));
  SLUICE_RETURN_IF_ERROR(session_.CheckOutDtype(call_.out_dtype));
  return writes() ? CheckWriters() : absl::OkStatus();
}

// The id at a place of the table as the step's update will leave it.
uint32_t DecodeStepBuilder::BlockAt(const DecodeSequence& sequence, int64_t index,
                                    bool* known) const {
  *known = true;
  if (sequence.has_update && index >= sequence.update.base_blocks) {
    const int64_t added = index - sequence.update.base_blocks;
    if (added < std::ssize(sequence.update.block_ids)) return sequence.update.block_ids[added];
  } else if (const SequenceState* state = session_.FindSequence(sequence.sequence_id);
             state != nullptr && index < std::ssize(state->block_ids)) {
    return state->block_ids[index];
  }
  *known = false;
  return 0;
}

// No two sequences of a step may write one block; a block that an offload is filling is waited for.
absl::Status DecodeStepBuilder::CheckWriters() const {
  const uint64_t stamp = session_.next_stamp_++;
  for (size_t i = 0; i < call_.sequences.size(); ++i) {
    const DecodeSequence& sequence = call_.sequences[i];
    const int64_t block_tokens = session_.spec_.block_tokens;
    for (int64_t index = first_position(sequence) / block_tokens;
         index <= (sequence.context_tokens - 1) / block_tokens; ++index) {
      bool known = false;
      const uint32_t block_id = BlockAt(sequence, index, &known);
      if (!known) break;
      const BlockEntry& entry = session_.blocks_->at(call_.layer, block_id);
      if (entry.slot == nullptr && entry.num_fillers > 0) return WaitForOffload();
      if (std::exchange(session_.block_marks_[block_id], stamp) == stamp) {
        return Error(absl::StatusCode::kInvalidArgument, Reason::kDuplicateBlock,
                     absl::StrCat("sequences ",
                                  call_.sequences[session_.block_writers_[block_id]].sequence_id,
                                  " and ", sequence.sequence_id, " both write block ", block_id))
            .Meta("layer", call_.layer)
            .Meta("block_id", block_id);
      }
      session_.block_writers_[block_id] = static_cast<uint32_t>(i);
    }
  }
  return absl::OkStatus();
}

// What the step's operations read beside tensors, at most: q, lists of copies, tables, units.
int64_t DecodeStepBuilder::ArrayBytes() const {
  int64_t bytes = call_.q.bytes;
  for (const DecodeSequence& sequence : call_.sequences) {
    const int64_t num_written = sequence.query_tokens / session_.spec_.block_tokens + 2;
    bytes += session_.AttendArrayBytes(sequence.context_tokens, sequence.query_tokens) +
             num_written * static_cast<int64_t>(sizeof(TokenCopy) + sizeof(ProjectBlock));
  }
  return bytes;
}

absl::Status DecodeStepBuilder::Stage() {
  const SessionSpec& spec = session_.spec_;
  staging_.Begin();
  q_offset_ = staging_.Add(call_.q.bytes);
  k_offset_ = staging_.Add(call_.k.bytes);
  v_offset_ = staging_.Add(call_.v.bytes);
  sinks_offset_ = staging_.Add(std::ssize(call_.attention.sink_logits) * 4);
  const int64_t row_elements = spec.num_query_heads * spec.head_dim;
  const int64_t out_bytes = call_.rows * row_elements * DTypeBytes(call_.out_dtype);
  const int64_t lse_bytes = call_.return_lse ? call_.rows * spec.num_query_heads * 4 : 0;
  work_.out_offset = staging_.Add(out_bytes);
  work_.lse_offset = staging_.Add(lse_bytes);
  SLUICE_RETURN_IF_ERROR(session_.CommitStaging(staging_, ArrayBytes()));
  std::memcpy(staging_.at(q_offset_), call_.q.data, call_.q.bytes);
  if (writes()) {
    std::memcpy(staging_.at(k_offset_), call_.k.data, call_.k.bytes);
    std::memcpy(staging_.at(v_offset_), call_.v.data, call_.v.bytes);
  }
  if (!call_.attention.sink_logits.empty()) {
    std::memcpy(staging_.at(sinks_offset_), call_.attention.sink_logits.data(),
                call_.attention.sink_logits.size() * 4);
    options_.sink_logits = staging_.at<float>(sinks_offset_);
  }
  call_.out = {staging_.at(work_.out_offset), static_cast<size_t>(out_bytes)};
  call_.lse = {staging_.at<float>(work_.lse_offset), static_cast<size_t>(lse_bytes / 4)};
  return absl::OkStatus();
}

// Appends the addresses of the sequence's blocks. Every position below the first query token's, or
// below context_tokens where nothing is written, must be there.
absl::Status DecodeStepBuilder::ReadTable(const SequenceState& state,
                                          const DecodeSequence& sequence) {
  const int64_t block_tokens = session_.spec_.block_tokens;
  const BlockTable& blocks = *session_.blocks_;
  const auto missing = [&](int64_t index, int64_t position) {
    Error error(absl::StatusCode::kFailedPrecondition, Reason::kTokensMissing,
                absl::StrCat("sequence ", sequence.sequence_id, " has no token at position ",
                             position, " in layer ", call_.layer));
    error.AddMeta("layer", call_.layer);
    error.AddMeta("sequence_id", sequence.sequence_id);
    error.AddMeta("position", position);
    if (index < std::ssize(state.block_ids)) error.AddMeta("block_id", state.block_ids[index]);
    return absl::Status(std::move(error));
  };
  const int64_t table_tokens = std::ssize(state.block_ids) * block_tokens;
  if (sequence.context_tokens > table_tokens) {
    return missing(std::ssize(state.block_ids), table_tokens);
  }
  // A long context has tens of thousands of entries, in no order: one pass, asked for ahead.
  const int64_t need_tokens = writes() ? first_position(sequence) : sequence.context_tokens;
  const int64_t num_blocks = (sequence.context_tokens + block_tokens - 1) / block_tokens;
  const size_t first_address = work_.addresses.size();
  work_.addresses.resize(first_address + num_blocks);
  const std::byte** addresses = work_.addresses.data() + first_address;
  const BlockEntry* const entries = &blocks.at(call_.layer, 0);
  int64_t num_hbm_blocks = 0;
  for (int64_t index = 0; index < num_blocks; ++index) {
    if (index + kPrefetchBlocks < num_blocks) {
      __builtin_prefetch(&entries[state.block_ids[index + kPrefetchBlocks]]);
    }
    const BlockEntry& entry = entries[state.block_ids[index]];
    const int64_t need = std::min(block_tokens, need_tokens - index * block_tokens);
    if (entry.valid_tokens < need) {
      work_.addresses.resize(first_address);
      return missing(index, index * block_tokens + entry.valid_tokens);
    }
    addresses[index] = entry.slot;
    num_hbm_blocks += blocks.InHbm(entry.slot) ? 1 : 0;
  }
  num_host_blocks_ = num_blocks - num_hbm_blocks;
  if (writes()) {
    for (int64_t index = first_position(sequence) / block_tokens;
         index * block_tokens < sequence.context_tokens; ++index) {
      const uint32_t block_id = state.block_ids[index];
      if (blocks.num_tables(block_id) > 1) {
        work_.addresses.resize(first_address);
        return BlockShared(call_.layer, block_id);
      }
    }
  }
  return absl::OkStatus();
}

void DecodeStepBuilder::PlanWrites(const SequenceState& state, const DecodeSequence& sequence,
                                   int64_t first_row) {
  const SessionSpec& spec = session_.spec_;
  const int64_t row_bytes = spec.num_kv_heads * spec.head_dim * DTypeBytes(spec.kv_dtype);
  for (int64_t position = first_position(sequence); position < sequence.context_tokens;) {
    const int64_t first_token = position % spec.block_tokens;
    const int64_t num_tokens =
        std::min(spec.block_tokens - first_token, sequence.context_tokens - position);
    const int64_t row = first_row + position - first_position(sequence);
    BlockEntry& entry =
        session_.blocks_->at(call_.layer, state.block_ids[position / spec.block_tokens]);
    work_.copies.push_back({entry.slot, staging_.at(k_offset_ + row * row_bytes),
                            staging_.at(v_offset_ + row * row_bytes),
                            static_cast<int32_t>(first_token), static_cast<int32_t>(num_tokens),
                            0});
    if (entry.projected != nullptr) {
      work_.projections.push_back({entry.slot, entry.projected, static_cast<int32_t>(first_token),
                                   static_cast<int32_t>(num_tokens)});
    }
    last_fetch_ = std::max(last_fetch_, entry.last_fetch);
    // The store is the next work of the stream, or the one after a wait; attention and the end of
    // the call follow it.
    entry.last_write = session_.attention_stream_->enqueued() + 2;
    session_.blocks_->SetValidTokens(
        entry, std::max<int64_t>(entry.valid_tokens, first_token + num_tokens));
    position += num_tokens;
  }
}

// Whole blocks, the last one apart, of which `context_tokens` are read.
void DecodeStepBuilder::CountReads(int64_t context_tokens) {
  const int64_t block_tokens = session_.spec_.block_tokens;
  const int64_t num_blocks = (context_tokens + block_tokens - 1) / block_tokens;
  const int64_t num_hbm_blocks = num_blocks - num_host_blocks_;
  const int64_t unread_bytes =
      (num_blocks * block_tokens - context_tokens) * (session_.slot_bytes_ / block_tokens);
  StepStats& stats = call_.stats;
  stats.hbm_blocks += num_hbm_blocks;
  stats.host_blocks += num_host_blocks_;
  stats.hbm_bytes += num_hbm_blocks * session_.slot_bytes_;
  stats.host_bytes += num_host_blocks_ * session_.slot_bytes_;
  const bool last_in_hbm = session_.blocks_->InHbm(work_.addresses.back());
  (last_in_hbm ? stats.hbm_bytes : stats.host_bytes) -= unread_bytes;
}

absl::Status DecodeStepBuilder::PlanSequence(const DecodeSequence& sequence, int64_t first_row) {
  if (sequence.has_update) {
    SLUICE_RETURN_IF_ERROR(session_.ApplyUpdate(sequence.update).status());
  }
  SequenceState* state = session_.FindSequence(sequence.sequence_id);
  if (state == nullptr) return SequenceNotFound(sequence.sequence_id);
  if (sequence.generation != 0 && sequence.generation != state->generation) {
    return StaleGeneration(sequence.sequence_id, sequence.generation, state->generation);
  }
  SLUICE_RETURN_IF_ERROR(ReadTable(*state, sequence));
  if (writes()) PlanWrites(*state, sequence, first_row);
  AttendSequence attend;
  attend.context_tokens = sequence.context_tokens;
  attend.first_row = first_row;
  attend.query_tokens = static_cast<int32_t>(sequence.query_tokens);
  attend.host_blocks = num_host_blocks_;
  work_.attend.push_back(attend);
  CountReads(sequence.context_tokens);
  return absl::OkStatus();
}

void DecodeStepBuilder::Plan() {
  work_.attend.clear();
  work_.addresses.clear();
  work_.copies.clear();
  work_.projections.clear();
  call_.stats = StepStats();
  call_.sequence_status.assign(call_.sequences.size(), absl::OkStatus());
  const SessionSpec& spec = session_.spec_;
  const int64_t row_elements = spec.num_query_heads * spec.head_dim;
  const int64_t row_bytes = row_elements * DTypeBytes(call_.out_dtype);
  int64_t first_row = 0;
  for (size_t i = 0; i < call_.sequences.size(); ++i) {
    const DecodeSequence& sequence = call_.sequences[i];
    absl::Status status = PlanSequence(sequence, first_row);
    if (!status.ok()) {
      std::memset(staging_.at(work_.out_offset + first_row * row_bytes), 0,
                  sequence.query_tokens * row_bytes);
      if (call_.return_lse) {
        float* lse = staging_.at<float>(work_.lse_offset) + first_row * spec.num_query_heads;
        std::fill_n(lse, sequence.query_tokens * spec.num_query_heads,
                    -std::numeric_limits<float>::infinity());
      }
      call_.sequence_status[i] = std::move(status);
    }
    first_row += sequence.query_tokens;
  }
  // The addresses stay where they are from here on.
  const std::byte* const* next = work_.addresses.data();
  for (AttendSequence& attend : work_.attend) {
    attend.blocks = next;
    next += (attend.context_tokens + spec.block_tokens - 1) / spec.block_tokens;
  }
}

void DecodeStepBuilder::Launch() {
  Stream& stream = *session_.attention_stream_;
  if (!work_.copies.empty()) {
    if (last_fetch_ > session_.fetch_stream_->completed()) {
      stream.WaitFor(*session_.fetch_stream_, last_fetch_);
    }
    session_.ops_.StoreTokens({session_.layout_, work_.copies.data(), std::ssize(work_.copies)},
                              stream);
  }
  if (!work_.projections.empty()) {
    session_.ops_.ProjectKeys(
        {session_.layout_, static_cast<int32_t>(session_.spec_.rank), session_.projection_.data(),
         0, work_.projections.data(), std::ssize(work_.projections)},
        stream);
  }
  if (work_.attend.empty()) return;
  AttendParams params;
  params.layout = session_.layout_;
  params.options = options_;
  params.num_query_heads = static_cast<int32_t>(session_.spec_.num_query_heads);
  params.sequences = work_.attend.data();
  params.num_sequences = std::ssize(work_.attend);
  params.num_rows = call_.rows;
  params.q = staging_.at(q_offset_);
  params.out = staging_.at(work_.out_offset);
  params.out_dtype = call_.out_dtype;
  params.lse = call_.return_lse ? staging_.at<float>(work_.lse_offset) : nullptr;
  session_.LaunchAttend(params, &work_.pieces);
}

absl::Status DecodeCall::Start(SessionImpl& session) {
  DecodeStepBuilder step(session, *this, *work_, internal_->staging);
  SLUICE_RETURN_IF_ERROR(step.Check());
  SLUICE_RETURN_IF_ERROR(step.Stage());
  step.Plan();
  step.Launch();
  return absl::OkStatus();
}

// A step without updates reads and writes blocks of its own sequences alone, and writes none that
// another table holds.
bool DecodeCall::LetsPass(SessionImpl& session) const {
  for (const DecodeSequence& sequence : sequences) {
    if (sequence.has_update || sequence.sequence_id >= session.spec_.max_sequences) return false;
    session.waiting_marks_[sequence.sequence_id] = session.waiting_stamp_;
  }
  return true;
}

bool DecodeCall::MayPass(const SessionImpl& session) const {
  return std::all_of(sequences.begin(), sequences.end(), [&](const DecodeSequence& sequence) {
    return !sequence.has_update && sequence.sequence_id < session.spec_.max_sequences &&
           session.waiting_marks_[sequence.sequence_id] != session.waiting_stamp_;
  });
}

void DecodeCall::Collect(SessionImpl&) {
  const absl::Time now = absl::Now();
  stats.queued_us = absl::ToInt64Microseconds(internal_->start_time - internal_->submit_time);
  stats.device_us = absl::ToInt64Microseconds(now - internal_->start_time);
  stats.total_us = absl::ToInt64Microseconds(now - internal_->submit_time);
}

}  // namespace sluice
