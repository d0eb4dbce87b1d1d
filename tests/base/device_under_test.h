// The device that tests of the layers above it run on: what the test program links decides. The
// tests of this repository link cpu_device_under_test; the program for a machine with a GPU links
// cuda_device_under_test.

#ifndef TESTS_BASE_DEVICE_UNDER_TEST_H_
#define TESTS_BASE_DEVICE_UNDER_TEST_H_

#include <memory>

#include "kernels/device/device.h"

namespace sluice {

// `num_threads` run host tasks (on the CPU: operations too). Ends the program where there is none.
std::unique_ptr<Device> CreateDeviceUnderTest(int num_threads);

}  // namespace sluice

#endif  // TESTS_BASE_DEVICE_UNDER_TEST_H_
