#include "kernels/cpu/instruction_set.h"

#include "kernels/cpu/highway_config.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/instruction_set.cc"
#include "hwy/foreach_target.h"
// After foreach_target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

int64_t Target() { return HWY_TARGET; }

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

HWY_EXPORT(Target);

std::string CpuInstructionSet() { return hwy::TargetName(HWY_DYNAMIC_DISPATCH(Target)()); }

std::vector<int64_t> CpuInstructionSets() {
  std::vector<int64_t> targets;
  for (int64_t left = HWY_TARGETS & (hwy::SupportedTargets() | HWY_STATIC_TARGET); left != 0;
       left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

void ForceCpuInstructionSetForTest(int64_t target) { hwy::SetSupportedTargetsForTest(target); }

}  // namespace sluice
#endif  // HWY_ONCE
