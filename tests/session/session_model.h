// What a session should do, in plain containers: tables, blocks, and what each operation does to
// them or why not.
//
// Rules give the reason of the error, or "" where the operation happens (and then it has happened
// in the model).

#ifndef TESTS_SESSION_SESSION_MODEL_H_
#define TESTS_SESSION_SESSION_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/session/types.h"

namespace sluice {

struct ModelBlock {
  std::vector<uint64_t> tokens;  // what each valid token holds; none: only reserved
  bool has_row = false;          // of A_g
  std::string tag;
  bool stored() const { return !tokens.empty(); }
  bool predicted() const { return stored() && has_row; }
};
struct ModelSequence {
  uint64_t generation = 0;
  std::vector<uint32_t> ids;
  uint64_t truncated_generation = 0;
  int64_t truncated_tokens = 0;
};
using Key = std::pair<uint32_t, uint32_t>;  // layer, block

struct SessionModel {
  uint32_t NumTables(uint32_t id) const {
    uint32_t count = 0;
    for (const auto& [s, sequence] : sequences) {
      count += std::count(sequence.ids.begin(), sequence.ids.end(), id);
    }
    return count;
  }
  void FreeUnused(const std::vector<uint32_t>& ids) {
    for (const uint32_t id : ids) {
      for (uint32_t layer = 0; layer < spec.num_layers && NumTables(id) == 0; ++layer) {
        const auto it = blocks.find({layer, id});
        if (it != blocks.end() && !it->second.stored()) blocks.erase(it);
      }
    }
  }
  bool Fits(int64_t more) const { return std::ssize(blocks) + more <= room; }

  std::string PutRule(const SequenceUpdate& update) {
    const std::vector<uint32_t> ids(update.block_ids.begin(), update.block_ids.end());
    if (std::set<uint32_t>(ids.begin(), ids.end()).size() != ids.size()) return "INVALID_FIELD";
    const auto it = sequences.find(update.sequence_id);
    const ModelSequence old = it == sequences.end() ? ModelSequence() : it->second;
    if (update.generation < old.generation) return "STALE_GENERATION";
    if (update.base_blocks > old.ids.size()) return "BASE_BEYOND_TABLE";
    std::vector<uint32_t> table(old.ids.begin(), old.ids.begin() + update.base_blocks);
    table.insert(table.end(), ids.begin(), ids.end());
    if (std::set<uint32_t>(table.begin(), table.end()).size() != table.size())
      return "INVALID_FIELD";
    int64_t absent = 0;
    for (const uint32_t id : table) {
      for (uint32_t layer = 0; layer < spec.num_layers; ++layer)
        absent += blocks.count({layer, id}) == 0;
    }
    if (!Fits(absent)) return "HOST_MEMORY";
    for (const uint32_t id : table) {
      for (uint32_t layer = 0; layer < spec.num_layers; ++layer) {
        if (blocks.count({layer, id}) == 0) blocks[{layer, id}] = {{}, true, ""};
      }
    }
    sequences[update.sequence_id].generation = update.generation;
    sequences[update.sequence_id].ids = table;
    FreeUnused(old.ids);
    return "";
  }

  std::string StepRule(uint32_t layer, const DecodeSequence& step, bool writes,
                       const std::vector<uint64_t>& written, std::vector<uint64_t>* context) {
    if (step.has_update) {
      if (const std::string reason = PutRule(step.update); !reason.empty()) return reason;
    }
    const auto it = sequences.find(step.sequence_id);
    if (it == sequences.end()) return "SEQUENCE_NOT_FOUND";
    if (step.generation != 0 && step.generation != it->second.generation) return "STALE_GENERATION";
    const int64_t bt = spec.block_tokens;
    const std::vector<uint32_t>& ids = it->second.ids;
    if (step.context_tokens > std::ssize(ids) * bt) return "TOKENS_MISSING";
    const int64_t first = step.context_tokens - step.query_tokens;
    const int64_t need = writes ? first : step.context_tokens;
    for (int64_t p = 0; p < need; ++p) {
      const ModelBlock& block = blocks.at({layer, ids[p / bt]});
      if (p % bt >= std::ssize(block.tokens)) return "TOKENS_MISSING";
    }
    if (writes) {
      for (int64_t p = first; p < step.context_tokens; ++p) {
        if (NumTables(ids[p / bt]) > 1) return "BLOCK_SHARED";
      }
      for (int64_t p = first; p < step.context_tokens; ++p) {
        std::vector<uint64_t>& tokens = blocks.at({layer, ids[p / bt]}).tokens;
        if (std::ssize(tokens) <= p % bt) tokens.resize(p % bt + 1);
        tokens[p % bt] = written[p - first];
      }
    }
    for (int64_t p = 0; p < step.context_tokens; ++p) {
      context->push_back(blocks.at({layer, ids[p / bt]}).tokens[p % bt]);
    }
    return "";
  }

  // Whole requests that are malformed: two sequences that write one block.
  std::string WritersRule(const std::vector<DecodeSequence>& steps) const {
    std::set<uint32_t> written;
    for (const DecodeSequence& step : steps) {
      const std::set<uint32_t> update(step.update.block_ids.begin(), step.update.block_ids.end());
      if (step.has_update && update.size() != step.update.block_ids.size()) return "INVALID_FIELD";
    }
    for (const DecodeSequence& step : steps) {
      std::vector<uint32_t> table;
      if (const auto it = sequences.find(step.sequence_id); it != sequences.end())
        table = it->second.ids;
      const int64_t bt = spec.block_tokens;
      for (int64_t i = (step.context_tokens - step.query_tokens) / bt;
           i <= (step.context_tokens - 1) / bt; ++i) {
        uint32_t id;
        if (step.has_update && i >= step.update.base_blocks) {
          if (i - step.update.base_blocks >= std::ssize(step.update.block_ids)) break;
          id = step.update.block_ids[i - step.update.base_blocks];
        } else {
          if (i >= std::ssize(table)) break;
          id = table[i];
        }
        if (!written.insert(id).second) return "DUPLICATE_BLOCK";
      }
    }
    return "";
  }

  SessionSpec spec;
  std::map<Key, ModelBlock> blocks;
  std::map<uint32_t, ModelSequence> sequences;
  int64_t room = 0;  // slots
};

}  // namespace sluice

#endif  // TESTS_SESSION_SESSION_MODEL_H_
