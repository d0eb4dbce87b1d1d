// Running states: begin, tiles, merges of parts, finalize.

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/conformance/attend_fixture.h"

namespace sluice {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class StateConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam().create(0);
    stream_ = device_->CreateStream(StreamPriority::kAttention);
  }

  void Begin(const AttendProblem& problem, const StateArrays& state) {
    device_->ops().BeginStates(
        {problem.num_rows(), problem.num_query_heads(), problem.shape.head_dim, state.state()},
        *stream_);
  }
  // Folds tokens [begin, end) of the problem's one sequence into `state`; block-aligned begin.
  void Step(AttendProblem& problem, int64_t begin, int64_t end, const StateArrays& state) {
    const AttendSequence whole = problem.sequences[0];
    problem.sequences[0].blocks = whole.blocks + begin / problem.shape.block_tokens;
    problem.sequences[0].context_tokens = end - begin;
    AttendParams params = problem.Params();
    params.state = state.state();
    device_->ops().Attend(params, *stream_);
    stream_->Synchronize();
    problem.sequences[0] = whole;
  }
  // o / l and lse into the problem's outputs.
  void Finalize(AttendProblem& problem, const StateArrays& state) {
    problem.out = SharedArray<float>(
        *device_, problem.num_rows() * problem.num_query_heads() * problem.shape.head_dim);
    problem.lse = SharedArray<float>(*device_, problem.num_rows() * problem.num_query_heads());
    FinalizeParams params;
    params.num_rows = problem.num_rows();
    params.num_query_heads = problem.num_query_heads();
    params.head_dim = problem.shape.head_dim;
    params.state = state.state();
    params.sink_logits = problem.shape.options.sink_logits;
    params.out = problem.out.bytes();
    params.out_dtype = DType::kF32;
    params.lse = problem.lse.data();
    device_->ops().FinalizeStates(params, *stream_);
    stream_->Synchronize();
  }
  StateArrays NewState(const AttendProblem& problem) {
    StateArrays state(*device_, problem.num_rows(), problem.num_query_heads(),
                      problem.shape.head_dim);
    Begin(problem, state);
    return state;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

AttendShape TileShape(uint64_t seed) {
  AttendShape shape;
  shape.head_dim = 40;
  shape.group = 3;
  shape.causal = false;
  shape.sequences = {{3000, 2}};
  shape.seed = seed;
  return shape;
}

TEST_P(StateConformance, BeginIsEmpty) {
  AttendProblem problem(*device_, TileShape(1));
  const StateArrays state = NewState(problem);
  stream_->Synchronize();
  for (int64_t i = 0; i < state.m.count(); ++i) ASSERT_EQ(state.m[i], -kInfinity);
  for (int64_t i = 0; i < state.l.count(); ++i) ASSERT_EQ(state.l[i], 0.0f);
  for (int64_t i = 0; i < state.o.count(); ++i) ASSERT_EQ(state.o[i], 0.0f);
}

TEST_P(StateConformance, FinalizeOfAnEmptyStateIsZero) {
  AttendProblem problem(*device_, TileShape(1));
  const StateArrays state = NewState(problem);
  Finalize(problem, state);
  for (int64_t i = 0; i < problem.out.count(); ++i) ASSERT_EQ(problem.out[i], 0.0f);
  for (int64_t i = 0; i < problem.lse.count(); ++i) ASSERT_EQ(problem.lse[i], -kInfinity);
}

TEST_P(StateConformance, TilesAtRandomBorders) {
  std::mt19937_64 random(7);
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    AttendShape shape = TileShape(seed);
    shape.dtype = seed % 2 == 0 ? DType::kBf16 : DType::kFp16;
    const std::vector<float> sinks = {0, 1, 2, 3, 4, -kInfinity};
    if (seed > 3) shape.options.sink_logits = sinks.data();
    AttendProblem problem(*device_, shape);
    const StateArrays state = NewState(problem);
    for (int64_t begin = 0; begin < 3000;) {
      const int64_t blocks = std::uniform_int_distribution<int64_t>(0, 60)(random);
      const int64_t end = std::min<int64_t>(begin + blocks * shape.block_tokens, 3000);
      Step(problem, begin, end, state);  // an empty tile now and then
      begin = end;
    }
    Finalize(problem, state);
    problem.ExpectNearReference(GetParam().f32_tolerance);
  }
}

