// StoreTokens and GatherTokens: bit-exact, and nothing else touched.

#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/ops.h"
#include "tests/conformance/device_factory.h"

namespace sluice {
namespace {

class CopyConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(0);
    stream_ = device_->CreateStream(StreamPriority::kCopy);
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

struct CopyShape {
  int num_kv_heads;
  int head_dim;
  int block_tokens;
  bool paged;
  int first_token;
  int num_tokens;
  int zero_tokens;
};

constexpr int kBlocks = 3;

TEST_P(CopyConformance, StoreThenGather) {
  std::mt19937_64 random(1);
  for (const CopyShape& s : std::vector<CopyShape>{{1, 16, 1, false, 0, 1, 0},
                                                   {3, 40, 16, false, 0, 16, 0},
                                                   {3, 40, 16, true, 0, 9, 7},
                                                   {2, 128, 16, false, 5, 1, 0},
                                                   {2, 128, 16, true, 5, 1, 10},
                                                   {8, 256, 256, false, 0, 200, 50},
                                                   {8, 256, 256, true, 17, 239, 0},
                                                   {4, 64, 64, false, 3, 0, 4},
                                                   {4, 64, 64, true, 3, 0, 0}}) {
    const int64_t slot = SlotBytes(DType::kBf16, s.num_kv_heads, s.head_dim, s.block_tokens);
    const KvLayout layout =
        s.paged ? PagedLayout(DType::kBf16, s.num_kv_heads, s.head_dim, s.block_tokens,
                              kBlocks * slot / 2)
                : SlotLayout(DType::kBf16, s.num_kv_heads, s.head_dim, s.block_tokens);
    const int64_t wire_tokens = s.num_tokens + s.zero_tokens;
    const int64_t wire_values = wire_tokens * s.num_kv_heads * s.head_dim;
    SharedArray<uint16_t> pool(*device_, kBlocks * slot / 2);
    std::vector<SharedArray<uint16_t>> wires;
    SharedArray<TokenCopy> copies(*device_, kBlocks);
    for (int b = 0; b < kBlocks; ++b) {
      for (int kv = 0; kv < 2; ++kv) {
        wires.emplace_back(*device_, wire_values);
        for (int64_t i = 0; i < wire_values; ++i) wires.back()[i] = random() & 0xffff;
      }
      copies[b] = {pool.bytes() + b * (s.paged ? slot / 2 : slot),
                   wires[2 * b].bytes(),
                   wires[2 * b + 1].bytes(),
                   s.first_token,
                   s.num_tokens,
                   s.zero_tokens};
    }
    device_->ops().StoreTokens({layout, copies.data(), kBlocks}, *stream_);
    stream_->Synchronize();
    int64_t untouched = 0;
    for (int64_t i = 0; i < pool.count(); ++i) untouched += pool[i] == 0xffff;
    const int64_t written = kBlocks * 2 * wire_values;
    // Random values are 0xffff once in 65,536 times; everything else that was not written still is.
    EXPECT_NEAR(untouched, pool.count() - written, 10 + written / 10'000.0);
    for (int b = 0; b < kBlocks; ++b) {
      for (int kv = 0; kv < 2; ++kv) {
        for (int64_t t = 0; t < wire_tokens; ++t) {
          for (int h = 0; h < s.num_kv_heads; ++h) {
            const auto* row = reinterpret_cast<const uint16_t*>(
                copies[b].block + kv * layout.v_offset_bytes +
                (s.first_token + t) * layout.token_stride_bytes + h * layout.kv_head_stride_bytes);
            for (int d = 0; d < s.head_dim; ++d) {
              const uint16_t expected =
                  t < s.num_tokens ? wires[2 * b + kv][(t * s.num_kv_heads + h) * s.head_dim + d]
                                   : 0;
              ASSERT_EQ(row[d], expected) << "block " << b << " token " << t << " head " << h;
            }
          }
        }
      }
    }
    // Back again: what was copied is as sent, what was zeroed is zero.
    std::vector<std::vector<uint16_t>> sent;
    for (SharedArray<uint16_t>& wire : wires) {
      sent.push_back(wire.ToVector());
      std::fill_n(wire.data(), wire.count(), uint16_t{0x1234});
    }
    device_->ops().GatherTokens({layout, copies.data(), kBlocks}, *stream_);
    stream_->Synchronize();
    const int64_t copied = int64_t{s.num_tokens} * s.num_kv_heads * s.head_dim;
    for (size_t w = 0; w < wires.size(); ++w) {
      for (int64_t i = 0; i < wire_values; ++i) {
        ASSERT_EQ(wires[w][i], i < copied ? sent[w][i] : 0) << w << " " << i;
      }
    }
  }
}

TEST_P(CopyConformance, NoCopies) {
  const KvLayout layout = SlotLayout(DType::kBf16, 1, 16, 16);
  const StreamPosition position = device_->ops().StoreTokens({layout, nullptr, 0}, *stream_);
  stream_->Synchronize();
  EXPECT_EQ(stream_->completed(), position);
}

INSTANTIATE_TEST_SUITE_P(Devices, CopyConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
