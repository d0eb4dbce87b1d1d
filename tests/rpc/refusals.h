// What the tests of refusals share: tables of requests that are right but for one thing, and a
// session to send them to. Its parts are refusals_test.cc and refusals_attention_test.cc, which are
// one program: it is over all of it that every reason has to be met.

#ifndef TESTS_RPC_REFUSALS_H_
#define TESTS_RPC_REFUSALS_H_

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {

using grpc::StatusCode;
using Attention = v1::AttentionService::Stub;
using Sequence = v1::SequenceService::Stub;
using SessionStub = v1::SessionService::Stub;
using Swap = v1::SwapService::Stub;

// A request that is right but for one thing.
template <typename Request>
struct Case {
  std::string name;
  std::function<void(Request&)> spoil;
  StatusCode code;
  Reason reason;
  std::string field;
};

template <typename Stub, typename Request, typename Response>
void RunCases(Stub& stub,
              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& right, const std::vector<Case<Request>>& cases) {
  for (const Case<Request>& c : cases) {
    SCOPED_TRACE(c.name);
    Request request = right;
    c.spoil(request);
    Response response;
    ExpectRefused(Invoke(stub, method, request, &response), c.code, c.reason, c.field);
  }
}

inline constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
inline constexpr StatusCode kNotFound = StatusCode::NOT_FOUND;
inline constexpr StatusCode kPrecondition = StatusCode::FAILED_PRECONDITION;
inline constexpr StatusCode kAborted = StatusCode::ABORTED;
inline constexpr StatusCode kExhausted = StatusCode::RESOURCE_EXHAUSTED;
inline constexpr Reason kField = Reason::kInvalidField;

// A session "a": blocks 1, 2, 3 in both layers; sequence 0 is 1, 2; sequence 1 is 2, 30, of which
// 30 is only reserved.
class RefusalsTest : public ::testing::Test {
 protected:
  RefusalsTest() : model(SmallSpec("a"), daemon.Open("a")) {
    for (const uint32_t layer : {0, 1}) {
      v1::OffloadBlocksResponse stored;
      EXPECT_TRUE(
          Invoke(*daemon.swap, &Swap::OffloadBlocks, model.Offload(layer, {1, 2, 3}), &stored)
              .ok());
    }
    Put(0, {1, 2});
    Put(1, {2, 30});
  }
  void Put(uint32_t sequence_id, const std::vector<uint32_t>& block_ids) {
    v1::PutSequenceRequest put;
    *put.mutable_session() = model.handle;
    put.mutable_update()->set_sequence_id(sequence_id);
    put.mutable_update()->set_generation(5);
    for (const uint32_t id : block_ids) put.mutable_update()->add_block_ids(id);
    v1::PutSequenceResponse response;
    EXPECT_TRUE(Invoke(*daemon.sequence, &Sequence::PutSequence, put, &response).ok());
  }
  template <typename Request>
  Request WithSession() {
    Request request;
    *request.mutable_session() = model.handle;
    return request;
  }

  Daemon daemon;
  Model model;
};

}  // namespace sluice

#endif  // TESTS_RPC_REFUSALS_H_
