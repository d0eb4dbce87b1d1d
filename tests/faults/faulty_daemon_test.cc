// The whole daemon with a device that fails while a client decodes: what the client is told, what
// health says, the log, the exit code.
//
// On the CPU the failure is played. On a machine with a GPU, SLUICE_FAULT_DEVICE=cuda makes it a
// real one, and SLUICE_FAULTY_DAEMON says where the program is.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/rpc/daemon.h"
#include "tests/rpc/model.h"

namespace sluice {
namespace {

constexpr int kExitCode = 70;
constexpr int kTokens = 20;
constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kEndTimeout = absl::Seconds(20);

std::string Environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

class FaultyDaemon : public ::testing::Test {
 protected:
  void SetUp() override {
    on_gpu_ = Environment("SLUICE_FAULT_DEVICE", "") == "cuda";
    if (on_gpu_ && access("/dev/nvidiactl", F_OK) != 0) GTEST_SKIP() << "there is no GPU here";
    Start();
    channel_ =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port_), grpc::InsecureChannelCredentials());
    session_ = v1::SessionService::NewStub(channel_);
    attention_ = v1::AttentionService::NewStub(channel_);
    sequence_ = v1::SequenceService::NewStub(channel_);
    admin_ = v1::AdminService::NewStub(channel_);
  }
  void TearDown() override {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  void Start() {
    const std::string program = Environment("SLUICE_FAULTY_DAEMON", "tests/faults/faulty_sluiced");
    const std::string port_file = absl::StrCat(::testing::TempDir(), "/faulty_port");
    log_ = absl::StrCat(::testing::TempDir(), "/faulty_log");
    unlink(port_file.c_str());
    std::vector<std::string> words = {program,           "--listen_address=127.0.0.1:0",
                                      "--unix_socket=",  absl::StrCat("--port_file=", port_file),
                                      "--num_threads=2", "--host_budget_bytes=268435456"};
    words.push_back(on_gpu_ ? "--device=cuda" : "--device=cpu");
    if (on_gpu_) words.push_back("--hbm_budget_bytes=4294967296");
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int fd = open(log_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
      dup2(fd, 1);
      dup2(fd, 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
    const absl::Time deadline = absl::Now() + kStartTimeout;
    while (!(std::ifstream(port_file) >> port_)) {
      ASSERT_EQ(waitpid(pid_, nullptr, WNOHANG), 0) << Log();
      ASSERT_LT(absl::Now(), deadline) << Log();
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  std::string Log() const {
    std::ifstream file(log_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The exit code; -1 where a signal ended it, -2 where it goes on.
  int Wait() {
    const absl::Time deadline = absl::Now() + kEndTimeout;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (absl::Now() > deadline) return -2;
      absl::SleepFor(absl::Milliseconds(10));
    }
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  v1::SessionHandle Open(const std::string& name, grpc::Status* status) {
    v1::OpenSessionRequest request;
    *request.mutable_spec() = SmallSpec(name);
    v1::OpenSessionResponse response;
    *status = Invoke(*session_, &v1::SessionService::Stub::OpenSession, request, &response);
    return response.session().handle();
  }
  bool SaysNotServing(const std::string& service) {
    const auto health = grpc::health::v1::Health::NewStub(channel_);
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    return health->Check(&context, request, &response).ok() &&
           response.status() == grpc::health::v1::HealthCheckResponse::NOT_SERVING;
  }

  bool on_gpu_ = false;
  int port_ = 0;
  pid_t pid_ = 0;
  std::string log_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::SessionService::Stub> session_;
  std::unique_ptr<v1::AttentionService::Stub> attention_;
  std::unique_ptr<v1::SequenceService::Stub> sequence_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

TEST_F(FaultyDaemon, TellsItsClientsAndExitsWith70) {
  grpc::Status status;
  Model model(SmallSpec("a"), Open("a", &status));
  ASSERT_TRUE(status.ok()) << status.error_message();
  v1::PutSequenceRequest put;
  *put.mutable_session() = model.handle;
  put.mutable_update()->set_generation(1);
  for (const uint32_t id : {1, 2}) put.mutable_update()->add_block_ids(id);
  v1::PutSequenceResponse done;
  status = Invoke(*sequence_, &v1::SequenceService::Stub::PutSequence, put, &done);
  ASSERT_TRUE(status.ok()) << status.error_message();
  for (int token = 0; token < kTokens; ++token) {
    const v1::DecodeStepRequest step = model.Step(0, {{0, token + 1}}, true);
    v1::DecodeStepResponse response;
    status = Invoke(*attention_, &v1::AttentionService::Stub::DecodeStep, step, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    model.Keep(step, 0, 0, 1 + token / 16, token % 16);
  }

  // A client that decodes without a pause; every answer before the failure is right.
  std::atomic<int> num_steps{0};
  grpc::Status first_error;
  std::thread client([&] {
    while (first_error.ok()) {
      const v1::DecodeStepRequest step = model.Step(0, {{0, kTokens}});
      v1::DecodeStepResponse response;
      first_error = Invoke(*attention_, &v1::AttentionService::Stub::DecodeStep, step, &response);
      if (!first_error.ok()) break;
      ExpectClose(Numbers(response.out()),
                  model.Attend(step.q(), 0, 0, {1, 2}, kTokens, {}, nullptr));
      ++num_steps;
    }
  });
  ASSERT_TRUE(Eventually([&] { return num_steps > 20; }));
  const absl::Time start = absl::Now();
  kill(pid_, SIGUSR1);
  client.join();
  const absl::Duration told = absl::Now() - start;
  ExpectRefused(first_error, grpc::StatusCode::UNAVAILABLE, Reason::kDeviceFailed);
  EXPECT_FALSE(HasRetryInfo(DetailsOf(first_error)));
  for (const char* name :
       {"", "sluice.v1.SessionService", "sluice.v1.SequenceService", "sluice.v1.SwapService",
        "sluice.v1.AttentionService", "sluice.v1.AdminService"}) {
    EXPECT_TRUE(Eventually([&] { return SaysNotServing(name); })) << name;
  }
  Open("b", &status);
  ExpectRefused(status, grpc::StatusCode::UNAVAILABLE, Reason::kDeviceFailed);
  v1::GetServerResponse server;
  EXPECT_TRUE(
      Invoke(*admin_, &v1::AdminService::Stub::GetServer, v1::GetServerRequest(), &server).ok());
  EXPECT_EQ(server.device().kind(), on_gpu_ ? "cuda" : "cpu");
  const std::string site = on_gpu_ ? "kernels/cuda/" : "tests/faults/plant_faults.cc";
  EXPECT_NE(server.device().failure().find(site), std::string::npos) << server.device().failure();

  EXPECT_EQ(Wait(), kExitCode) << Log();
  const absl::Duration ended = absl::Now() - start;
  EXPECT_GT(ended, absl::Seconds(1)) << "replies need a moment";
  const std::string log = Log();
  EXPECT_NE(log.find("the device failed"), std::string::npos) << log;
  EXPECT_NE(log.find(site), std::string::npos) << log;
  if (on_gpu_) {
    EXPECT_NE(log.find("cudaErrorIllegalAddress"), std::string::npos) << log;
  }
  printf("told after %s, ended after %s: %s\n", absl::FormatDuration(told).c_str(),
         absl::FormatDuration(ended).c_str(), first_error.error_message().c_str());
}

// Nobody calls, and it is found out all the same.
TEST_F(FaultyDaemon, AnIdleOneFindsOutByItself) {
  grpc::Status status;
  Open("a", &status);
  ASSERT_TRUE(status.ok()) << status.error_message();
  kill(pid_, SIGUSR1);
  EXPECT_TRUE(Eventually([&] { return SaysNotServing(""); })) << Log();
  Open("b", &status);
  ExpectRefused(status, grpc::StatusCode::UNAVAILABLE, Reason::kDeviceFailed);
  EXPECT_EQ(Wait(), kExitCode) << Log();
}

}  // namespace
}  // namespace sluice
