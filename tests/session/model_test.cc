// Random operations on a session against a small model of it in plain containers: no difference may
// be seen.
//
// SLUICE_MODEL_OPERATIONS and SLUICE_MODEL_SEED (bazel test --test_env=...) ask for more or other
// ones; a failure prints the seed and the operation.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/session/session_fixture.h"
#include "tests/session/session_model.h"

namespace sluice {
namespace {

struct Geometry {
  int64_t num_layers, num_query_heads, num_kv_heads, head_dim, block_tokens, rank, max_blocks;
  int weight;  // of 100 operations
};
// Slots of 64 bytes to 256 KiB.
constexpr Geometry kGeometries[] = {
    {3, 1, 1, 16, 1, 1, 24, 30},   {2, 4, 2, 32, 4, 8, 16, 30},   {1, 6, 3, 24, 8, 5, 9, 20},
    {2, 4, 1, 72, 16, 19, 12, 12}, {1, 8, 4, 256, 2, 128, 10, 6}, {1, 8, 8, 128, 64, 32, 6, 2},
};
const char* const kTags[] = {"", "", "a", "b", "a longer tag of thirty-two bytes"};

class Model : public SessionFixture {
 protected:
  uint32_t Roll(int64_t below) { return static_cast<uint32_t>(random_() % below); }
  bool OneIn(int64_t n) { return Roll(n) == 0; }

  // The content that a number stands for: [kv_heads, head_dim] of K, or of V.
  void AppendToken(uint64_t token, bool is_v, Bits* bits) const {
    uint64_t x = token * 2 + (is_v ? 1 : 0);
    for (int64_t i = 0; i < spec().num_kv_heads * spec().head_dim; ++i) {
      x = x * 6364136223846793005ull + 1442695040888963407ull;
      bits->push_back(Bf16FromFloat(static_cast<float>(static_cast<int>(x >> 56) - 128) / 64));
    }
  }
  Tokens Content(const std::vector<uint64_t>& tokens) const {
    Tokens content;
    for (const uint64_t token : tokens) {
      AppendToken(token, false, &content.k);
      AppendToken(token, true, &content.v);
    }
    return content;
  }
  const SessionSpec& spec() const { return session_->spec(); }

  // The operations. Each does the same to both and compares.
  std::vector<uint32_t> RandomIds(int64_t most) {
    std::vector<uint32_t> ids(1 + Roll(most));
    for (uint32_t& id : ids) id = Roll(spec().max_blocks);
    return ids;
  }
  SequenceUpdate RandomUpdate(uint32_t sequence_id, std::vector<uint32_t>* ids) {
    const auto it = model_.sequences.find(sequence_id);
    SequenceUpdate update;
    update.sequence_id = sequence_id;
    update.generation =
        it == model_.sequences.end() ? 1 + Roll(3) : it->second.generation + Roll(2);
    if (OneIn(10) && update.generation > 1) --update.generation;
    const int64_t length = it == model_.sequences.end() ? 0 : std::ssize(it->second.ids);
    update.base_blocks = OneIn(3) ? Roll(length + 1) : static_cast<uint32_t>(length);
    if (OneIn(20)) ++update.base_blocks;
    *ids = OneIn(10) ? std::vector<uint32_t>() : RandomIds(3);
    if (OneIn(4) && length > 0) {
      // A repeat of what is there.
      update.base_blocks = Roll(length);
      ids->assign(it->second.ids.begin() + update.base_blocks, it->second.ids.end());
    }
    update.block_ids = *ids;
    return update;
  }

  void PutOp() {
    std::vector<uint32_t> ids;
    const SequenceUpdate update = RandomUpdate(Roll(spec().max_sequences), &ids);
    Compare(session_->PutSequence(update).status(), model_.PutRule(update));
  }

