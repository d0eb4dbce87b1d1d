// SessionService, SequenceService, AdminService, health and reflection: right answers.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "server/base/version.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

using Admin = v1::AdminService::Stub;
using Sequence = v1::SequenceService::Stub;
using SessionStub = v1::SessionService::Stub;

TEST(SessionService, OpenFillsInDefaultsAndListsWhatItReserves) {
  Daemon daemon;
  v1::OpenSessionRequest request;
  *request.mutable_spec() = SmallSpec("");
  request.mutable_spec()->clear_rank();
  request.mutable_spec()->clear_max_sequences();
  request.mutable_spec()->set_model_fingerprint(std::string("\0\xff", 2));
  v1::OpenSessionResponse response;
  const grpc::Status status =
      Invoke(*daemon.session, &SessionStub::OpenSession, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_FALSE(response.attached());
  const v1::Session& session = response.session();
  EXPECT_FALSE(session.handle().name().empty());
  EXPECT_GT(session.handle().epoch(), 0u);
  EXPECT_EQ(session.spec().name(), session.handle().name());
  EXPECT_EQ(session.spec().rank(), 32u);
  EXPECT_EQ(session.spec().max_sequences(), 64u);
  EXPECT_EQ(session.spec().kv_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(session.spec().projection_kind(), v1::PROJECTION_KIND_GAUSSIAN);
  EXPECT_EQ(session.spec().durability(), v1::DURABILITY_VOLATILE);
  EXPECT_EQ(session.spec().lease().seconds(), 60);
  EXPECT_EQ(session.spec().model_fingerprint(), std::string("\0\xff", 2));
  EXPECT_EQ(session.state(), v1::SESSION_STATE_ATTACHED);
  EXPECT_GT(session.expire_time().seconds(), session.create_time().seconds());
  bool has_a_g = false;
  for (const v1::MemoryItem& item : session.memory()) {
    has_a_g |= item.name() == "a_g" && item.reserved_bytes() == 2 * 64 * 2 * 16 * 32 * 2;
    EXPECT_FALSE(item.formula().empty());
  }
  EXPECT_TRUE(has_a_g);
}

TEST(SessionService, AttachingFencesTheOlderHandleAndKeepsTheBlocks) {
  Daemon daemon;
  Model first(SmallSpec("a"), daemon.Open("a"));
  v1::OffloadBlocksResponse stored;
  ASSERT_TRUE(
      Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks, first.Offload(0, {1}), &stored)
          .ok());
  v1::OpenSessionRequest request;
  *request.mutable_spec() = SmallSpec("a");
  v1::OpenSessionResponse response;
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::OpenSession, request, &response).ok());
  EXPECT_TRUE(response.attached());
  EXPECT_EQ(response.session().num_blocks(), 1);
  v1::GetSessionRequest get;
  *get.mutable_session() = first.handle;
  v1::GetSessionResponse got;
  const grpc::Status fenced = Invoke(*daemon.session, &SessionStub::GetSession, get, &got);
  ExpectRefused(fenced, grpc::StatusCode::ABORTED, Reason::kFenced);
  *get.mutable_session() = response.session().handle();
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::GetSession, get, &got).ok());
  EXPECT_EQ(got.session().num_predicted_blocks(), 1);
}

TEST(SessionService, ListsInPages) {
  Daemon daemon;
  for (const char* name : {"d", "a", "c", "b", "e"}) daemon.Open(name);
  v1::ListSessionsRequest request;
  request.set_page_size(2);
  std::string names;
  int num_pages = 0;
  do {
    v1::ListSessionsResponse response;
    ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::ListSessions, request, &response).ok());
    for (const v1::Session& session : response.sessions()) names += session.handle().name();
    request.set_page_token(response.next_page_token());
    ++num_pages;
  } while (!request.page_token().empty());
  EXPECT_EQ(names, "abcde");
  EXPECT_EQ(num_pages, 3);
}

