#include "tests/rpc/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"

namespace sluice {

double FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t ToBf16(double value) {
  const auto narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<double> Numbers(const v1::Tensor& tensor) {
  std::vector<double> numbers;
  const std::string& data = tensor.data();
  const size_t element = tensor.dtype() == v1::DTYPE_F32 ? 4 : 2;
  for (size_t at = 0; at + element <= data.size(); at += element) {
    if (element == 4) {
      float value;
      std::memcpy(&value, data.data() + at, 4);
      numbers.push_back(value);
    } else {
      uint16_t bits;
      std::memcpy(&bits, data.data() + at, 2);
      numbers.push_back(FromBf16(bits));
    }
  }
  return numbers;
}

v1::Tensor Model::RandomTensor(std::vector<int64_t> shape) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  int64_t elements = 1;
  for (const int64_t extent : shape) {
    tensor.add_shape(extent);
    elements *= extent;
  }
  std::string data(static_cast<size_t>(elements) * 2, '\0');
  for (int64_t i = 0; i < elements; ++i) {
    const uint16_t bits = ToBf16(static_cast<double>(random()) / (1 << 30) - 2);
    std::memcpy(data.data() + 2 * i, &bits, 2);
  }
  tensor.set_data(std::move(data));
  return tensor;
}

v1::OffloadBlocksRequest Model::Offload(uint32_t layer, const std::vector<uint32_t>& block_ids) {
  v1::OffloadBlocksRequest request;
  *request.mutable_session() = handle;
  for (const uint32_t block_id : block_ids) {
    request.add_blocks()->set_layer(layer);
    request.mutable_blocks(request.blocks_size() - 1)->set_block_id(block_id);
  }
  const std::vector<int64_t> shape = {static_cast<int64_t>(block_ids.size()), spec.block_tokens(),
                                      spec.num_kv_heads(), spec.head_dim()};
  *request.mutable_k() = RandomTensor(shape);
  *request.mutable_v() = RandomTensor(shape);
  for (size_t i = 0; i < block_ids.size(); ++i) {
    Block& block = blocks[{layer, block_ids[i]}];
    const auto take = [&](const std::string& data, std::vector<uint16_t>* out) {
      out->resize(static_cast<size_t>(block_elements()));
      std::memcpy(out->data(), data.data() + i * out->size() * 2, out->size() * 2);
    };
    take(request.k().data(), &block.k);
    take(request.v().data(), &block.v);
  }
  return request;
}

v1::DecodeStepRequest Model::Step(uint32_t layer,
                                  const std::vector<std::pair<uint32_t, int64_t>>& contexts,
                                  bool write) {
  v1::DecodeStepRequest request;
  *request.mutable_session() = handle;
  request.set_layer(layer);
  for (const auto& [sequence_id, context_tokens] : contexts) {
    v1::DecodeSequence* const sequence = request.add_sequences();
    sequence->set_sequence_id(sequence_id);
    sequence->set_context_tokens(context_tokens);
  }
  const auto rows = static_cast<int64_t>(contexts.size());
  *request.mutable_q() = RandomTensor({rows, spec.num_query_heads(), spec.head_dim()});
  if (write) {
    *request.mutable_k() = RandomTensor({rows, spec.num_kv_heads(), spec.head_dim()});
    *request.mutable_v() = RandomTensor({rows, spec.num_kv_heads(), spec.head_dim()});
  }
  return request;
}

void Model::Keep(const v1::DecodeStepRequest& step, int64_t row, uint32_t layer, uint32_t block_id,
                 int64_t token) {
  Block& block = blocks[{layer, block_id}];
  block.k.resize(static_cast<size_t>(block_elements()));
  block.v.resize(static_cast<size_t>(block_elements()));
  const auto bytes = static_cast<size_t>(row_elements()) * 2;
  std::memcpy(block.k.data() + token * row_elements(), step.k().data().data() + row * bytes, bytes);
  std::memcpy(block.v.data() + token * row_elements(), step.v().data().data() + row * bytes, bytes);
}

std::vector<double> Model::Attend(const v1::Tensor& q, int64_t row, uint32_t layer,
                                  const std::vector<uint32_t>& table, int64_t context_tokens,
                                  const v1::AttentionOptions& options,
                                  std::vector<double>* lse) const {
  const int64_t heads = spec.num_query_heads();
  const int64_t dim = spec.head_dim();
  const std::vector<double> query = Numbers(q);
  const double scale = options.has_scale() ? options.scale() : 1 / std::sqrt(double(dim));
  std::vector<double> out(static_cast<size_t>(heads * dim));
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t kv_head = head / (heads / spec.num_kv_heads());
    std::vector<double> logits(static_cast<size_t>(context_tokens),
                               -std::numeric_limits<double>::infinity());
    const auto element = [&](int64_t position) {
      return (position % spec.block_tokens() * spec.num_kv_heads() + kv_head) * dim;
    };
    double max = options.sink_logits_size() > 0 ? options.sink_logits(static_cast<int>(head))
                                                : -std::numeric_limits<double>::infinity();
    for (int64_t position = 0; position < context_tokens; ++position) {
      const bool seen = options.window_tokens() == 0 ||
                        position > context_tokens - 1 - options.window_tokens() ||
                        position < options.sink_tokens();
      if (!seen) continue;
      const Block& block = blocks.at({layer, table[position / spec.block_tokens()]});
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += query[(row * heads + head) * dim + d] * FromBf16(block.k[element(position) + d]);
      }
      const double cap = options.logit_softcap();
      logits[position] = cap == 0 ? scale * dot : cap * std::tanh(scale * dot / cap);
      max = std::max(max, logits[position]);
    }
    double sum = options.sink_logits_size() > 0
                     ? std::exp(options.sink_logits(static_cast<int>(head)) - max)
                     : 0;
    for (int64_t position = 0; position < context_tokens; ++position) {
      const double weight = std::exp(logits[position] - max);
      sum += weight;
      if (weight == 0) continue;
      const Block& block = blocks.at({layer, table[position / spec.block_tokens()]});
      for (int64_t d = 0; d < dim; ++d) {
        out[head * dim + d] += weight * FromBf16(block.v[element(position) + d]);
      }
    }
    for (int64_t d = 0; d < dim; ++d) out[head * dim + d] /= sum;
    if (lse != nullptr) lse->push_back(max + std::log(sum));
  }
  return out;
}

void ExpectClose(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double ulp = std::ldexp(1.0, std::max(-126, std::ilogb(want[i])) - 7);
    ASSERT_NEAR(got[i], want[i], std::max(2 * ulp, 1e-3)) << "element " << i;
  }
}

}  // namespace sluice
