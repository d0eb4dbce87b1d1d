#include "kernels/ops/projection.h"

#include <cmath>
#include <numbers>

#include "kernels/ops/float16.h"

namespace sluice {
namespace {

// One 53-bit uniform from two words, in (0, 1).
double Uniform(uint32_t high, uint32_t low) {
  const uint64_t bits = ((static_cast<uint64_t>(high) << 32) | low) >> 11;
  return (static_cast<double>(bits) + 0.5) * 0x1p-53;
}

}  // namespace

std::array<uint32_t, 4> Philox4x32_10(std::array<uint32_t, 4> counter,
                                      std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

void FillGaussianProjection(uint64_t seed, int head_dim, int rank, uint16_t* p) {
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed),
                                       static_cast<uint32_t>(seed >> 32)};
  const double inverse_root = 1.0 / std::sqrt(static_cast<double>(rank));
  const int64_t count = static_cast<int64_t>(head_dim) * rank;
  for (int64_t e = 0; e < count; e += 2) {
    const uint64_t pair = static_cast<uint64_t>(e / 2);
    const std::array<uint32_t, 4> w =
        Philox4x32_10({static_cast<uint32_t>(pair), static_cast<uint32_t>(pair >> 32), 0,
                       kGaussianProjectionVersion},
                      key);
    const double radius = std::sqrt(-2.0 * std::log(Uniform(w[0], w[1])));
    const double angle = 2.0 * std::numbers::pi * Uniform(w[2], w[3]);
    p[e] = Bf16FromDouble(radius * std::cos(angle) * inverse_root);
    if (e + 1 < count) p[e + 1] = Bf16FromDouble(radius * std::sin(angle) * inverse_root);
  }
}

}  // namespace sluice
