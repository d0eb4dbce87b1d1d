#include "tests/rpc/daemon.h"

#include <cstdlib>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace sluice {
namespace {

std::mutex met_mutex;
std::set<std::string>& Met() {
  static auto* const met = new std::set<std::string>;
  return *met;
}

template <typename Detail>
bool FindDetail(const google::rpc::Status& status, Detail* detail) {
  for (const google::protobuf::Any& any : status.details()) {
    if (any.UnpackTo(detail)) return true;
  }
  return false;
}

}  // namespace

v1::SessionSpec SmallSpec(const std::string& name) {
  v1::SessionSpec spec;
  spec.set_name(name);
  spec.set_num_layers(2);
  spec.set_num_query_heads(4);
  spec.set_num_kv_heads(2);
  spec.set_head_dim(32);
  spec.set_block_tokens(16);
  spec.set_rank(16);
  spec.set_projection_seed(7);
  spec.set_max_blocks(64);
  spec.set_max_sequences(8);
  spec.set_tile_blocks(8);
  spec.mutable_retention()->set_seconds(3600);
  return spec;
}

Daemon::Daemon(DaemonOptions options) {
  device_ = std::make_unique<TestDevice>(options.num_threads,
                                         std::getenv("SLUICE_TEST_STRICT_DEVICE") != nullptr);
  manager_ = *SessionManager::Create(options.sessions, device_.get());
  options.rpc.device.kind = device_->info().kind;
  auto server = RpcServer::Start(options.rpc, manager_.get());
  if (!server.ok()) {
    ADD_FAILURE() << server.status();
    abort();
  }
  server_ = *std::move(server);
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  session = v1::SessionService::NewStub(channel);
  sequence = v1::SequenceService::NewStub(channel);
  swap = v1::SwapService::NewStub(channel);
  attention = v1::AttentionService::NewStub(channel);
  admin = v1::AdminService::NewStub(channel);
}

Daemon::~Daemon() { server_->Shutdown(absl::Seconds(5)); }

std::shared_ptr<grpc::Channel> Daemon::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                   grpc::InsecureChannelCredentials(), arguments);
}

v1::SessionHandle Daemon::Open(const v1::SessionSpec& spec) {
  v1::OpenSessionRequest request;
  *request.mutable_spec() = spec;
  v1::OpenSessionResponse response;
  const grpc::Status status =
      Invoke(*session, &v1::SessionService::Stub::OpenSession, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.session().handle();
}

DeviceStall::DeviceStall(Device& device) {
  const int num_workers = device.info().num_workers;
  for (int i = 0; i < num_workers; ++i) {
    holders_.push_back(std::make_unique<Holder>(this));
    streams_.push_back(device.CreateStream(StreamPriority::kAttention));
    streams_.back()->Enqueue(holders_.back().get());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return num_held_ == num_workers; });
}

void DeviceStall::Holder::Run() {
  std::unique_lock<std::mutex> lock(stall->mutex_);
  ++stall->num_held_;
  stall->changed_.notify_all();
  stall->changed_.wait(lock, [this] { return stall->released_; });
}

void DeviceStall::Release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
  }
  changed_.notify_all();
  for (const auto& stream : streams_) stream->Synchronize();
}

google::rpc::Status DetailsOf(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

std::string Metadata(const google::rpc::Status& status, const std::string& key) {
  google::rpc::ErrorInfo info;
  if (!FindDetail(status, &info)) return "";
  const auto it = info.metadata().find(key);
  return it == info.metadata().end() ? "" : it->second;
}

bool HasRetryInfo(const google::rpc::Status& status) {
  google::rpc::RetryInfo info;
  return FindDetail(status, &info);
}

void ExpectRefused(const google::rpc::Status& status, grpc::StatusCode code, Reason reason,
                   const std::string& field) {
  EXPECT_EQ(status.code(), static_cast<int>(code)) << status.ShortDebugString();
  EXPECT_FALSE(status.message().empty());
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(FindDetail(status, &info)) << status.ShortDebugString();
  EXPECT_EQ(info.domain(), "sluice");
  EXPECT_EQ(info.reason(), std::string(ReasonName(reason))) << status.message();
  if (info.reason() == ReasonName(reason)) {
    const std::lock_guard<std::mutex> lock(met_mutex);
    Met().insert(info.reason());
  }
  if (code == grpc::StatusCode::NOT_FOUND) {
    google::rpc::ResourceInfo resource;
    EXPECT_TRUE(FindDetail(status, &resource)) << status.ShortDebugString();
    EXPECT_FALSE(resource.resource_type().empty());
    EXPECT_FALSE(resource.resource_name().empty());
  }
  if (reason == Reason::kInvalidField) {
    EXPECT_FALSE(info.metadata().at("value").empty());
    EXPECT_FALSE(info.metadata().at("allowed").empty());
    google::rpc::BadRequest bad_request;
    ASSERT_TRUE(FindDetail(status, &bad_request));
    EXPECT_EQ(bad_request.field_violations(0).field(), info.metadata().at("field"));
  }
  if (!field.empty()) {
    EXPECT_EQ(Metadata(status, "field"), field) << status.message();
  }
}

void ExpectRefused(const grpc::Status& status, grpc::StatusCode code, Reason reason,
                   const std::string& field) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  const google::rpc::Status details = DetailsOf(status);
  EXPECT_EQ(details.message(), status.error_message());
  ExpectRefused(details, code, reason, field);
}

std::vector<std::string> ReasonsMet() {
  const std::lock_guard<std::mutex> lock(met_mutex);
  return {Met().begin(), Met().end()};
}

}  // namespace sluice
