// The operations seam: what a device computes. One implementation per device (kernels/cpu,
// kernels/cuda), one conformance suite for all (tests/conformance).
//
// Every method copies its params, enqueues the work on `stream` and returns its position without
// blocking; arrays that the params point to must live until the stream has completed that position.
// The caller has checked shapes, ids and addresses: a wrong one here is a broken invariant (CHECK).
// No method allocates once a stream has been used for as much work in flight as before.
// Formulas: docs/numerics.md; the running state is that of online softmax (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax").

#ifndef KERNELS_OPS_OPS_H_
#define KERNELS_OPS_OPS_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/ops/params.h"

namespace sluice {

class Ops {
 public:
  virtual ~Ops() = default;

  // Wire layout [token, kv_head, head_dim] into blocks, bit-exact. Two copies of one call must not
  // touch one token of a block.
  virtual StreamPosition StoreTokens(const TokenCopyParams& params, Stream& stream) = 0;
  // Blocks into wire layout, bit-exact.
  virtual StreamPosition GatherTokens(const TokenCopyParams& params, Stream& stream) = 0;

  // Bytes between host and device memory, either way.
  virtual StreamPosition CopyBytes(const ByteCopyParams& params, Stream& stream) = 0;

  // A_g = K P, rounded to BF16 (nearest even), within 1 BF16 ulp of the float64 product. The CPU
  // device sums in FP64: where terms cancel, FP32 sums are not that near.
  virtual StreamPosition ProjectKeys(const ProjectKeysParams& params, Stream& stream) = 0;

  virtual int64_t ScoreWorkspaceBytes(const ScoreParams& params) const = 0;
  // q' = q P to FP32, then a score per block, then the top k.
  virtual StreamPosition ScoreBlocks(const ScoreParams& params, Stream& stream) = 0;

  // Workspace depends on sequences' context_tokens and query_tokens, num_query_heads and head_dim
  // only.
  virtual int64_t AttendWorkspaceBytes(const AttendParams& params) const = 0;
  virtual StreamPosition Attend(const AttendParams& params, Stream& stream) = 0;

  virtual StreamPosition BeginStates(const BeginParams& params, Stream& stream) = 0;
  virtual StreamPosition MergeStates(const MergeParams& params, Stream& stream) = 0;
  virtual StreamPosition FinalizeStates(const FinalizeParams& params, Stream& stream) = 0;
};

}  // namespace sluice

#endif  // KERNELS_OPS_OPS_H_
