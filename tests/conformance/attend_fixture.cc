#include "tests/conformance/attend_fixture.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace sluice {
namespace {

// Bit patterns that must never reach a result, in both formats: NaN, infinity, a large number.
uint16_t Poison(DType dtype, uint64_t i) {
  static constexpr uint16_t kBits[2][5] = {{0x7fc0, 0x7f80, 0xff80, 0xffff, 0x7f7f},
                                           {0x7e00, 0x7c00, 0xfc00, 0xffff, 0x7bff}};
  return kBits[dtype == DType::kBf16 ? 0 : 1][i % 5];
}

}  // namespace

std::string AttendShape::ToString() const {
  std::ostringstream text;
  text << (dtype == DType::kBf16 ? "bf16" : "fp16") << " head_dim " << head_dim << " kv heads "
       << num_kv_heads << " group " << group << " block " << block_tokens
       << (paged ? " paged" : " slots") << (causal ? "" : " not causal") << " window "
       << options.window_tokens << " sinks " << options.sink_tokens << " softcap "
       << options.logit_softcap << " seed " << seed << " sequences";
  for (const SequenceShape& s : sequences) text << " " << s.context_tokens << "/" << s.query_tokens;
  return text.str();
}

AttendProblem::AttendProblem(Device& device_in, const AttendShape& shape_in)
    : shape(shape_in), device(device_in) {
  std::mt19937_64 random(shape.seed);
  std::normal_distribution<float> normal;
  if (shape.options.scale == 0) {
    shape.options.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }
  const int num_sequences = static_cast<int>(shape.sequences.size());
  const int64_t bt = shape.block_tokens;
  std::vector<int64_t> first_block(num_sequences + 1, 0);
  sequences = SharedArray<AttendSequence>(device, num_sequences);
  for (int i = 0; i < num_sequences; ++i) {
    const SequenceShape& s = shape.sequences[i];
    first_block[i + 1] = first_block[i] + (s.context_tokens + bt - 1) / bt;
    sequences[i] = AttendSequence();
    sequences[i].context_tokens = s.context_tokens;
    sequences[i].query_tokens = s.query_tokens;
    sequences[i].first_row = num_rows_;
    sequences[i].causal = shape.causal;
    num_rows_ += s.query_tokens;
  }
  const int64_t num_blocks = std::max<int64_t>(first_block.back(), 1);
  const int64_t slot = SlotBytes(shape.dtype, shape.num_kv_heads, shape.head_dim, bt);
  layout = shape.paged ? PagedLayout(shape.dtype, shape.num_kv_heads, shape.head_dim, bt,
                                     num_blocks * slot / 2)
                       : SlotLayout(shape.dtype, shape.num_kv_heads, shape.head_dim, bt);
  pool = SharedArray<std::byte>(device, num_blocks * slot);
  std::vector<int64_t> order(num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  const int64_t block_stride = shape.paged ? slot / 2 : slot;
  for (int i = 0; i < num_sequences; ++i) {
    const int64_t count = first_block[i + 1] - first_block[i];
    tables.emplace_back(device, count);
    for (int64_t j = 0; j < count; ++j) {
      tables[i][j] = pool.bytes() + order[first_block[i] + j] * block_stride;
    }
    sequences[i].blocks = tables[i].data();
    const int64_t context = shape.sequences[i].context_tokens;
    k.emplace_back(context * shape.num_kv_heads * shape.head_dim);
    v.emplace_back(context * shape.num_kv_heads * shape.head_dim);
    for (int64_t t = 0; t < count * bt; ++t) PlaceToken(i, t, t >= context, random);
  }
  const int64_t num_q = num_rows_ * num_query_heads() * shape.head_dim;
  q = SharedArray<uint16_t>(device, num_q);
  for (int64_t i = 0; i < num_q; ++i) {
    q[i] = FromFloat(shape.dtype, shape.q_factor * normal(random));
    q_values.push_back(ToDouble(shape.dtype, q[i]));
  }
  if (shape.options.sink_logits != nullptr) {
    const float* from = shape.options.sink_logits;
    sink_logits = SharedArray<float>(device, std::vector<float>(from, from + num_query_heads()));
    shape.options.sink_logits = sink_logits.data();
  }
}

void AttendProblem::PlaceToken(int sequence, int64_t token, bool poison, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  auto* block = const_cast<std::byte*>(tables[sequence][token / shape.block_tokens]);
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    for (int kv = 0; kv < 2; ++kv) {
      std::byte* row = block + token % shape.block_tokens * layout.token_stride_bytes +
                       head * layout.kv_head_stride_bytes + kv * layout.v_offset_bytes;
      for (int d = 0; d < shape.head_dim; ++d) {
        const uint16_t bits =
            poison ? Poison(shape.dtype, token + d) : FromFloat(shape.dtype, normal(random));
        std::memcpy(row + 2 * d, &bits, 2);
        if (!poison) {
          (kv == 0 ? k : v)[sequence][(token * shape.num_kv_heads + head) * shape.head_dim + d] =
              ToDouble(shape.dtype, bits);
        }
      }
    }
  }
}

