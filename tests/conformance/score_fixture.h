// Builds the inputs of ProjectKeys and ScoreBlocks in memory that the device can address, runs
// them, and has float64 references.

#ifndef TESTS_CONFORMANCE_SCORE_FIXTURE_H_
#define TESTS_CONFORMANCE_SCORE_FIXTURE_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "kernels/ops/float16.h"
#include "kernels/ops/ops.h"
#include "kernels/ops/projection.h"
#include "tests/conformance/device_factory.h"
#include "tests/conformance/reference.h"

namespace sluice {

struct ScoreShape {
  DType dtype = DType::kBf16;
  int head_dim = 64;
  int num_kv_heads = 2;
  int group = 2;
  int block_tokens = 16;
  int rank = 32;
  int64_t num_blocks = 20;
  bool projection_per_head = false;
  bool paged = false;
  uint64_t seed = 1;
};

// Keys of some blocks, projected by the device; queries; and room for scores.
class ScoreProblem {
 public:
  ScoreProblem(Device& device, Stream& stream, const ScoreShape& shape_in)
      : shape(shape_in), device_(device), stream_(stream) {
    std::mt19937_64 random(shape.seed);
    std::normal_distribution<float> normal;
    const int64_t slot =
        SlotBytes(shape.dtype, shape.num_kv_heads, shape.head_dim, shape.block_tokens);
    layout = shape.paged
                 ? PagedLayout(shape.dtype, shape.num_kv_heads, shape.head_dim, shape.block_tokens,
                               shape.num_blocks * slot / 2)
                 : SlotLayout(shape.dtype, shape.num_kv_heads, shape.head_dim, shape.block_tokens);
    block_stride = shape.paged ? slot / 2 : slot;
    keys = SharedArray<uint16_t>(device, shape.num_blocks * slot / 2);
    for (int64_t i = 0; i < keys.count(); ++i) keys[i] = FromFloat(shape.dtype, normal(random));
    const int projections = shape.projection_per_head ? shape.num_kv_heads : 1;
    p = SharedArray<uint16_t>(device, int64_t{projections} * shape.head_dim * shape.rank);
    for (int i = 0; i < projections; ++i) {
      FillGaussianProjection(shape.seed + i, shape.head_dim, shape.rank,
                             p.data() + int64_t{i} * shape.head_dim * shape.rank);
    }
    projected = SharedArray<uint16_t>(device, shape.num_blocks * ProjectedPerBlock());
    q = SharedArray<uint16_t>(device, int64_t{num_query_heads()} * shape.head_dim);
    for (int64_t i = 0; i < q.count(); ++i) q[i] = FromFloat(shape.dtype, normal(random));
    blocks = SharedArray<ScoreBlock>(device, shape.num_blocks);
    for (int64_t b = 0; b < shape.num_blocks; ++b) {
      const int valid =
          b % 3 == 0 ? 1 + static_cast<int>(b % shape.block_tokens) : shape.block_tokens;
      blocks[b] = {reinterpret_cast<std::byte*>(projected.data() + b * ProjectedPerBlock()), valid};
    }
  }

  int num_query_heads() const { return shape.num_kv_heads * shape.group; }
  int64_t ProjectedPerBlock() const {
    return int64_t{shape.num_kv_heads} * shape.block_tokens * shape.rank;
  }
  int64_t ProjectionStride() const {
    return shape.projection_per_head ? 2 * int64_t{shape.head_dim} * shape.rank : 0;
  }
  double P(int kv_head, int d, int r) const {
    return FloatFromBf16(p[ProjectionStride() / 2 * kv_head + int64_t{d} * shape.rank + r]);
  }
  double Key(int64_t block, int kv_head, int token, int d) const {
    const std::byte* at = keys.bytes() + block * block_stride + token * layout.token_stride_bytes +
                          kv_head * layout.kv_head_stride_bytes;
    uint16_t bits;
    std::memcpy(&bits, at + 2 * d, 2);
    return ToDouble(shape.dtype, bits);
  }
  uint16_t& Projected(int64_t block, int kv_head, int token, int r) const {
    return projected[block * ProjectedPerBlock() +
                     (int64_t{kv_head} * shape.block_tokens + token) * shape.rank + r];
  }

  void Project(int first_token, int num_tokens) {
    SharedArray<ProjectBlock> work(device_, shape.num_blocks);
    for (int64_t b = 0; b < shape.num_blocks; ++b) {
      work[b] = {keys.bytes() + b * block_stride,
                 reinterpret_cast<std::byte*>(&Projected(b, 0, 0, 0)), first_token, num_tokens};
    }
    ProjectKeysParams params;
    params.layout = layout;
    params.rank = shape.rank;
    params.projection = p.bytes();
    params.projection_kv_head_stride_bytes = ProjectionStride();
    params.blocks = work.data();
    params.num_blocks = work.count();
    device_.ops().ProjectKeys(params, stream_);
    stream_.Synchronize();
  }

  void Score(ScoreKind kind, float scale, int64_t top_k) {
    scores = SharedArray<float>(device_, shape.num_blocks);
    top = SharedArray<int64_t>(device_, top_k);
    ScoreParams params;
    params.kind = kind;
    params.q_dtype = shape.dtype;
    params.num_query_heads = num_query_heads();
    params.num_kv_heads = shape.num_kv_heads;
    params.head_dim = shape.head_dim;
    params.block_tokens = shape.block_tokens;
    params.rank = shape.rank;
    params.scale = scale;
    params.projection = p.bytes();
    params.projection_kv_head_stride_bytes = ProjectionStride();
    params.q = q.bytes();
    params.blocks = blocks.data();
    params.num_blocks = blocks.count();
    params.scores = scores.data();
    params.top = top.data();
    params.top_k = top_k;
    SharedArray<std::byte> workspace(device_, device_.ops().ScoreWorkspaceBytes(params));
    params.workspace = workspace.data();
    device_.ops().ScoreBlocks(params, stream_);
    stream_.Synchronize();
  }

  // q'.k' of every query head and token, from A_g as the device stored it.
  std::vector<double> ReferenceDots(int64_t block, int query_head) const {
    const int kv_head = query_head / shape.group;
    const std::vector<double>& q_projected = ReferenceQuery(query_head);
    std::vector<double> dots(blocks[block].valid_tokens, 0);
    for (int r = 0; r < shape.rank; ++r) {
      for (size_t t = 0; t < dots.size(); ++t) {
        dots[t] +=
            q_projected[r] * FloatFromBf16(Projected(block, kv_head, static_cast<int>(t), r));
      }
    }
    return dots;
  }
  const std::vector<double>& ReferenceQuery(int query_head) const {
    std::vector<double>& projected_q = reference_queries_[query_head];
    if (!projected_q.empty()) return projected_q;
    for (int r = 0; r < shape.rank; ++r) {
      double sum = 0;
      for (int d = 0; d < shape.head_dim; ++d) {
        sum += ToDouble(shape.dtype, q[int64_t{query_head} * shape.head_dim + d]) *
               P(query_head / shape.group, d, r);
      }
      projected_q.push_back(sum);
    }
    return projected_q;
  }

  ScoreShape shape;
  KvLayout layout;
  int64_t block_stride = 0;
  SharedArray<uint16_t> keys, p, projected, q;
  SharedArray<ScoreBlock> blocks;
  SharedArray<float> scores;
  SharedArray<int64_t> top;

 private:
  Device& device_;
  Stream& stream_;
  mutable std::map<int, std::vector<double>> reference_queries_;
};

}  // namespace sluice

#endif  // TESTS_CONFORMANCE_SCORE_FIXTURE_H_