  void ForkOp() {
    const uint32_t from = Roll(spec().max_sequences), to = Roll(spec().max_sequences);
    const auto source = model_.sequences.find(from);
    const uint64_t generation =
        source == model_.sequences.end() ? 1 : source->second.generation + (OneIn(10) ? 1 : 0);
    const int64_t tokens = source == model_.sequences.end() || OneIn(2)
                               ? 0
                               : Roll(std::ssize(source->second.ids) * spec().block_tokens + 1);
    const absl::Status status = session_->ForkSequence(from, generation, to, 1, tokens).status();
    if (from == to) return Compare(status, "INVALID_FIELD");
    if (source == model_.sequences.end()) return Compare(status, "SEQUENCE_NOT_FOUND");
    if (generation != source->second.generation) return Compare(status, "STALE_GENERATION");
    std::vector<uint32_t> ids = source->second.ids;
    if (tokens > 0) ids.resize((tokens + spec().block_tokens - 1) / spec().block_tokens);
    if (const auto target = model_.sequences.find(to); target != model_.sequences.end()) {
      const bool same = target->second.generation == 1 && target->second.ids == ids;
      return Compare(status, same ? "" : "SEQUENCE_EXISTS");
    }
    model_.sequences[to] = {1, ids, 0, 0};
    Compare(status, "");
  }

  void TruncateOp() {
    const uint32_t id = Roll(spec().max_sequences);
    const auto it = model_.sequences.find(id);
    if (it == model_.sequences.end()) {
      return Compare(session_->TruncateSequence(id, 1, 0).status(), "SEQUENCE_NOT_FOUND");
    }
    ModelSequence& sequence = it->second;
    const uint64_t generation = sequence.generation + 1 - (OneIn(8) ? 1 + Roll(2) : 0);
    const int64_t tokens = OneIn(4) ? sequence.truncated_tokens
                                    : Roll(std::ssize(sequence.ids) * spec().block_tokens + 1);
    const absl::Status status = session_->TruncateSequence(id, generation, tokens).status();
    if (generation == sequence.generation && generation == sequence.truncated_generation &&
        tokens == sequence.truncated_tokens) {
      return Compare(status, "");  // the same request again
    }
    if (generation <= sequence.generation) return Compare(status, "STALE_GENERATION");
    if (tokens > std::ssize(sequence.ids) * spec().block_tokens) {
      return Compare(status, "INVALID_FIELD");
    }
    Compare(status, "");
    sequence.truncated_generation = generation;
    sequence.truncated_tokens = tokens;
    const std::vector<uint32_t> old = sequence.ids;
    const int64_t bt = spec().block_tokens;
    sequence.ids.resize((tokens + bt - 1) / bt);
    sequence.generation = generation;
    model_.FreeUnused(old);
    if (tokens % bt == 0 || model_.NumTables(sequence.ids.back()) != 1) return;
    for (uint32_t layer = 0; layer < spec().num_layers; ++layer) {
      std::vector<uint64_t>& content = model_.blocks.at({layer, sequence.ids.back()}).tokens;
      if (std::ssize(content) > tokens % bt) content.resize(tokens % bt);
    }
  }

  void ReleaseOp() {
    const std::vector<uint32_t> ids = {Roll(spec().max_sequences)};
    const bool drop = OneIn(2);
    const auto released = session_->ReleaseSequence(ids, drop);
    const auto it = model_.sequences.find(ids[0]);
    if (it == model_.sequences.end()) return Compare(released.status(), "SEQUENCE_NOT_FOUND");
    const std::vector<uint32_t> table = it->second.ids;
    model_.sequences.erase(it);
    model_.FreeUnused(table);
    int64_t dropped = 0;
    for (const uint32_t id : table) {
      for (uint32_t layer = 0; layer < spec().num_layers && drop && model_.NumTables(id) == 0;
           ++layer) {
        dropped += static_cast<int64_t>(model_.blocks.erase({layer, id}));
      }
    }
    Compare(released.status(), "");
    EXPECT_EQ(released.value_or(-1), dropped);
  }