AttendParams AttendProblem::Params() {
  AttendParams params;
  params.layout = layout;
  params.options = shape.options;
  params.num_query_heads = num_query_heads();
  params.sequences = sequences.data();
  params.num_sequences = sequences.count();
  params.num_rows = num_rows_;
  params.q = q.bytes();
  const int64_t bytes = device.ops().AttendWorkspaceBytes(params);
  workspace = SharedArray<std::byte>(device, bytes);
  params.workspace = workspace.data();
  return params;
}

void AttendProblem::Run(Stream& stream) {
  AttendParams params = Params();
  out = SharedArray<float>(device, num_rows_ * num_query_heads() * shape.head_dim);
  lse = SharedArray<float>(device, num_rows_ * num_query_heads());
  params.out = out.bytes();
  params.out_dtype = DType::kF32;
  params.lse = lse.data();
  device.ops().Attend(params, stream);
  stream.Synchronize();
}

std::vector<uint16_t> AttendProblem::RunNarrow(Stream& stream) {
  AttendParams params = Params();
  SharedArray<uint16_t> narrow(device, num_rows_ * num_query_heads() * shape.head_dim);
  params.out = narrow.bytes();
  params.out_dtype = shape.dtype;
  device.ops().Attend(params, stream);
  stream.Synchronize();
  return narrow.ToVector();
}

double AttendProblem::OutputAt(int64_t row, int query_head, int d) const {
  return out[(row * num_query_heads() + query_head) * shape.head_dim + d];
}

ReferenceRow AttendProblem::Reference(int sequence, int query_token, int query_head) const {
  const SequenceShape& s = shape.sequences[sequence];
  const int kv_head = query_head / shape.group;
  const int64_t row = sequences[sequence].first_row + query_token;
  ReferenceQuery query;
  query.q = q_values.data() + (row * num_query_heads() + query_head) * shape.head_dim;
  query.k = k[sequence].data() + kv_head * shape.head_dim;
  query.v = v[sequence].data() + kv_head * shape.head_dim;
  query.token_stride = shape.num_kv_heads * shape.head_dim;
  query.head_dim = shape.head_dim;
  query.position = s.context_tokens - 1;
  if (shape.causal) query.position -= s.query_tokens - 1 - query_token;
  query.options = shape.options;
  if (shape.options.sink_logits != nullptr)
    query.sink_logit = shape.options.sink_logits + query_head;
  return ReferenceAttend(query);
}

void AttendProblem::ExpectNearReference(double f32_tolerance, int row_step) {
  int64_t index = 0;
  for (size_t i = 0; i < shape.sequences.size(); ++i) {
    for (int t = 0; t < shape.sequences[i].query_tokens; ++t) {
      for (int h = 0; h < num_query_heads(); ++h, ++index) {
        if (index % row_step != 0) continue;
        const ReferenceRow expected = Reference(static_cast<int>(i), t, h);
        const int64_t row = sequences[i].first_row + t;
        for (int d = 0; d < shape.head_dim; ++d) {
          const double tolerance = std::min(OutTolerance(expected.out[d]), f32_tolerance);
          ASSERT_NEAR(OutputAt(row, h, d), expected.out[d], tolerance)
              << shape.ToString() << ": sequence " << i << " query token " << t << " head " << h
              << " element " << d;
        }
        const double actual = lse[row * num_query_heads() + h];
        if (std::isinf(expected.lse)) {
          ASSERT_EQ(actual, expected.lse) << shape.ToString();
        } else {
          ASSERT_NEAR(actual, expected.lse, 1e-4 + 1e-6 * std::abs(expected.lse))
              << shape.ToString() << ": sequence " << i << " query token " << t << " head " << h;
        }
      }
    }
  }
}

}  // namespace sluice
