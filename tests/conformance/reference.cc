#include "tests/conformance/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/float16.h"

namespace sluice {

double ToDouble(DType dtype, uint16_t bits) {
  return dtype == DType::kBf16 ? FloatFromBf16(bits) : FloatFromFp16(bits);
}

uint16_t FromFloat(DType dtype, float value) {
  return dtype == DType::kBf16 ? Bf16FromFloat(value) : Fp16FromFloat(value);
}

double Bf16Ulp(double x) {
  if (x == 0) return std::ldexp(1.0, -133);
  return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
}

double OutTolerance(double expected) { return std::max(1e-3, 2 * Bf16Ulp(expected)); }

ReferenceRow ReferenceAttend(const ReferenceQuery& query) {
  const AttendOptions& options = query.options;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<int64_t, double>> logits;
  ReferenceRow row;
  row.m = -kInfinity;
  for (int64_t t = 0; t <= query.position; ++t) {
    const bool in_window = options.window_tokens == 0 || t > query.position - options.window_tokens;
    if (!in_window && t >= options.sink_tokens) continue;
    double s = 0;
    for (int d = 0; d < query.head_dim; ++d) s += query.q[d] * query.k[t * query.token_stride + d];
    s *= options.scale;
    if (options.logit_softcap != 0) {
      s = options.logit_softcap * std::tanh(s / options.logit_softcap);
    }
    logits.emplace_back(t, s);
    row.m = std::max(row.m, s);
  }
  double m = row.m;
  if (query.sink_logit != nullptr) m = std::max<double>(m, *query.sink_logit);
  row.out.assign(query.head_dim, 0);
  row.lse = -kInfinity;
  if (m == -kInfinity) return row;
  double l = query.sink_logit != nullptr ? std::exp(*query.sink_logit - m) : 0;
  for (const auto& [t, s] : logits) {
    const double weight = std::exp(s - m);
    l += weight;
    for (int d = 0; d < query.head_dim; ++d) {
      row.out[d] += weight * query.v[t * query.token_stride + d];
    }
  }
  for (double& value : row.out) value /= l;
  row.lse = m + std::log(l);
  return row;
}

}  // namespace sluice
