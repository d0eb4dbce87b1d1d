// Benchmarks: each prints one or more JSON lines {name, value, unit, ceiling, ratio, ...}.
//
//   BENCH(copy_cpu) {
//     bench.Report("copy_cpu/64K", "GB/s", 9, [&] { return ...; }, [&] { return ...; });
//   }
//
// `sluice_bench [NAME]` runs those whose name contains NAME.

#ifndef TESTS_BENCH_BENCH_H_
#define TESTS_BENCH_BENCH_H_

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

class Bench {
 public:
  // Measures `value` and `ceiling` in turn, `samples` times each after one round of warm-up, and
  // prints the medians and the median of the ratios value / ceiling. Both return the quantity in
  // `unit`, more being better. Returns the ratio.
  double Report(const std::string& name, const std::string& unit, int samples,
                const std::function<double()>& value, const std::function<double()>& ceiling);
  // For quantities without a ceiling, such as times: prints the median alone.
  double Report(const std::string& name, const std::string& unit, int samples,
                const std::function<double()>& value);
};

class BenchRegistration {
 public:
  BenchRegistration(const char* name, void (*run)(Bench&));
};

#define BENCH(name)                                                                         \
  static void Bench_##name([[maybe_unused]] ::sluice::Bench& bench);                        \
  static const ::sluice::BenchRegistration bench_registration_##name(#name, &Bench_##name); \
  static void Bench_##name([[maybe_unused]] ::sluice::Bench& bench)

// Seconds that `work` takes.
template <class Work>
double Seconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The value that `percent` of them are not above.
double Percentile(std::vector<double> values, double percent);

// A benchmark whose set-up fails has nothing to say but why.
void OrDie(const absl::Status& status);
template <typename T>
T OrDie(absl::StatusOr<T> result) {
  OrDie(result.status());
  return *std::move(result);
}

}  // namespace sluice

#endif  // TESTS_BENCH_BENCH_H_
