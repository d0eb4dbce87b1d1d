#include "tests/bench/bench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace sluice {
namespace {

struct Entry {
  std::string name;
  void (*run)(Bench&);
};

std::vector<Entry>& Entries() {
  static std::vector<Entry> entries;
  return entries;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

}  // namespace

double Percentile(std::vector<double> values, double percent) {
  const auto rank = static_cast<size_t>(percent / 100 * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + rank, values.end());
  return values[rank];
}

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}

BenchRegistration::BenchRegistration(const char* name, void (*run)(Bench&)) {
  Entries().push_back({name, run});
}

double Bench::Report(const std::string& name, const std::string& unit, int samples,
                     const std::function<double()>& value, const std::function<double()>& ceiling) {
  std::vector<double> values, ceilings, ratios;
  value();
  ceiling();
  for (int i = 0; i < samples; ++i) {
    values.push_back(value());
    ceilings.push_back(ceiling());
    ratios.push_back(values.back() / ceilings.back());
  }
  const double ratio = Median(ratios);
  std::printf(
      "{\"name\": \"%s\", \"value\": %.4g, \"unit\": \"%s\", \"ceiling\": %.4g, \"ratio\": %.3f, "
      "\"samples\": %d}\n",
      name.c_str(), Median(values), unit.c_str(), Median(ceilings), ratio, samples);
  std::fflush(stdout);
  return ratio;
}

double Bench::Report(const std::string& name, const std::string& unit, int samples,
                     const std::function<double()>& value) {
  std::vector<double> values;
  value();
  for (int i = 0; i < samples; ++i) values.push_back(value());
  const double median = Median(values);
  std::printf(
      "{\"name\": \"%s\", \"value\": %.4g, \"unit\": \"%s\", \"ceiling\": null, \"ratio\": null, "
      "\"samples\": %d}\n",
      name.c_str(), median, unit.c_str(), samples);
  std::fflush(stdout);
  return median;
}

}  // namespace sluice

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  sluice::Bench bench;
  int run = 0;
  for (const sluice::Entry& entry : sluice::Entries()) {
    if (entry.name.find(wanted) == std::string::npos) continue;
    entry.run(bench);
    ++run;
  }
  if (run == 0) std::fprintf(stderr, "no benchmark's name contains '%s'\n", wanted.c_str());
  return run == 0 ? 1 : 0;
}
