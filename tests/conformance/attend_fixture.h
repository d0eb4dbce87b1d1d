// Builds the inputs of an Attend call in memory that the device can address, runs it, and compares
// with float64.

#ifndef TESTS_CONFORMANCE_ATTEND_FIXTURE_H_
#define TESTS_CONFORMANCE_ATTEND_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/ops.h"
#include "tests/conformance/device_factory.h"
#include "tests/conformance/reference.h"

namespace sluice {

struct SequenceShape {
  int64_t context_tokens = 1;
  int query_tokens = 1;
};

struct AttendShape {
  DType dtype = DType::kBf16;
  int head_dim = 64;
  int num_kv_heads = 2;
  int group = 1;  // query heads for a kv head
  int block_tokens = 16;
  bool paged = false;
  bool causal = true;
  std::vector<SequenceShape> sequences = {{}};
  AttendOptions options;  // scale 0: 1/sqrt(head_dim)
  float q_factor = 1;     // queries are N(0, q_factor^2)
  uint64_t seed = 1;
  std::string ToString() const;
};

// One problem in device memory. Tokens past the context hold NaN and infinity; outputs, states and
// workspace start as NaN; blocks stand in shuffled order.
class AttendProblem {
 public:
  AttendProblem(Device& device, const AttendShape& shape);

  int num_query_heads() const { return shape.num_kv_heads * shape.group; }
  int64_t num_rows() const { return num_rows_; }
  // Index of the first row of sequence i.
  int64_t first_row(int i) const { return sequences[i].first_row; }

  AttendParams Params();
  // Runs the call with out (F32) and lse.
  void Run(Stream& stream);
  // out as 16-bit values of the dtype.
  std::vector<uint16_t> RunNarrow(Stream& stream);
  // Compares out and lse of Run with float64, every `row_step`-th row.
  void ExpectNearReference(double f32_tolerance, int row_step = 1);
  ReferenceRow Reference(int sequence, int query_token, int query_head) const;
  double OutputAt(int64_t row, int query_head, int d) const;

  AttendShape shape;
  KvLayout layout;
  Device& device;
  std::vector<std::vector<double>> k, v;  // per sequence, [token][kv_head][head_dim]
  std::vector<double> q_values;           // [row][query_head][head_dim]
  SharedArray<uint16_t> q;
  SharedArray<std::byte> pool;
  std::vector<SharedArray<const std::byte*>> tables;
  SharedArray<AttendSequence> sequences;
  SharedArray<float> sink_logits;
  SharedArray<float> out;
  SharedArray<float> lse;
  SharedArray<std::byte> workspace;

 private:
  void PlaceToken(int sequence, int64_t token, bool poison, std::mt19937_64& random);

  int64_t num_rows_ = 0;
};

// A running state in device memory, not initialised.
struct StateArrays {
  StateArrays(Device& device, int64_t rows, int num_query_heads, int head_dim)
      : m(device, rows * num_query_heads),
        l(device, rows * num_query_heads),
        o(device, rows * num_query_heads * head_dim) {}
  RunningState state() const { return {m.data(), l.data(), o.data()}; }

  SharedArray<float> m, l, o;
};

// The bytes of an array, for comparing bit by bit.
template <class T>
std::vector<std::byte> Bits(const SharedArray<T>& array, int64_t first, int64_t count) {
  const auto* from = reinterpret_cast<const std::byte*>(array.data() + first);
  return std::vector<std::byte>(from, from + count * sizeof(T));
}

}  // namespace sluice

#endif  // TESTS_CONFORMANCE_ATTEND_FIXTURE_H_
