#include "kernels/device/machine_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace sluice {
namespace {

// The least of `bytes` and the number that a file holds; "max" and what cannot be read are no
// limit.
int64_t AtMostFile(int64_t bytes, const std::string& path) {
  std::ifstream file(path);
  std::string text;
  int64_t limit = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &limit) || limit <= 0) return bytes;
  return std::min(bytes, limit);
}

}  // namespace

int64_t MachineMemoryBytes(int64_t physical_bytes, const std::string& cgroup_mount,
                           const std::string& own_cgroups) {
  int64_t bytes = physical_bytes;
  for (const absl::string_view line : absl::StrSplit(own_cgroups, '\n', absl::SkipEmpty())) {
    // "0::/path" in version 2, "9:memory:/path" in version 1.
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool version_2 = parts[1].empty();
    if (!version_2 && parts[1] != "memory") continue;
    const std::string root = version_2 ? cgroup_mount : absl::StrCat(cgroup_mount, "/memory");
    const char* const file = version_2 ? "/memory.max" : "/memory.limit_in_bytes";
    if (parts[2].empty() || parts[2][0] != '/') continue;
    for (std::string group(parts[2]);; group.resize(group.rfind('/'))) {
      if (group == "/") group.clear();
      bytes = AtMostFile(bytes, absl::StrCat(root, group, file));
      if (group.empty()) break;
    }
  }
  return bytes;
}

int64_t MachineMemoryBytes() {
  const int64_t physical_bytes =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  std::ifstream file("/proc/self/cgroup");
  const std::string own_cgroups{std::istreambuf_iterator<char>(file), {}};
  return MachineMemoryBytes(physical_bytes, "/sys/fs/cgroup", own_cgroups);
}

}  // namespace sluice
