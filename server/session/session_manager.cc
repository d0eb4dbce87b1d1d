#include "server/session/session_manager.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/device/machine_memory.h"
#include "server/base/error.h"
#include "server/base/logging.h"
#include "server/base/status_macros.h"
#include "server/session/reservation.h"
#include "server/session/session_impl.h"
#include "server/session/transfer_staging.h"
#include "server/store/budget.h"
#include "server/store/memory_slot_store.h"

namespace sluice {
namespace {

constexpr absl::Duration kSweepInterval = absl::Milliseconds(100);
constexpr absl::Duration kShutdownRetry = absl::Seconds(1);
constexpr absl::Duration kClosingRetry = absl::Milliseconds(50);

constexpr int64_t kStagingBytes = int64_t{512} << 20;
constexpr unsigned kMaxStagingThreads = 4;

using CloseDone = std::function<void(absl::StatusOr<int64_t>)>;

// Open and closed sessions live here; a thread of its own ends sessions, since that waits for their
// streams.
class SessionManagerImpl final : public SessionManager {
 public:
  // `options` are without gaps; the stores have what they need of the device. `staging`: null where
  // the device reads any host memory.
  SessionManagerImpl(const SessionManagerOptions& options, const DeviceBudget& budget,
                     std::unique_ptr<MemorySlotStore> hbm_store,
                     std::unique_ptr<MemorySlotStore> host_store,
                     std::unique_ptr<TransferStaging> staging, Device* device)
      : options_(options),
        device_(device),
        budget_split_(budget),
        device_budget_(budget.session_bytes()),
        hbm_store_(std::move(hbm_store)),
        host_store_(std::move(host_store)),
        staging_(std::move(staging)),
        next_epoch_(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now()))),
        janitor_([this] { RunJanitor(); }) {}

  ~SessionManagerImpl() override {
    Shutdown();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    janitor_.join();
    // Its threads may be on their way out of OnDrained.
    staging_.reset();
  }

  absl::StatusOr<Opened> Open(const SessionSpec& spec) override;
  absl::StatusOr<std::shared_ptr<Session>> Find(const std::string& name, uint64_t epoch) override;
  std::vector<SessionInfo> List(const std::string& first_name, int64_t limit) const override;
  absl::StatusOr<SessionInfo> Describe(const std::string& name) const override;
  void Close(const std::string& name, uint64_t epoch, bool keep_data, CloseDone done) override;
  std::vector<MemoryPoolUsage> MemoryUsage() const override;
  absl::Status DeviceStatus() const override { return device_->status(); }
  const SessionManagerOptions& options() const override { return options_; }
  void Sweep() override;
  void Shutdown() override;

 private:
  struct Entry {
    std::shared_ptr<SessionImpl> session;
    int64_t reserved_bytes = 0;  // of device_budget_
    bool drained = false;        // a close was begun and nothing is in flight any more
    bool keep_data = false;
    CloseDone done;
  };

  absl::Status CheckRunning() const;
  absl::StatusOr<std::shared_ptr<SessionImpl>> FindByName(const std::string& name) const;
  absl::StatusOr<Opened> OpenNew(const SessionSpec& spec);
  void OnDrained(const std::string& name);
  void RunJanitor();
  void FinishClose(const std::string& name, Entry entry);

  const SessionManagerOptions options_;
  Device* const device_;
  const DeviceBudget budget_split_;
  Budget device_budget_;                              // what sessions reserve
  const std::unique_ptr<MemorySlotStore> hbm_store_;  // null: blocks have no HBM
  const std::unique_ptr<MemorySlotStore> host_store_;
  std::unique_ptr<TransferStaging> staging_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, Entry> sessions_;
  uint64_t next_epoch_;  // never one that a handle has seen, an earlier daemon's included
  bool shutting_down_ = false;
  bool stop_ = false;
  std::thread janitor_;
};

absl::Status SessionManagerImpl::CheckRunning() const {
  if (!shutting_down_) return CheckDevice(*device_);
  return Error(absl::StatusCode::kUnavailable, Reason::kShuttingDown, "the daemon is shutting down")
      .Retry(kShutdownRetry);
}

