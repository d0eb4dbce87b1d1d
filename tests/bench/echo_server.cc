// What gRPC alone costs: a server that knows no message. It answers with the bytes that it got, or
// throws them away, unparsed; of the daemon's kind otherwise (one process, the callback API, the
// same listening flags).
//
//   /bench.Echo/Unary, /bench.Echo/Stream   the request's bytes come back
//   any other method                        a sink: an empty message for each that comes
//
// Threads: gRPC's own. Ownership: a call deletes itself when gRPC is through with it.

#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/grpcpp.h"

namespace sluice {
namespace {

class UnaryEcho final : public grpc::ServerGenericBidiReactor {
 public:
  UnaryEcho() { StartRead(&bytes_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status(grpc::StatusCode::INTERNAL, "no request"));
    StartWriteAndFinish(&bytes_, {}, grpc::Status::OK);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer bytes_;
};

class StreamEcho final : public grpc::ServerGenericBidiReactor {
 public:
  StreamEcho() { StartRead(&bytes_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartWrite(&bytes_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) StartRead(&bytes_);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer bytes_;
};

// Reads on while acks are being written, as fast as gRPC gives it messages.
class Sink final : public grpc::ServerGenericBidiReactor {
 public:
  Sink() { StartRead(&bytes_); }
  void OnReadDone(bool ok) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // Before the next read, which may end, and with it the call, while this reaction still runs.
      if (ok) {
        ++acks_due_;
      } else {
        no_more_ = true;
      }
    }
    if (ok) {
      bytes_.Clear();
      StartRead(&bytes_);
    }
    Proceed();
  }
  void OnWriteDone(bool) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      writing_ = false;
      --acks_due_;
    }
    Proceed();
  }
  void OnDone() override { delete this; }

 private:
  void Proceed() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (writing_ || finished_) return;
    if (acks_due_ > 0) {
      writing_ = true;
      lock.unlock();
      StartWrite(&ack_);
    } else if (no_more_) {
      finished_ = true;
      lock.unlock();
      Finish(grpc::Status::OK);
    }
  }

  grpc::ByteBuffer bytes_;
  // Holds a slice, though an empty one: a buffer without any is no message.
  const grpc::Slice empty_{""};
  grpc::ByteBuffer ack_{&empty_, 1};
  std::mutex mutex_;
  int64_t acks_due_ = 0;
  bool writing_ = false;
  bool no_more_ = false;
  bool finished_ = false;
};

class Service final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    if (context->method() == "/bench.Echo/Unary") return new UnaryEcho();
    if (context->method() == "/bench.Echo/Stream") return new StreamEcho();
    return new Sink();
  }
};

int Main(int argc, char** argv) {
  std::string listen_address = "127.0.0.1:0";
  std::string port_file;
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (absl::ConsumePrefix(&flag, "--listen_address=")) listen_address = std::string(flag);
    if (absl::ConsumePrefix(&flag, "--port_file=")) port_file = std::string(flag);
  }
  // The threads that gRPC starts inherit this: the signal is for sigwait alone.
  sigset_t end_signals;
  sigemptyset(&end_signals);
  sigaddset(&end_signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &end_signals, nullptr);
  Service service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen_address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  std::ofstream(port_file + ".new") << port << "\n";
  std::rename((port_file + ".new").c_str(), port_file.c_str());
  int signal = 0;
  sigwait(&end_signals, &signal);
  server->Shutdown(std::chrono::system_clock::now());
  return 0;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
