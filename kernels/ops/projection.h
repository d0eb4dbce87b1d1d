// The projection P of a session: [head_dim, rank] BF16 from a seed.
//
// GAUSSIAN, version 1: entry e = row * rank + column (row-major) is element (e mod 2) of the
// Box-Muller pair e / 2. Pair i takes the four 32-bit words (w0, w1, w2, w3) of Philox4x32-10
// (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with counter (low 32 of i,
// high 32 of i, 0, version) and key (low 32 of seed, high 32 of seed):
//   u1 = (((w0 * 2^32 + w1) >> 11) + 0.5) * 2^-53   (64-bit integer, then double)
//   u2 = (((w2 * 2^32 + w3) >> 11) + 0.5) * 2^-53
//   z0 = sqrt(-2 ln u1) cos(2 pi u2),  z1 = sqrt(-2 ln u1) sin(2 pi u2)   (double)
// The entry is z / sqrt(rank) rounded to BF16, nearest even, once, from double.
// Variance 1/rank makes projected dot products unbiased (Johnson-Lindenstrauss).
//
// Threads: pure functions.

#ifndef KERNELS_OPS_PROJECTION_H_
#define KERNELS_OPS_PROJECTION_H_

#include <array>
#include <cstdint>

namespace sluice {

inline constexpr uint32_t kGaussianProjectionVersion = 1;

std::array<uint32_t, 4> Philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Fills p[head_dim * rank] with BF16 bits.
void FillGaussianProjection(uint64_t seed, int head_dim, int rank, uint16_t* p);

}  // namespace sluice

#endif  // KERNELS_OPS_PROJECTION_H_
