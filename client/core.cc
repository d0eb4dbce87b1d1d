#include "client/core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/status.h"
#include "google/rpc/status.pb.h"

namespace sluice::client {
namespace {

// A pause of no length would make a busy loop of the retries.
constexpr absl::Duration kMinRetryDelay = absl::Milliseconds(1);

absl::Duration RetryDelay(absl::Duration asked, int attempt, absl::Duration longest) {
  const absl::Duration doubled = std::max(asked, kMinRetryDelay) * (1 << std::min(attempt - 1, 16));
  return std::min(doubled, longest);
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status rpc_status;
  if (!status.error_details().empty() && rpc_status.ParseFromString(status.error_details())) {
    absl::Status result = FromRpcStatus(rpc_status);
    // The header is what counts: a proxy may have put a code of its own there.
    if (static_cast<int>(result.code()) == static_cast<int>(status.error_code())) return result;
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void SetDeadline(absl::Duration timeout, grpc::ClientContext* context) {
  if (timeout == absl::ZeroDuration() || timeout == absl::InfiniteDuration()) return;
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

absl::StatusOr<std::shared_ptr<Core>> Core::Create(const ClientOptions& options) {
  if (options.address.empty()) {
    return absl::InvalidArgumentError("address is empty; allowed: HOST:PORT or unix:PATH");
  }
  if (options.max_attempts < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_attempts is ", options.max_attempts, "; allowed: 1 and more"));
  }
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeout is ", absl::FormatDuration(options.timeout), "; allowed: more than nothing"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(
      std::min<int64_t>(options.max_message_bytes, std::numeric_limits<int>::max())));
  arguments.SetMaxSendMessageSize(-1);
  // A daemon is on this machine or in its cluster: a proxy from the environment is meant for
  // others.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Clients of one process would share a connection otherwise, and a bulk stream of one would hold
  // up the other.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Reconnecting waits for seconds by default, and longer each time; a daemon that restarts is back
  // sooner.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  auto channel =
      grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), arguments);
  return std::shared_ptr<Core>(new Core(options, std::move(channel)));
}

Core::Core(const ClientOptions& options, std::shared_ptr<grpc::Channel> channel)
    : options(options),
      channel(std::move(channel)),
      admin(v1::AdminService::NewStub(this->channel)),
      attention(v1::AttentionService::NewStub(this->channel)),
      sequences(v1::SequenceService::NewStub(this->channel)),
      sessions(v1::SessionService::NewStub(this->channel)),
      swap(v1::SwapService::NewStub(this->channel)),
      health(grpc::health::v1::Health::NewStub(this->channel)) {}

absl::Status Core::Run(const CallOptions& call_options, Repeat repeat,
                       absl::FunctionRef<grpc::Status(grpc::ClientContext*)> attempt) const {
  const absl::Duration timeout =
      call_options.timeout == absl::ZeroDuration() ? options.timeout : call_options.timeout;
  const bool may_repeat = repeat == Repeat::kSafe && call_options.retry;
  const int attempts = may_repeat ? options.max_attempts : 1;
  const absl::Time deadline = absl::Now() + timeout;
  for (int number = 1;; ++number) {
    grpc::ClientContext context;
    if (deadline != absl::InfiniteFuture()) context.set_deadline(absl::ToChronoTime(deadline));
    absl::Status status = FromGrpcStatus(attempt(&context));
    if (status.ok() || number == attempts) return status;
    const std::optional<absl::Duration> asked = RetryDelayOf(status);
    if (!asked.has_value()) return status;
    const absl::Duration delay = RetryDelay(*asked, number, options.max_retry_delay);
    // The error says more than the deadline that a further attempt would run into.
    if (absl::Now() + delay >= deadline) return status;
    absl::SleepFor(delay);
  }
}

}  // namespace sluice::client
