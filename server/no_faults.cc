#include "server/planted_faults.h"

namespace sluice {

std::unique_ptr<Device> PlantFaults(std::unique_ptr<Device> device,
                                    std::function<void(const absl::Status&)>) {
  return device;
}

}  // namespace sluice
