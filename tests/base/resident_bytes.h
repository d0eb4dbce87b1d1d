// How much memory the process holds, for tests of what things cost.
//
//   if (Sanitized()) GTEST_SKIP() << "resident memory is the sanitizer's";
//   const int64_t before = ResidentBytes();

#ifndef TESTS_BASE_RESIDENT_BYTES_H_
#define TESTS_BASE_RESIDENT_BYTES_H_

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace sluice {

inline int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGE_SIZE);
}

// Sanitizers keep shadows and quarantines, and slow things down: resident memory says nothing then,
// and times little.
inline constexpr bool Sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

}  // namespace sluice

#endif  // TESTS_BASE_RESIDENT_BYTES_H_