  void DropOp() {
    const std::vector<uint32_t> ids = RandomIds(3);
    const std::vector<uint32_t> layers =
        OneIn(2) ? std::vector<uint32_t>() : std::vector<uint32_t>{Roll(spec().num_layers)};
    const bool allow_missing = OneIn(2);
    const auto dropped = session_->DropBlocks({layers, ids}, allow_missing);
    if (std::set<uint32_t>(ids.begin(), ids.end()).size() != ids.size()) {
      return Compare(dropped.status(), "INVALID_FIELD");
    }
    std::vector<Key> keys;
    for (uint32_t layer = 0; layer < spec().num_layers; ++layer) {
      if (!layers.empty() && layers[0] != layer) continue;
      for (const uint32_t id : ids) keys.push_back({layer, id});
    }
    for (const Key& key : keys) {
      if (model_.NumTables(key.second) > 0) return Compare(dropped.status(), "BLOCK_IN_TABLE");
      if (!allow_missing && model_.blocks.count(key) == 0)
        return Compare(dropped.status(), "BLOCK_NOT_FOUND");
    }
    int64_t count = 0;
    for (const Key& key : keys) count += static_cast<int64_t>(model_.blocks.erase(key));
    Compare(dropped.status(), "");
    EXPECT_EQ(dropped->dropped_blocks, count);
    EXPECT_EQ(dropped->freed_bytes, count * stride_bytes_);
  }

  void OffloadOp() {
    const int64_t bt = spec().block_tokens;
    std::vector<OffloadBlock> batch;
    std::vector<ModelBlock> content;
    const auto mode = static_cast<PredictMode>(Roll(3));
    Tokens wire;
    for (uint32_t i = 0; i < 1 + Roll(4); ++i) {
      const uint32_t valid = OneIn(2) ? 0 : 1 + Roll(bt);
      batch.push_back({Roll(spec().num_layers), Roll(spec().max_blocks), valid, kTags[Roll(5)]});
      std::vector<uint64_t> tokens(bt);
      for (uint64_t& token : tokens) token = random_();
      const Tokens block = Content(tokens);
      wire.k.insert(wire.k.end(), block.k.begin(), block.k.end());
      wire.v.insert(wire.v.end(), block.v.begin(), block.v.end());
      if (valid > 0) tokens.resize(valid);
      content.push_back({tokens, mode != PredictMode::kOff, std::string(batch.back().tag)});
    }
    OffloadResult result;
    const absl::Status status = OffloadBlocks(batch, wire, mode, &result);
    std::set<Key> keys;
    int64_t fresh = 0, replaced = 0;
    for (const OffloadBlock& block : batch) keys.insert({block.layer, block.block_id});
    if (keys.size() != batch.size()) return Compare(status, "DUPLICATE_BLOCK");
    for (const OffloadBlock& block : batch) {
      const auto it = model_.blocks.find({block.layer, block.block_id});
      const bool stored = it != model_.blocks.end() && it->second.stored();
      if (stored && model_.NumTables(block.block_id) > 1) return Compare(status, "BLOCK_SHARED");
      fresh += it == model_.blocks.end() || stored;
      replaced += stored;
    }
    if (!model_.Fits(fresh)) return Compare(status, "HOST_MEMORY");
    for (size_t i = 0; i < batch.size(); ++i)
      model_.blocks[{batch[i].layer, batch[i].block_id}] = content[i];
    Compare(status, "");
    EXPECT_EQ(result.replaced_blocks, replaced);
    EXPECT_EQ(result.predicted_blocks, mode == PredictMode::kOff ? 0 : std::ssize(batch));
  }

