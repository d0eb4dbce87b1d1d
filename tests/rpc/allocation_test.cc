// DecodeStep and ScoreBlocks allocate nothing between the parsed request and the filled reply, once
// warm. That is all of our own code on their path; gRPC and the parser of protobuf are beside it.

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "server/rpc/admission.h"
#include "server/rpc/decode_op.h"
#include "server/rpc/free_list.h"
#include "server/rpc/score_op.h"
#include "server/session/session_manager.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> num_allocations{0};

void* Allocate(size_t bytes) {
  if (counting.load(std::memory_order_relaxed)) ++num_allocations;
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace sluice {
namespace {

// What SubmitRpc does with a call, without gRPC: taken from a free list, parsed, run, replied,
// given back.
template <typename Op>
class Path {
 public:
  Path(Session& session, const typename Op::Request& request)
      : session_(session), request_(request) {}

  void RunOnce() { Finish(Start()); }
  // Two calls, held up on the way so that both are in flight. A call's reply is out a moment before
  // its stream is done with it, so the next call may find it there, or not.
  void RunTwoAtOnce(Stream& stream) {
    StreamGate gate(stream);
    std::unique_ptr<Flight> first = Start();
    std::unique_ptr<Flight> second = Start();
    gate.Open();
    Finish(std::move(first));
    Finish(std::move(second));
  }

 private:
  struct Flight;
  std::unique_ptr<Flight> Start() {
    std::unique_ptr<Flight> flight = flights_.Take();
    if (flight == nullptr) flight = std::make_unique<Flight>();
    flight->session = &session_;
    Admission::Ticket ticket;
    EXPECT_TRUE(admission_.Admit(1000, &ticket).ok());
    const absl::Status parsed = flight->Parse(request_, session_, admission_);
    EXPECT_TRUE(parsed.ok()) << parsed;
    flight->SetDeadline(absl::InfiniteFuture());
    flight->Run(session_);
    return flight;
  }
  void Finish(std::unique_ptr<Flight> flight) {
    flight->Wait();
    ASSERT_TRUE(flight->status().ok()) << flight->status();
    flights_.Give(std::move(flight));
  }

  struct Flight final : Op {
    void Done() override {
      this->Reply(*session, &response).IgnoreError();
      const std::lock_guard<std::mutex> lock(mutex);
      done = true;
      changed.notify_all();
    }
    void Wait() {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return done; });
      done = false;
    }
    Session* session = nullptr;
    typename Op::Response response;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };

  Session& session_;
  const typename Op::Request& request_;
  Admission admission_{1 << 20, 1 << 20};
  FreeList<Flight> flights_{4};
};

template <typename Op>
int64_t AllocationsWhenWarm(Session& session, const typename Op::Request& request, Stream& stream) {
  Path<Op> path(session, request);
  for (int i = 0; i < 20; ++i) path.RunTwoAtOnce(stream);
  num_allocations = 0;
  counting = true;
  for (int i = 0; i < 200; ++i) path.RunOnce();
  counting = false;
  return num_allocations.load();
}

class AllocationTest : public ::testing::Test {
 protected:
  AllocationTest() : model(SmallSpec("a"), daemon.Open("a")) {
    for (const uint32_t layer : {0, 1}) {
      v1::OffloadBlocksResponse stored;
      EXPECT_TRUE(Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks,
                         model.Offload(layer, {1, 2, 3, 4}), &stored)
                      .ok());
    }
    for (const uint32_t id : {0, 1}) {
      v1::PutSequenceRequest put;
      *put.mutable_session() = model.handle;
      put.mutable_update()->set_sequence_id(id);
      put.mutable_update()->set_generation(1);
      put.mutable_update()->add_block_ids(2 * id + 1);
      put.mutable_update()->add_block_ids(2 * id + 2);
      v1::PutSequenceResponse response;
      EXPECT_TRUE(
          Invoke(*daemon.sequence, &v1::SequenceService::Stub::PutSequence, put, &response).ok());
    }
    session = *daemon.manager().Find(model.handle.name(), model.handle.epoch());
    // Nothing of gRPC may run beside what is counted.
    daemon.server().Shutdown(absl::Seconds(5));
  }
  // The session's first.
  Stream& attention_stream() { return *daemon.device().streams()[0]; }

  Daemon daemon;
  Model model;
  std::shared_ptr<Session> session;
};

TEST(Counting, SeesAllocations) {
  num_allocations = 0;
  counting = true;
  delete new std::string(100, 'x');
  counting = false;
  EXPECT_GE(num_allocations.load(), 1);
}

TEST_F(AllocationTest, DecodeStepAllocatesNothing) {
  v1::DecodeStepRequest request = model.Step(0, {{0, 20}, {1, 32}}, /*write=*/true);
  request.mutable_output()->set_return_lse(true);
  EXPECT_EQ(AllocationsWhenWarm<DecodeOp>(*session, request, attention_stream()), 0);
}

TEST_F(AllocationTest, DecodeStepWithAnUpdateThatIsRepeatedAllocatesNothing) {
  v1::DecodeStepRequest request = model.Step(1, {{0, 20}}, /*write=*/true);
  request.mutable_sequences(0)->mutable_update()->set_generation(1);
  request.mutable_sequences(0)->mutable_update()->set_base_blocks(2);
  EXPECT_EQ(AllocationsWhenWarm<DecodeOp>(*session, request, attention_stream()), 0);
}

TEST_F(AllocationTest, ScoreBlocksAllocatesNothing) {
  v1::ScoreBlocksRequest request;
  *request.mutable_session() = model.handle;
  for (const uint32_t id : {1, 2, 3, 4}) request.mutable_blocks()->add_block_ids(id);
  *request.mutable_q() = model.RandomTensor({4, 32});
  request.set_top_k(3);
  EXPECT_EQ(AllocationsWhenWarm<ScoreOp>(*session, request, attention_stream()), 0);
  request.set_sequence_id(1);
  request.set_top_k(2);
  EXPECT_EQ(AllocationsWhenWarm<ScoreOp>(*session, request, attention_stream()), 0);
}

}  // namespace
}  // namespace sluice