TEST(SessionService, RenewAndClose) {
  Daemon daemon;
  Model model(SmallSpec("a"), daemon.Open("a"));
  v1::OffloadBlocksResponse stored;
  ASSERT_TRUE(
      Invoke(*daemon.swap, &v1::SwapService::Stub::OffloadBlocks, model.Offload(0, {1}), &stored)
          .ok());
  v1::RenewSessionRequest renew;
  *renew.mutable_session() = model.handle;
  v1::RenewSessionResponse renewed;
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::RenewSession, renew, &renewed).ok());
  EXPECT_GT(renewed.expire_time().seconds(), absl::ToUnixSeconds(absl::Now()) + 50);

  v1::CloseSessionRequest close;
  *close.mutable_session() = model.handle;
  close.set_mode(v1::CLOSE_MODE_KEEP_DATA);
  v1::CloseSessionResponse closed;
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::CloseSession, close, &closed).ok());
  EXPECT_EQ(closed.freed_bytes(), 0);
  const grpc::Status detached =
      Invoke(*daemon.session, &SessionStub::RenewSession, renew, &renewed);
  ExpectRefused(detached, grpc::StatusCode::FAILED_PRECONDITION, Reason::kSessionDetached);

  *close.mutable_session() = daemon.Open("a");
  close.set_mode(v1::CLOSE_MODE_DELETE_DATA);
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::CloseSession, close, &closed).ok());
  EXPECT_EQ(closed.freed_bytes(), 4096);
  v1::GetUsageResponse usage;
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::GetUsage, v1::GetUsageRequest(), &usage).ok());
  EXPECT_EQ(usage.sessions_size(), 0);
  for (const v1::MemoryPool& pool : usage.memory()) EXPECT_EQ(pool.used_bytes(), 0) << pool.name();
}

TEST(SessionService, TwoSessionsDoNotSeeEachOther) {
  Daemon daemon;
  Model a(SmallSpec("a"), daemon.Open("a"), 1);
  Model b(SmallSpec("b"), daemon.Open("b"), 2);
  v1::OffloadBlocksResponse stored;
  const auto offload = &v1::SwapService::Stub::OffloadBlocks;
  ASSERT_TRUE(Invoke(*daemon.swap, offload, a.Offload(0, {1, 2}), &stored).ok());
  ASSERT_TRUE(Invoke(*daemon.swap, offload, b.Offload(0, {2}), &stored).ok());
  EXPECT_EQ(stored.replaced_blocks(), 0);
  // b's block 2 is b's own, and there is no block 1.
  v1::FetchBlocksRequest fetch;
  *fetch.mutable_session() = b.handle;
  fetch.mutable_blocks()->add_layers(0);
  fetch.mutable_blocks()->add_block_ids(2);
  {
    grpc::ClientContext context;
    const auto reader = daemon.swap->FetchBlocks(&context, fetch);
    v1::FetchBlocksResponse piece;
    ASSERT_TRUE(reader->Read(&piece));
    const auto& want = b.blocks.at({0, 2}).k;
    EXPECT_EQ(piece.k().data(),
              std::string(reinterpret_cast<const char*>(want.data()), want.size() * 2));
    EXPECT_FALSE(reader->Read(&piece));
    EXPECT_TRUE(reader->Finish().ok());
  }
  fetch.mutable_blocks()->set_block_ids(0, 1);
  {
    grpc::ClientContext context;
    const auto reader = daemon.swap->FetchBlocks(&context, fetch);
    v1::FetchBlocksResponse piece;
    EXPECT_FALSE(reader->Read(&piece));
    ExpectRefused(reader->Finish(), grpc::StatusCode::NOT_FOUND, Reason::kBlockNotFound);
  }
  // Closing a changes nothing in b.
  v1::CloseSessionRequest close;
  *close.mutable_session() = a.handle;
  close.set_mode(v1::CLOSE_MODE_DELETE_DATA);
  v1::CloseSessionResponse closed;
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::CloseSession, close, &closed).ok());
  v1::GetSessionRequest get;
  *get.mutable_session() = b.handle;
  v1::GetSessionResponse got;
  ASSERT_TRUE(Invoke(*daemon.session, &SessionStub::GetSession, get, &got).ok());
  EXPECT_EQ(got.session().num_blocks(), 1);
  // A handle made of one's epoch and the other's name is none.
  get.mutable_session()->set_epoch(a.handle.epoch());
  ExpectRefused(Invoke(*daemon.session, &SessionStub::GetSession, get, &got),
                grpc::StatusCode::ABORTED, Reason::kFenced);
}