  void DecodeOp() {
    const uint32_t layer = Roll(spec().num_layers);
    const bool writes = OneIn(2);
    std::vector<uint32_t> ids[2];
    std::vector<uint64_t> written[2];
    Tokens tokens;
    sequences_.clear();
    int64_t rows = 0;
    const uint32_t first = Roll(spec().max_sequences);
    for (uint32_t i = 0; i < 1 + Roll(2); ++i) {
      DecodeSequence step =
          Seq((first + i) % static_cast<uint32_t>(spec().max_sequences), 1 + Roll(3), 0);
      if (OneIn(3)) {
        step.has_update = true;
        step.update = RandomUpdate(step.sequence_id, &ids[i]);
      }
      const auto it = model_.sequences.find(step.sequence_id);
      const int64_t length =
          it == model_.sequences.end() ? 1 : std::max<int64_t>(1, std::ssize(it->second.ids));
      // Often the next tokens behind those that are there.
      int64_t there = 0;
      for (size_t b = 0; it != model_.sequences.end() && b < it->second.ids.size(); ++b) {
        const int64_t valid = std::ssize(model_.blocks.at({layer, it->second.ids[b]}).tokens);
        there += valid;
        if (valid < spec().block_tokens) break;
      }
      step.context_tokens = OneIn(2) ? there + (writes ? step.query_tokens : 0)
                                     : 1 + Roll(length * spec().block_tokens);
      step.context_tokens = std::clamp<int64_t>(step.context_tokens, step.query_tokens,
                                                spec().max_blocks * spec().block_tokens);
      if (step.context_tokens < step.query_tokens) return;
      if (it != model_.sequences.end() && OneIn(8))
        step.generation = it->second.generation + Roll(2);
      for (uint32_t t = 0; t < step.query_tokens; ++t) written[i].push_back(random_());
      const Tokens content = Content(written[i]);
      tokens.k.insert(tokens.k.end(), content.k.begin(), content.k.end());
      tokens.v.insert(tokens.v.end(), content.v.begin(), content.v.end());
      rows += step.query_tokens;
      sequences_.push_back(step);
    }
    const Bits q = RandomQ(rows);
    const absl::Status status = Step(layer, q, writes ? &tokens : nullptr);
    std::string malformed;
    for (const DecodeSequence& step : sequences_) {
      const std::set<uint32_t> update(step.update.block_ids.begin(), step.update.block_ids.end());
      if (update.size() != step.update.block_ids.size()) malformed = "INVALID_FIELD";
    }
    if (malformed.empty() && writes) malformed = model_.WritersRule(sequences_);
    Compare(status, malformed);
    if (!malformed.empty()) return;
    int64_t row = 0;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      std::vector<uint64_t> context;
      const DecodeSequence& step = sequences_[i];
      const std::string reason = model_.StepRule(layer, step, writes, written[i], &context);
      Compare(call_.sequence_status[i], reason);
      for (int64_t t = 0; t < step.query_tokens; ++t, ++row) {
        if (!reason.empty()) continue;
        ExpectNear(
            call_.out, row,
            Reference(q, row, Content(context), step.context_tokens - step.query_tokens + 1 + t));
      }
    }
  }

  void ReadOp() {
    const uint32_t layer = Roll(spec().num_layers);
    const std::vector<uint32_t> ids = RandomIds(3);
    bool all_present = true, all_stored = true;
    for (const uint32_t id : ids) {
      const auto it = model_.blocks.find({layer, id});
      all_present &= it != model_.blocks.end();
      all_stored &= it != model_.blocks.end() && it->second.stored();
    }
    const auto wire = Fetch(layer, ids);
    const auto keys = ReadProjected(layer, ids);
    Compare(wire.status(), all_stored ? "" : "BLOCK_NOT_FOUND");
    Compare(keys.status(), all_present ? "" : "BLOCK_NOT_FOUND");
    Waitable<ScoreCall> score;
    const Bits q = RandomQ(1);
    score.layer = layer;
    score.block_ids = ids;
    score.q = View(q);
    score.kind = OneIn(2) ? ScoreKind::kMass : ScoreKind::kMaxDot;
    score.top_k = std::min<uint32_t>(1, static_cast<uint32_t>(spec().max_blocks));
    session_->Submit(&score);
    Compare(score.Wait(), all_present ? "" : "BLOCK_NOT_FOUND");
    if (!all_present) return;
    for (size_t i = 0; i < ids.size(); ++i) {
      const ModelBlock& block = model_.blocks.at({layer, ids[i]});
      EXPECT_EQ(score.predicted[i], block.predicted());
      EXPECT_EQ(keys->predicted[i], block.predicted());
      EXPECT_EQ(std::isfinite(score.scores[i]), block.predicted());
      std::vector<uint64_t> padded = block.tokens;
      Tokens content = Content(padded);
      const int64_t block_elements = spec().block_tokens * spec().num_kv_heads * spec().head_dim;
      content.k.resize(block_elements);
      content.v.resize(block_elements);
      if (block.predicted()) {
        ExpectProjected(*keys, static_cast<int64_t>(i), content.k.data(), std::ssize(block.tokens));
      }
      if (!all_stored) continue;
      const auto begin = static_cast<int64_t>(i) * block_elements;
      EXPECT_TRUE(std::equal(content.k.begin(), content.k.end(), wire->k.begin() + begin));
      EXPECT_TRUE(std::equal(content.v.begin(), content.v.end(), wire->v.begin() + begin));
    }
  }

