// A device that is as strict about memory as a GPU is, around one that is not.
//
//   auto device = CreateStrictDevice(*CreateCpuDevice({.num_threads = 2}));
//
// - Every address that an operation is given must lie in committed memory of the device; one that
//   does not ends the process with a message that names the operation and the parameter.
// - The host cannot read or write MemoryKind::kDevice: what Reserve gives out is address space that
//   nothing is mapped to, and the operations work elsewhere.
// - info().reads_any_host_memory is false.
//
// Threads and ownership: as Device. A broken rule is found by the thread that enqueues.

#ifndef TESTS_BASE_STRICT_DEVICE_H_
#define TESTS_BASE_STRICT_DEVICE_H_

#include <memory>

#include "kernels/device/device.h"

namespace sluice {

std::unique_ptr<Device> CreateStrictDevice(std::unique_ptr<Device> inner);

}  // namespace sluice

#endif  // TESTS_BASE_STRICT_DEVICE_H_
