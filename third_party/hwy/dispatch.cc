// Highway's run-time part: which instruction sets this CPU has. The distribution carries Highway's
// own only as a shared library, which a release program could not take along; the headers need no
// more than these functions.

#include <hwy/highway.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace hwy {
namespace {

std::atomic<int64_t> disabled_targets{0};
std::atomic<int64_t> targets_for_test{0};

int64_t DetectTargets() {
  int64_t targets = HWY_STATIC_TARGET;
#if HWY_ARCH_X86
  // These say no as well where the operating system does not save the registers concerned.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("ssse3")) targets |= HWY_SSSE3;
  const bool sse4 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes") &&
                    __builtin_cpu_supports("pclmul");
  if (sse4) targets |= HWY_SSE4;
  const bool avx2 = sse4 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (avx2) targets |= HWY_AVX2;
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd");
  if (avx3) targets |= HWY_AVX3;
  const bool avx3_dl =
      avx3 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("vpclmulqdq") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
      __builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512vpopcntdq") &&
      __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("gfni");
  if (avx3_dl) targets |= HWY_AVX3_DL;
#endif
  return targets;
}

}  // namespace

int64_t SupportedTargets() {
  static const int64_t detected = DetectTargets();
  const int64_t for_test = targets_for_test.load();
  const int64_t targets = (for_test != 0 ? for_test : detected) & ~disabled_targets.load();
  return targets != 0 ? targets : HWY_STATIC_TARGET;
}

void DisableTargets(int64_t targets) {
  disabled_targets.store(targets);
  // The next dispatch chooses anew.
  GetChosenTarget().DeInit();
}

void SetSupportedTargetsForTest(int64_t targets) {
  targets_for_test.store(targets);
  GetChosenTarget().DeInit();
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

void Abort(const char* file, int line, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace hwy