  void CompareAll() {
    const auto page = session_->ListBlocks({}, Tier::kNone, {}, 1'000'000);
    ASSERT_TRUE(page.ok());
    ASSERT_EQ(page->blocks.size(), model_.blocks.size());
    auto it = model_.blocks.begin();
    int64_t stored = 0, predicted = 0, rows = 0;
    for (const BlockInfo& info : page->blocks) {
      ASSERT_EQ((Key{info.layer, info.block_id}), it->first);
      const ModelBlock& block = it->second;
      EXPECT_EQ(info.state, block.stored() ? BlockState::kStored : BlockState::kReserved);
      EXPECT_EQ(info.valid_tokens, block.tokens.size());
      EXPECT_EQ(info.predicted, block.predicted());
      EXPECT_EQ(info.tag, block.tag);
      EXPECT_EQ(info.num_tables, model_.NumTables(info.block_id));
      stored += block.stored();
      predicted += block.predicted();
      rows += block.has_row;
      ++it;
    }
    for (const std::string tag : {"a", "b", "a longer tag of thirty-two bytes"}) {
      std::vector<Key> found, expected;
      const auto tagged = session_->FindBlocks(std::vector<std::string>{tag}, {});
      ASSERT_TRUE(tagged.ok());
      for (const BlockInfo& info : *tagged) found.push_back({info.layer, info.block_id});
      for (const auto& [key, block] : model_.blocks) {
        if (block.tag == tag) expected.push_back(key);
      }
      EXPECT_EQ(found, expected);
    }
    std::map<uint32_t, std::vector<uint32_t>> tables, model_tables;
    for (const SequenceInfo& info : session_->ListSequences(0, 1000))
      tables[info.sequence_id] = info.block_ids;
    for (const auto& [id, sequence] : model_.sequences) model_tables[id] = sequence.ids;
    EXPECT_EQ(tables, model_tables);
    const SessionInfo info = session_->Info();
    EXPECT_EQ(info.num_blocks, stored);
    EXPECT_EQ(info.num_predicted_blocks, predicted);
    // HBM is used first, so what is in host memory is what HBM had no room for at the time.
    int64_t block_bytes = 0;
    for (const MemoryItem& item : info.memory) {
      if (item.name == "blocks.hbm" || item.name == "blocks.host") block_bytes += item.used_bytes;
      EXPECT_LE(item.used_bytes, item.reserved_bytes) << item.name;
    }
    EXPECT_EQ(block_bytes, std::ssize(model_.blocks) * stride_bytes_);
    const int64_t row_bytes = spec().num_kv_heads * spec().block_tokens * spec().rank * 2;
    EXPECT_EQ(Item("a_g").used_bytes, rows * row_bytes);
    EXPECT_EQ(BlockBytes(), std::ssize(model_.blocks) * stride_bytes_);
  }
  // In both tiers.
  int64_t BlockBytes() const {
    int64_t bytes = 0;
    for (const MemoryPoolUsage& pool : manager_->MemoryUsage()) {
      if (pool.name != "hbm") bytes += pool.used_bytes;
    }
    return bytes;
  }

  void ReattachOp() {
    const SessionSpec same = spec();
    const bool keep = OneIn(2);
    const uint64_t old = epoch_;
    if (keep) {
      ASSERT_TRUE(CloseSession(same.name, epoch_, true).ok());
    }
    Open(same);
    EXPECT_NE(epoch_, old);
    EXPECT_EQ(ReasonOf(manager_->Find(same.name, old).status()), "FENCED");
  }