absl::StatusOr<SessionManager::Opened> SessionManagerImpl::Open(const SessionSpec& given) {
  SLUICE_ASSIGN_OR_RETURN(SessionSpec spec, NormalizeSpec(given));
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_RETURN_IF_ERROR(CheckRunning());
  if (spec.name.empty()) {
    spec.name = absl::StrCat("session-", absl::Hex(next_epoch_++, absl::kZeroPad12));
  }
  const auto it = sessions_.find(spec.name);
  if (it == sessions_.end()) return OpenNew(spec);
  Entry& entry = it->second;
  if (entry.done) {
    return SessionClosing(spec.name).Retry(kClosingRetry);
  }
  SLUICE_RETURN_IF_ERROR(entry.session->CheckSameSession(spec));
  entry.session->Attach(spec, next_epoch_++);
  return Opened{entry.session->Info(), true};
}

absl::StatusOr<SessionManager::Opened> SessionManagerImpl::OpenNew(const SessionSpec& spec) {
  if (std::ssize(sessions_) >= options_.max_sessions) {
    return Error(absl::StatusCode::kResourceExhausted, Reason::kTooManySessions,
                 absl::StrCat(sessions_.size(), " sessions are open; --max_sessions is ",
                              options_.max_sessions))
        .Meta("value", sessions_.size())
        .Meta("allowed", options_.max_sessions);
  }
  SessionImpl::Options options;
  options.spec = spec;
  options.reservation = ComputeReservation(spec, options_.max_message_bytes, device_->ops());
  const int64_t need_bytes = options.reservation.total_bytes();
  const int64_t free_bytes =
      UsableBytes(device_budget_.total_bytes()) - device_budget_.used_bytes();
  if (need_bytes > free_bytes || !device_budget_.TryTake(need_bytes)) {
    return DoesNotFit(spec, options.reservation, budget_split_, device_budget_.used_bytes(),
                      device_->info().total_memory_bytes, options_.max_message_bytes,
                      device_->ops());
  }
  options.epoch = next_epoch_++;
  options.max_queued_calls = options_.max_queued_calls_per_session;
  options.max_tile_runs = options_.max_tile_runs_per_session;
  options.now = options_.now;
  options.on_drained = [this, name = spec.name] { OnDrained(name); };
  auto session =
      SessionImpl::Create(std::move(options), device_,
                          BlockTable::Stores{hbm_store_.get(), host_store_.get()}, staging_.get());
  if (!session.ok()) {
    device_budget_.Give(need_bytes);
    return session.status();
  }
  Entry entry;
  entry.session = *session;
  entry.reserved_bytes = need_bytes;
  sessions_.emplace(spec.name, std::move(entry));
  return Opened{(*session)->Info(), false};
}

absl::StatusOr<std::shared_ptr<SessionImpl>> SessionManagerImpl::FindByName(
    const std::string& name) const {
  const auto it = sessions_.find(name);
  if (it != sessions_.end()) return it->second.session;
  return SessionNotFound(name);
}

absl::StatusOr<std::shared_ptr<Session>> SessionManagerImpl::Find(const std::string& name,
                                                                  uint64_t epoch) {
  std::shared_ptr<SessionImpl> session;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    SLUICE_RETURN_IF_ERROR(CheckRunning());
    SLUICE_ASSIGN_OR_RETURN(session, FindByName(name));
  }
  SLUICE_RETURN_IF_ERROR(session->CheckHandle(epoch));
  return session;
}

std::vector<SessionInfo> SessionManagerImpl::List(const std::string& first_name,
                                                  int64_t limit) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SessionInfo> result;
  for (auto it = sessions_.lower_bound(first_name);
       it != sessions_.end() && std::ssize(result) < limit; ++it) {
    result.push_back(it->second.session->Info());
  }
  return result;
}

absl::StatusOr<SessionInfo> SessionManagerImpl::Describe(const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<SessionImpl> session, FindByName(name));
  return session->Info();
}

void SessionManagerImpl::Close(const std::string& name, uint64_t epoch, bool keep_data,
                               CloseDone done) {
  const auto close = [&]() -> absl::Status {
    std::shared_ptr<SessionImpl> session;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      SLUICE_ASSIGN_OR_RETURN(session, FindByName(name));
      SLUICE_RETURN_IF_ERROR(session->CheckHandle(epoch));
      Entry& entry = sessions_.find(name)->second;
      if (entry.done) {
        return SessionClosing(name);
      }
      entry.keep_data = keep_data;
      entry.done = done;
    }
    // Ends in OnDrained, perhaps in here; so without the lock.
    return session->BeginClose();
  };
  if (absl::Status status = close(); !status.ok()) done(std::move(status));
}

void SessionManagerImpl::OnDrained(const std::string& name) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(name);
    if (it != sessions_.end()) it->second.drained = true;
  }
  wake_.notify_all();
}

