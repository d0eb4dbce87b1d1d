// How much memory this process may use.
//
// Threads: safe to call from any thread.

#ifndef KERNELS_DEVICE_MACHINE_MEMORY_H_
#define KERNELS_DEVICE_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

namespace sluice {

// Physical memory, or the limit of the process's control group where that is lower (a container's
// limit: to pass it is to be killed).
int64_t MachineMemoryBytes();

// The same from given places: a sysfs mount of control groups (version 2 or 1) and the text of
// /proc/self/cgroup. Limits of parent groups count too.
int64_t MachineMemoryBytes(int64_t physical_bytes, const std::string& cgroup_mount,
                           const std::string& own_cgroups);

}  // namespace sluice

#endif  // KERNELS_DEVICE_MACHINE_MEMORY_H_