// A call that exports (m, l, o) exports what the formulas say.
TEST_P(StateConformance, ExportedStateIsTheRunningState) {
  AttendProblem problem(*device_, TileShape(3));
  const StateArrays state = NewState(problem);
  Step(problem, 0, 3000, state);
  for (int h = 0; h < problem.num_query_heads(); ++h) {
    const ReferenceRow expected = problem.Reference(0, 1, h);
    const int64_t at = problem.num_query_heads() + h;
    EXPECT_NEAR(state.m[at], expected.m, 1e-4);
    EXPECT_NEAR(state.m[at] + std::log(state.l[at]), expected.lse, 1e-4);
    for (int d = 0; d < problem.shape.head_dim; ++d) {
      EXPECT_NEAR(state.o[at * problem.shape.head_dim + d] / state.l[at], expected.out[d], 1e-3);
    }
  }
}

TEST_P(StateConformance, MergeOfPartsIsTheWhole) {
  AttendProblem problem(*device_, TileShape(4));
  const std::vector<int64_t> borders = {0, 16, 16, 1600, 2992, 3000};
  std::vector<StateArrays> parts;
  SharedArray<RunningState> part_states(*device_, static_cast<int64_t>(borders.size()) - 1);
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    parts.push_back(NewState(problem));
    if (borders[i] < borders[i + 1]) Step(problem, borders[i], borders[i + 1], parts.back());
    part_states[i] = parts.back().state();
  }
  const StateArrays into = NewState(problem);
  MergeParams merge;
  merge.num_rows = problem.num_rows();
  merge.num_query_heads = problem.num_query_heads();
  merge.head_dim = problem.shape.head_dim;
  merge.into = into.state();
  merge.parts = part_states.data();
  merge.num_parts = part_states.count();
  device_->ops().MergeStates(merge, *stream_);
  Finalize(problem, into);
  problem.ExpectNearReference(GetParam().f32_tolerance);
}

TEST_P(StateConformance, MergeWithEmptyPartsChangesNoBit) {
  AttendProblem problem(*device_, TileShape(5));
  const StateArrays state = NewState(problem);
  Step(problem, 0, 1000, state);
  const std::vector<std::byte> o = Bits(state.o, 0, state.o.count());
  const std::vector<std::byte> l = Bits(state.l, 0, state.l.count());
  const StateArrays empty = NewState(problem);
  SharedArray<RunningState> parts(*device_, {empty.state(), empty.state()});
  MergeParams merge;
  merge.num_rows = problem.num_rows();
  merge.num_query_heads = problem.num_query_heads();
  merge.head_dim = problem.shape.head_dim;
  merge.into = state.state();
  merge.parts = parts.data();
  merge.num_parts = 2;
  device_->ops().MergeStates(merge, *stream_);
  stream_->Synchronize();
  EXPECT_EQ(Bits(state.o, 0, state.o.count()), o);
  EXPECT_EQ(Bits(state.l, 0, state.l.count()), l);
  // All parts empty: still empty, and no NaN from -infinity - -infinity.
  merge.into = empty.state();
  const StateArrays other = NewState(problem);
  parts[0] = parts[1] = other.state();
  device_->ops().MergeStates(merge, *stream_);
  stream_->Synchronize();
  for (int64_t i = 0; i < empty.m.count(); ++i) ASSERT_EQ(empty.m[i], -kInfinity);
  for (int64_t i = 0; i < empty.o.count(); ++i) ASSERT_EQ(empty.o[i], 0.0f);
}

// Parts whose maxima are far apart: the smaller one vanishes, and the order does not matter.
TEST_P(StateConformance, MergeOfDistantMaxima) {
  const auto fill = [&](const StateArrays& state, float m, float l, float o) {
    for (int64_t i = 0; i < state.m.count(); ++i) state.m[i] = m;
    for (int64_t i = 0; i < state.l.count(); ++i) state.l[i] = l;
    for (int64_t i = 0; i < state.o.count(); ++i) state.o[i] = o;
  };
  for (const bool swap : {false, true}) {
    const StateArrays low(*device_, 1, 2, 16);
    const StateArrays high(*device_, 1, 2, 16);
    fill(low, -1e4f, 3.0f, 5.0f);
    fill(high, 1e4f, 2.0f, 7.0f);
    const StateArrays& into = swap ? high : low;
    const StateArrays& part = swap ? low : high;
    SharedArray<RunningState> parts(*device_, {part.state()});
    device_->ops().MergeStates({1, 2, 16, into.state(), parts.data(), 1}, *stream_);
    stream_->Synchronize();
    EXPECT_EQ(into.m[0], 1e4f);
    EXPECT_EQ(into.l[1], 2.0f);
    EXPECT_EQ(into.o[17], 7.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, StateConformance, testing::ValuesIn(DeviceFactories()),
                         FactoryName);

}  // namespace
}  // namespace sluice
