// A daemon that can be broken from outside: SIGUSR1 makes its device fail.
//
// On a GPU a kernel writes to an address that is none, and the daemon has to find out. The CPU does
// not fail: it is told that it has.

#include <semaphore.h>
#include <signal.h>

#include <thread>
#include <utility>

#include "server/planted_faults.h"
#include "tests/base/test_device.h"
#include "tests/faults/illegal_access.h"

namespace sluice {
namespace {

sem_t fault_wanted;

void OnSignal(int) { sem_post(&fault_wanted); }

void WaitForSignal() {
  while (sem_wait(&fault_wanted) != 0) {
  }
}

}  // namespace

std::unique_ptr<Device> PlantFaults(std::unique_ptr<Device> device,
                                    std::function<void(const absl::Status&)> on_failure) {
  sem_init(&fault_wanted, 0, 0);
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);

  if (device->info().kind == "cuda") {
    std::thread([] {
      WaitForSignal();
      WriteToIllegalAddress();
    }).detach();
    return device;
  }
  auto failing = std::make_unique<TestDevice>(std::move(device));
  failing->failure().Listen(std::move(on_failure));
  std::thread([device = failing.get()] {
    WaitForSignal();
    device->Fail("tests/faults/plant_faults.cc: a planted fault");
  }).detach();
  return failing;
}

}  // namespace sluice