  void Compare(const absl::Status& status, const std::string& reason) {
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_EQ(status.ok(), reason.empty()) << status;
  }

  SessionModel model_;
  int64_t stride_bytes_ = 0;
};

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

TEST_F(Model, RandomOperationsShowNoDifference) {
  const int64_t operations = FromEnvironment("SLUICE_MODEL_OPERATIONS", 20'000);
  const int64_t seed = FromEnvironment("SLUICE_MODEL_SEED", 1);
  std::printf("SLUICE_MODEL_SEED=%ld SLUICE_MODEL_OPERATIONS=%ld\n", seed, operations);
  random_.seed(static_cast<uint32_t>(seed));
  for (const Geometry& geometry : kGeometries) {
    SessionSpec spec = SmallSpec();
    spec.num_layers = geometry.num_layers;
    spec.num_query_heads = geometry.num_query_heads;
    spec.num_kv_heads = geometry.num_kv_heads;
    spec.head_dim = geometry.head_dim;
    spec.block_tokens = geometry.block_tokens;
    spec.rank = geometry.rank;
    spec.max_blocks = geometry.max_blocks;
    spec.max_sequences = 5;
    spec.retention = absl::Hours(1);
    const int64_t slot_bytes =
        SlotBytes(spec.kv_dtype, spec.num_kv_heads, spec.head_dim, spec.block_tokens);
    stride_bytes_ = (slot_bytes + 4095) / 4096 * 4096;
    model_.room = geometry.num_layers * geometry.max_blocks * 2 / 3;
    // The bound is the session's or the daemon's.
    const bool own = OneIn(2);
    // Some of the room is in HBM.
    const int64_t hbm_bytes = OneIn(2) ? (1 + Roll(model_.room - 1)) * stride_bytes_ : 0;
    const int64_t host_bytes = model_.room * stride_bytes_ - hbm_bytes;
    MakeManager({.hbm_block_budget_bytes = own && hbm_bytes > 0 ? int64_t{1} << 29 : hbm_bytes,
                 .host_budget_bytes = own ? int64_t{1} << 30 : host_bytes});
    spec.host_budget_bytes = own ? host_bytes : 0;
    spec.hbm_budget_bytes = own ? hbm_bytes : 0;
    model_.blocks.clear();
    model_.sequences.clear();
    Open(spec);
    model_.spec = session_->spec();
    for (int64_t i = 0; i < operations * geometry.weight / 100; ++i) {
      const uint32_t kind = Roll(100);
      if (kind < 22) {
        OffloadOp();
      } else if (kind < 35) {
        PutOp();
      } else if (kind < 39) {
        ForkOp();
      } else if (kind < 46) {
        TruncateOp();
      } else if (kind < 51) {
        ReleaseOp();
      } else if (kind < 57) {
        DropOp();
      } else if (kind < 83) {
        DecodeOp();
      } else if (kind < 99) {
        ReadOp();
      } else {
        ReattachOp();
      }
      // So that slots of retired blocks are back at a known point.
      WaitUntilQuiet();
      if (i % 64 == 0) CompareAll();
      ASSERT_FALSE(HasFailure()) << "operation " << i << " of kind " << kind << " with slots of "
                                 << slot_bytes << " bytes, SLUICE_MODEL_SEED=" << seed;
    }
    CompareAll();
    for (const auto& [id, sequence] : std::map<uint32_t, ModelSequence>(model_.sequences)) {
      ASSERT_TRUE(session_->ReleaseSequence(std::vector<uint32_t>{id}, true).ok());
    }
    ASSERT_TRUE(
        session_->DropBlocks({{}, Ids(0, static_cast<uint32_t>(spec.max_blocks))}, true).ok());
    WaitUntilQuiet();
    model_.blocks.clear();
    model_.sequences.clear();
    CompareAll();
    ASSERT_TRUE(CloseSession(spec.name, epoch_, false).ok());
    EXPECT_EQ(BlockBytes(), 0);
    EXPECT_EQ(DeviceBytes(), 0);
  }
}

}  // namespace
}  // namespace sluice
