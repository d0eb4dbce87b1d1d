#include "kernels/ops/projection.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/ops/float16.h"

namespace sluice {
namespace {

using Words4 = std::array<uint32_t, 4>;

// The known answers that come with Random123 (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      Philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      (Words4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      Philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The fixed values of docs/numerics.md.
TEST(GaussianProjection, FixedValues) {
  struct Fixed {
    uint64_t seed;
    int head_dim;
    int rank;
    std::vector<uint16_t> first;
    uint16_t last;
    uint64_t fnv;  // FNV-1a of all entries' bytes, little-endian
  };
  for (const Fixed& fixed :
       std::vector<Fixed>{{0,
                           128,
                           32,
                           {0x3ea7, 0xbcc7, 0xbd6e, 0x3d4a, 0x3e2c, 0x3eb1, 0x3d85, 0xbe24},
                           0x3e84,
                           0xcfdb2eed07578b98},
                          {42,
                           64,
                           16,
                           {0xbe77, 0x3ee5, 0x3e9b, 0x3ed3, 0xbea3, 0x3ecb, 0xbd9b, 0x3dee},
                           0x3d9a,
                           0x740e1977385ec7b8},
                          {0x0123456789abcdef,
                           256,
                           128,
                           {0x3d40, 0xbd00, 0xbda7, 0x3da2, 0x3d19, 0xbc4c, 0x3db7, 0xbca1},
                           0x3ceb,
                           0x4051ecce130c7f4c}}) {
    std::vector<uint16_t> p(fixed.head_dim * fixed.rank);
    FillGaussianProjection(fixed.seed, fixed.head_dim, fixed.rank, p.data());
    EXPECT_EQ(std::vector<uint16_t>(p.begin(), p.begin() + 8), fixed.first);
    EXPECT_EQ(p.back(), fixed.last);
    uint64_t fnv = 14695981039346656037u;
    for (const uint16_t bits : p) {
      for (const int byte : {bits & 0xff, bits >> 8}) fnv = (fnv ^ byte) * 1099511628211u;
    }
    EXPECT_EQ(fnv, fixed.fnv);
  }
}

TEST(GaussianProjection, SeedIsSixtyFourBits) {
  std::vector<uint16_t> a(16 * 8), b(16 * 8);
  FillGaussianProjection(1, 16, 8, a.data());
  FillGaussianProjection((uint64_t{1} << 32) | 1, 16, 8, b.data());
  EXPECT_NE(a, b);
}

TEST(GaussianProjection, OddCountsAreAPrefix) {
  // The entries depend on the rank through 1/sqrt(rank) alone: rank 1 with 17 rows cuts a pair.
  std::vector<uint16_t> odd(17), even(18);
  FillGaussianProjection(5, 17, 1, odd.data());
  FillGaussianProjection(5, 18, 1, even.data());
  even.pop_back();
  EXPECT_EQ(odd, even);
}

TEST(GaussianProjection, MomentsAreThoseOfANormalDistribution) {
  for (const int rank : {16, 32, 128}) {
    std::vector<uint16_t> p(256 * rank);
    FillGaussianProjection(11, 256, rank, p.data());
    double sum = 0, squares = 0, fourth = 0;
    for (const uint16_t bits : p) {
      const double z = FloatFromBf16(bits) * std::sqrt(rank);
      sum += z;
      squares += z * z;
      fourth += z * z * z * z;
    }
    const double n = static_cast<double>(p.size());
    EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
    EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2 / n));
    EXPECT_NEAR(fourth / n, 3, 4 * std::sqrt(96 / n));
  }
}

}  // namespace
}  // namespace sluice
