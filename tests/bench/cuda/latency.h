// Latency of the CUDA device's seam, printed as lines of JSON.

#ifndef TESTS_BENCH_CUDA_LATENCY_H_
#define TESTS_BENCH_CUDA_LATENCY_H_

namespace sluice {

void RunLatency();

}  // namespace sluice

#endif  // TESTS_BENCH_CUDA_LATENCY_H_
