// A client's side of a session in a test: its geometry, what it stored, requests made of it, and
// float64 attention.

#ifndef TESTS_RPC_MODEL_H_
#define TESTS_RPC_MODEL_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sluice/v1/attention.pb.h"
#include "sluice/v1/session.pb.h"
#include "sluice/v1/swap.pb.h"

namespace sluice {

double FromBf16(uint16_t bits);
uint16_t ToBf16(double value);
// Elements of a tensor, BF16 or F32, as numbers.
std::vector<double> Numbers(const v1::Tensor& tensor);

struct Model {
  Model(v1::SessionSpec spec, v1::SessionHandle handle, unsigned seed = 1)
      : spec(std::move(spec)), handle(std::move(handle)), random(seed) {}

  // BF16 numbers around 0.
  v1::Tensor RandomTensor(std::vector<int64_t> shape);

  // An offload of these blocks of one layer with random K and V, all tokens valid; kept in
  // `blocks`.
  v1::OffloadBlocksRequest Offload(uint32_t layer, const std::vector<uint32_t>& block_ids);
  // A step of one query token for each of these (sequence, context); k and v are random too where
  // `write` is set, and are not kept in `blocks`: Keep does that.
  v1::DecodeStepRequest Step(uint32_t layer,
                             const std::vector<std::pair<uint32_t, int64_t>>& contexts,
                             bool write = false);
  // K and V of a step's row go into the place of a table.
  void Keep(const v1::DecodeStepRequest& step, int64_t row, uint32_t layer, uint32_t block_id,
            int64_t token);

  // Attention of a row of q over the first context_tokens of a table, [num_query_heads, head_dim];
  // lse per head.
  std::vector<double> Attend(const v1::Tensor& q, int64_t row, uint32_t layer,
                             const std::vector<uint32_t>& table, int64_t context_tokens,
                             const v1::AttentionOptions& options, std::vector<double>* lse) const;

  int64_t row_elements() const { return int64_t{spec.num_kv_heads()} * spec.head_dim(); }
  int64_t block_elements() const { return row_elements() * spec.block_tokens(); }

  v1::SessionSpec spec;
  v1::SessionHandle handle;
  std::mt19937 random;
  struct Block {
    std::vector<uint16_t> k, v;  // [block_tokens, num_kv_heads, head_dim]
  };
  std::map<std::pair<uint32_t, uint32_t>, Block> blocks;
};

// Within 2 BF16 ulp or 1e-3, whichever is larger.
void ExpectClose(const std::vector<double>& got, const std::vector<double>& want);

}  // namespace sluice

#endif  // TESTS_RPC_MODEL_H_
