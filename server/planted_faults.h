// Where a test build of the daemon (//tests/faults:faulty_sluiced) reaches its device. The daemon
// itself links no_faults.cc, which hands the device back.

#ifndef SERVER_PLANTED_FAULTS_H_
#define SERVER_PLANTED_FAULTS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "kernels/device/device.h"

namespace sluice {

// The device to serve with. `on_failure` is what a device of this process calls when it fails.
std::unique_ptr<Device> PlantFaults(std::unique_ptr<Device> device,
                                    std::function<void(const absl::Status&)> on_failure);

}  // namespace sluice

#endif  // SERVER_PLANTED_FAULTS_H_
