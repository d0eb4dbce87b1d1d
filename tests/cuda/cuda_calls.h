// Counts the CUDA calls of this program that take, give back or register memory, or wait for a
// stream or the device.
//
//   CudaCalls::Start();
//   ... work ...
//   EXPECT_THAT(CudaCalls::Stop(), IsEmpty());
//
// The program is linked with -Wl,--wrap for each of the runtime's functions (targets.bzl has the
// list), and what cudaGetDriverEntryPointByVersion hands out is wrapped too. Calls that the runtime
// makes by itself are not seen.
//
// Threads: calls are counted whatever thread makes them; Start and Stop are for one thread.

#ifndef TESTS_CUDA_CUDA_CALLS_H_
#define TESTS_CUDA_CUDA_CALLS_H_

#include <string>
#include <vector>

namespace sluice {

class CudaCalls {
 public:
  static void Start();
  // "cudaMalloc x 3", in the order of names.
  static std::vector<std::string> Stop();
  // Driver functions that were asked for and that cuda_calls.cc does not know, and so cannot judge.
  static std::vector<std::string> UnknownEntryPoints();
};

}  // namespace sluice

#endif  // TESTS_CUDA_CUDA_CALLS_H_