// Ends a session that nothing runs in any more; without the lock, since streams are waited for.
void SessionManagerImpl::FinishClose(const std::string& name, Entry entry) {
  const bool keep = entry.keep_data && entry.session->spec().retention > absl::ZeroDuration();
  int64_t freed_bytes = 0;
  if (keep) {
    entry.session->EndCloseKeeping();
  } else {
    freed_bytes = entry.session->Teardown();
    device_budget_.Give(entry.reserved_bytes);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(name);
    if (keep) {
      it->second.done = nullptr;
      it->second.drained = false;
    } else {
      sessions_.erase(it);
    }
  }
  wake_.notify_all();
  entry.done(freed_bytes);
}

void SessionManagerImpl::RunJanitor() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto drained = std::find_if(sessions_.begin(), sessions_.end(),
                                      [](const auto& item) { return item.second.drained; });
    if (drained != sessions_.end()) {
      const std::string name = drained->first;
      Entry entry = drained->second;
      drained->second.drained = false;
      lock.unlock();
      FinishClose(name, std::move(entry));
      lock.lock();
      continue;
    }
    if (stop_ && sessions_.empty()) return;
    wake_.wait_for(lock, absl::ToChronoMilliseconds(kSweepInterval));
    lock.unlock();
    Sweep();
    lock.lock();
  }
}

void SessionManagerImpl::Sweep() {
  const absl::Time now = options_.now();
  std::vector<std::shared_ptr<SessionImpl>> over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [name, entry] : sessions_) {
      if (entry.done || !(entry.session->Expire(now) || stop_)) continue;
      entry.keep_data = false;
      entry.done = [](const absl::StatusOr<int64_t>&) {};
      over.push_back(entry.session);
    }
  }
  // Fails only where the session is closing already.
  for (const auto& session : over) session->BeginClose().IgnoreError();
}

std::vector<MemoryPoolUsage> SessionManagerImpl::MemoryUsage() const {
  std::vector<MemoryPoolUsage> usage = {
      {"hbm", device_budget_.total_bytes(), device_budget_.used_bytes()},
      {"host", host_store_->budget_bytes(), host_store_->used_bytes()}};
  if (hbm_store_ != nullptr) {
    usage.push_back({"blocks.hbm", hbm_store_->budget_bytes(), hbm_store_->used_bytes()});
  }
  return usage;
}

void SessionManagerImpl::Shutdown() {
  std::vector<std::shared_ptr<SessionImpl>> sessions;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    shutting_down_ = true;
    for (const auto& [name, entry] : sessions_) sessions.push_back(entry.session);
  }
  for (const auto& session : sessions) session->WaitUntilIdle();
}

}  // namespace

namespace {

// Fills in what was left to be chosen.
absl::StatusOr<DeviceBudget> ChooseBudgets(const DeviceInfo& device,
                                           SessionManagerOptions* options) {
  if (options->hbm_budget_bytes == 0) {
    options->hbm_budget_bytes =
        device.has_hbm ? device.free_memory_bytes / 10 * 9 : device.total_memory_bytes / 4;
  }
  if (options->transfer_staging_bytes == 0) {
    options->transfer_staging_bytes = std::max(kStagingBytes, 2 * options->max_message_bytes);
  }
  const int64_t machine_bytes = MachineMemoryBytes();
  if (options->host_budget_bytes == 0) options->host_budget_bytes = machine_bytes / 2;
  if (options->transfer_staging_threads == 0) {
    options->transfer_staging_threads = static_cast<int>(
        std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, kMaxStagingThreads));
  }
  if (!options->now) options->now = [] { return absl::Now(); };
  const auto positive = [](absl::string_view flag, int64_t value) -> absl::Status {
    if (value > 0) return absl::OkStatus();
    return InvalidField(flag, value, "1 or more");
  };
  SLUICE_RETURN_IF_ERROR(positive("hbm_budget_bytes", options->hbm_budget_bytes));
  SLUICE_RETURN_IF_ERROR(positive("host_budget_bytes", options->host_budget_bytes));
  SLUICE_RETURN_IF_ERROR(positive("max_sessions", options->max_sessions));
  SLUICE_RETURN_IF_ERROR(
      positive("max_queued_calls_per_session", options->max_queued_calls_per_session));
  SLUICE_RETURN_IF_ERROR(positive("max_tile_runs_per_session", options->max_tile_runs_per_session));
  SLUICE_RETURN_IF_ERROR(positive("max_message_bytes", options->max_message_bytes));
  SLUICE_RETURN_IF_ERROR(positive("transfer_staging_threads", options->transfer_staging_threads));
  if (options->transfer_staging_bytes < options->max_message_bytes) {
    return InvalidField(
        "transfer_staging_bytes", options->transfer_staging_bytes,
        absl::StrCat("max_message_bytes (", options->max_message_bytes, ") or more"));
  }
  // With a GPU all of it is taken at start: a machine that has not that much would end the process.
  const int64_t pinned_bytes = options->host_budget_bytes + options->transfer_staging_bytes;
  if (device.has_hbm && pinned_bytes > machine_bytes) {
    return InvalidField(
        "host_budget_bytes", options->host_budget_bytes,
        absl::StrCat("with transfer_staging_bytes (", options->transfer_staging_bytes,
                     ") at most what the machine or the control group has, ", machine_bytes));
  }
  DeviceBudget budget;
  budget.total_bytes = options->hbm_budget_bytes;
  budget.block_share_chosen = device.has_hbm && options->hbm_block_budget_bytes < 0;
  if (options->hbm_block_budget_bytes < 0) {
    options->hbm_block_budget_bytes =
        device.has_hbm ? budget.total_bytes - budget.total_bytes / DeviceBudget::kBlockShareDivisor
                       : 0;
  }
  budget.block_bytes = options->hbm_block_budget_bytes;
  if (budget.session_bytes() <= 0) {
    return InvalidField("hbm_block_budget_bytes", budget.block_bytes,
                        absl::StrCat("less than hbm_budget_bytes (", budget.total_bytes, ")"));
  }
  return budget;
}

