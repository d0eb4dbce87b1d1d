// Float64 references for the operations, straight from the formulas.

#ifndef TESTS_CONFORMANCE_REFERENCE_H_
#define TESTS_CONFORMANCE_REFERENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/ops/params.h"

namespace sluice {

double ToDouble(DType dtype, uint16_t bits);
uint16_t FromFloat(DType dtype, float value);

// The distance between neighbouring BF16 values at x.
double Bf16Ulp(double x);
// 1e-3 or 2 BF16 ulp of `expected`, whichever is larger.
double OutTolerance(double expected);

struct ReferenceRow {
  std::vector<double> out;
  double m = 0;    // maximum of the logits, without the sink
  double lse = 0;  // with the sink
};

// Attention of one query vector at `position` over the keys and values of its kv head,
// [tokens][head_dim]. Only positions that it sees are looked at.
struct ReferenceQuery {
  const double* q = nullptr;
  const double* k = nullptr;
  const double* v = nullptr;
  int64_t token_stride = 0;  // in elements of k and v
  int head_dim = 0;
  int64_t position = -1;
  AttendOptions options;
  const float* sink_logit = nullptr;
};
ReferenceRow ReferenceAttend(const ReferenceQuery& query);

}  // namespace sluice

#endif  // TESTS_CONFORMANCE_REFERENCE_H_