TEST(SequenceService, PutForkTruncateListRelease) {
  Daemon daemon;
  const v1::SessionHandle handle = daemon.Open("a");
  v1::PutSequenceRequest put;
  *put.mutable_session() = handle;
  put.mutable_update()->set_sequence_id(3);
  put.mutable_update()->set_generation(1);
  for (const uint32_t id : {10, 11, 12}) put.mutable_update()->add_block_ids(id);
  v1::PutSequenceResponse put_response;
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::PutSequence, put, &put_response).ok());
  EXPECT_EQ(put_response.num_blocks(), 3u);
  EXPECT_EQ(put_response.reserved_blocks(), 6);

  v1::ForkSequenceRequest fork;
  *fork.mutable_session() = handle;
  fork.set_source_sequence_id(3);
  fork.set_source_generation(1);
  fork.set_target_sequence_id(4);
  fork.set_target_generation(1);
  fork.set_context_tokens(17);
  v1::ForkSequenceResponse forked;
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::ForkSequence, fork, &forked).ok());
  EXPECT_EQ(forked.num_blocks(), 2u);

  v1::TruncateSequenceRequest truncate;
  *truncate.mutable_session() = handle;
  truncate.set_sequence_id(3);
  truncate.set_generation(2);
  truncate.set_context_tokens(16);
  v1::TruncateSequenceResponse truncated;
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::TruncateSequence, truncate, &truncated).ok());
  EXPECT_EQ(truncated.num_blocks(), 1u);

  v1::ListSequencesRequest list;
  *list.mutable_session() = handle;
  list.set_page_size(1);
  v1::ListSequencesResponse listed;
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::ListSequences, list, &listed).ok());
  ASSERT_EQ(listed.sequences_size(), 1);
  EXPECT_EQ(listed.sequences(0).sequence_id(), 3u);
  EXPECT_EQ(listed.sequences(0).generation(), 2u);
  list.set_page_token(listed.next_page_token());
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::ListSequences, list, &listed).ok());
  ASSERT_EQ(listed.sequences_size(), 1);
  EXPECT_EQ(listed.sequences(0).sequence_id(), 4u);
  EXPECT_EQ(listed.sequences(0).block_ids_size(), 2);
  EXPECT_TRUE(listed.next_page_token().empty());

  v1::ReleaseSequenceRequest release;
  *release.mutable_session() = handle;
  release.add_sequence_ids(3);
  release.add_sequence_ids(4);
  release.set_drop_blocks(true);
  v1::ReleaseSequenceResponse released;
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::ReleaseSequence, release, &released).ok());
  list.clear_page_token();
  ASSERT_TRUE(Invoke(*daemon.sequence, &Sequence::ListSequences, list, &listed).ok());
  EXPECT_EQ(listed.sequences_size(), 0);
}

TEST(AdminService, TellsWhatTheServerIsAndUses) {
  Daemon daemon;
  daemon.Open("a");
  daemon.Open("b");
  v1::GetServerResponse server;
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::GetServer, v1::GetServerRequest(), &server).ok());
  EXPECT_EQ(server.version(), kVersion);
  EXPECT_EQ(server.device().kind(), "cpu");
  EXPECT_EQ(server.limits().max_message_bytes(), 64 << 20);
  EXPECT_EQ(server.limits().max_sessions(), 256);
  ASSERT_EQ(server.memory_size(), 2);
  EXPECT_GT(server.memory(0).used_bytes(), 0);
  EXPECT_GT(server.rss_bytes(), 1 << 20);
  v1::GetUsageRequest request;
  v1::GetUsageResponse usage;
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::GetUsage, request, &usage).ok());
  ASSERT_EQ(usage.sessions_size(), 2);
  EXPECT_EQ(usage.sessions(0).name(), "a");
  request.set_session_name("b");
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::GetUsage, request, &usage).ok());
  ASSERT_EQ(usage.sessions_size(), 1);
  EXPECT_EQ(usage.sessions(0).name(), "b");
  EXPECT_GT(usage.sessions(0).items_size(), 3);
}

TEST(AdminService, SetLogLevelReturnsThePreviousOne) {
  Daemon daemon;
  v1::SetLogLevelRequest request;
  request.set_level("error");
  v1::SetLogLevelResponse response;
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::SetLogLevel, request, &response).ok());
  EXPECT_EQ(response.previous_level(), "info");
  request.set_level("info");
  ASSERT_TRUE(Invoke(*daemon.admin, &Admin::SetLogLevel, request, &response).ok());
  EXPECT_EQ(response.previous_level(), "error");
}

TEST(Health, EveryServiceServesUntilShutdown) {
  Daemon daemon;
  const auto stub = grpc::health::v1::Health::NewStub(daemon.NewChannel());
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  for (const char* name : kHealthServices) {
    grpc::ClientContext context;
    request.set_service(name);
    ASSERT_TRUE(stub->Check(&context, request, &response).ok()) << name;
    EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING) << name;
  }
  grpc::ClientContext unknown;
  request.set_service("sluice.v1.None");
  EXPECT_EQ(stub->Check(&unknown, request, &response).error_code(), grpc::StatusCode::NOT_FOUND);

  grpc::ClientContext context;
  request.set_service("sluice.v1.SwapService");
  const auto watch = stub->Watch(&context, request);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  const absl::Time start = absl::Now();
  daemon.server().Shutdown(absl::Seconds(10));
  // A watcher does not hold the shutdown up.
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
}

}  // namespace
}  // namespace sluice