// Takes memory at start, and logs how long that took.
absl::Status TakeAtStart(absl::string_view what, MemoryKind kind, int64_t bytes,
                         const std::function<absl::Status()>& take) {
  const absl::Time start = absl::Now();
  if (absl::Status status = take(); !status.ok()) {
    return Error(absl::StatusCode::kResourceExhausted,
                 kind == MemoryKind::kDevice ? Reason::kDeviceMemory : Reason::kHostMemory,
                 absl::StrCat("the machine has not the ", bytes, " bytes of ", what,
                              " that it is to hold: ", status.message()));
  }
  LogInfo(
      "memory taken",
      {{"what", what}, {"bytes", bytes}, {"ms", absl::ToInt64Milliseconds(absl::Now() - start)}});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SessionManager>> SessionManager::Create(
    const SessionManagerOptions& given, Device* device) {
  SessionManagerOptions options = given;
  SLUICE_ASSIGN_OR_RETURN(const DeviceBudget budget, ChooseBudgets(device->info(), &options));
  std::unique_ptr<MemorySlotStore> hbm_store;
  if (budget.block_bytes > 0) {
    // One slab: an address in it is in HBM.
    hbm_store =
        std::make_unique<MemorySlotStore>(MemorySlotStoreOptions{.budget_bytes = budget.block_bytes,
                                                                 .kind = MemoryKind::kDevice,
                                                                 .slab_bytes = budget.block_bytes},
                                          device);
  }
  auto host_store = std::make_unique<MemorySlotStore>(
      MemorySlotStoreOptions{.budget_bytes = options.host_budget_bytes}, device);
  // Blocks first: what of their part is no whole GiB is made of the granules that are then taken
  // for sessions.
  if (hbm_store != nullptr) {
    SLUICE_RETURN_IF_ERROR(TakeAtStart("HBM for blocks", MemoryKind::kDevice, budget.block_bytes,
                                       [&] { return hbm_store->TakeAll(); }));
  }
  if (device->info().has_hbm) {
    SLUICE_RETURN_IF_ERROR(
        TakeAtStart("HBM for sessions", MemoryKind::kDevice, budget.session_bytes(),
                    [&] { return device->TakeDeviceMemory(budget.session_bytes()); }));
    SLUICE_RETURN_IF_ERROR(TakeAtStart("pinned host memory for blocks", MemoryKind::kHost,
                                       options.host_budget_bytes,
                                       [&] { return host_store->TakeAll(); }));
  }
  std::unique_ptr<TransferStaging> staging;
  if (!device->info().reads_any_host_memory) {
    SLUICE_RETURN_IF_ERROR(TakeAtStart(
        "pinned host memory for transfers", MemoryKind::kHost, options.transfer_staging_bytes, [&] {
          auto created = TransferStaging::Create({.capacity_bytes = options.transfer_staging_bytes,
                                                  .num_threads = options.transfer_staging_threads},
                                                 device);
          if (created.ok()) staging = *std::move(created);
          return created.status();
        }));
  }
  return std::make_unique<SessionManagerImpl>(options, budget, std::move(hbm_store),
                                              std::move(host_store), std::move(staging), device);
}

}  // namespace sluice
