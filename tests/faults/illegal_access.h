// A fault to plant into a process that uses a GPU.

#ifndef TESTS_FAULTS_ILLEGAL_ACCESS_H_
#define TESTS_FAULTS_ILLEGAL_ACCESS_H_

namespace sluice {

// Has a kernel write to an address that is none, on a stream of its own, and says nothing: who uses
// the GPU finds out. Does nothing in a build without CUDA.
void WriteToIllegalAddress();

}  // namespace sluice

#endif  // TESTS_FAULTS_ILLEGAL_ACCESS_H_
