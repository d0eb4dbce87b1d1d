#include "tests/bench/raw_rpc.h"

#include <cstdio>
#include <cstdlib>

#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/client_unary_call.h"
#include "grpcpp/impl/rpc_method.h"
#include "grpcpp/support/sync_stream.h"

namespace sluice {
namespace {

// As the stubs of the client library call, with other message types.
using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
using StreamFactory = grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>;

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "echo failed: %s\n", why.c_str());
  std::abort();
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

struct RawEcho::Impl {
  explicit Impl(const std::string& address)
      : channel(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        unary("/bench.Echo/Unary", grpc::internal::RpcMethod::NORMAL_RPC, channel),
        bidi("/bench.Echo/Stream", grpc::internal::RpcMethod::BIDI_STREAMING, channel) {}

  std::shared_ptr<grpc::Channel> channel;
  grpc::internal::RpcMethod unary;
  grpc::internal::RpcMethod bidi;
  grpc::ClientContext context;
  std::unique_ptr<::sluice::Stream> stream;
};

RawEcho::RawEcho(const std::string& address) : impl_(std::make_unique<Impl>(address)) {}

RawEcho::~RawEcho() {
  if (impl_->stream == nullptr) return;
  impl_->stream->WritesDone();
  impl_->stream->Finish();
}

void RawEcho::Unary(const std::string& bytes) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  grpc::ByteBuffer reply;
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      impl_->channel.get(), impl_->unary, &context, ToBuffer(bytes), &reply);
  if (!status.ok()) Die(status.error_message());
  if (reply.Length() != bytes.size()) Die("bytes are missing");
}

void RawEcho::Stream(const std::string& bytes) {
  if (impl_->stream == nullptr) {
    impl_->stream.reset(StreamFactory::Create(impl_->channel.get(), impl_->bidi, &impl_->context));
  }
  grpc::ByteBuffer reply;
  if (!impl_->stream->Write(ToBuffer(bytes)) || !impl_->stream->Read(&reply)) Die("stream ended");
  if (reply.Length() != bytes.size()) Die("bytes are missing");
}

}  // namespace sluice
