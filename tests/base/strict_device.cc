#include "tests/base/strict_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/ops/ops.h"

namespace sluice {
namespace {

// The buffers of all strict devices, since a Buffer gives itself back through a plain function.
class Memory {
 public:
  static Memory& Get() {
    static auto* const memory = new Memory;
    return *memory;
  }

  absl::StatusOr<Buffer> Reserve(Device& inner, MemoryKind kind, int64_t bytes) {
    absl::StatusOr<Buffer> buffer = inner.Reserve(kind, bytes);
    if (!buffer.ok()) return buffer;
    Region region;
    std::byte* address = buffer->data();
    if (kind == MemoryKind::kDevice) {
      void* nothing = mmap(nullptr, buffer->bytes(), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (nothing == MAP_FAILED) return absl::ResourceExhaustedError("no address space");
      address = static_cast<std::byte*>(nothing);
      region.unmapped = true;
    }
    region.inner = *std::move(buffer);
    const int64_t given_bytes = region.inner.bytes();
    const std::lock_guard<std::mutex> lock(mutex_);
    regions_[address] = std::move(region);
    return Buffer(address, given_bytes, &Release);
  }

  absl::Status Commit(Device& inner, const Buffer& buffer, int64_t offset_bytes, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Region& region = regions_.at(buffer.data());
    absl::Status status = inner.Commit(region.inner, offset_bytes, bytes);
    if (!status.ok()) return status;
    if (!region.committed.empty() && region.committed.back().second == offset_bytes) {
      region.committed.back().second += bytes;
    } else {
      region.committed.emplace_back(offset_bytes, offset_bytes + bytes);
      std::sort(region.committed.begin(), region.committed.end());
    }
    return absl::OkStatus();
  }

  // Where the bytes really are.
  std::byte* Find(const char* op, const char* what, const void* address, int64_t bytes) {
    const auto* begin = static_cast<const std::byte*>(address);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto it = regions_.upper_bound(const_cast<std::byte*>(begin));
    const char* fault = "is no memory of the device";
    if (it != regions_.begin()) {
      --it;
      const int64_t offset_bytes = begin - it->first;
      Region& region = it->second;
      if (offset_bytes + bytes <= region.inner.bytes()) {
        if (IsCommitted(region, offset_bytes, offset_bytes + bytes)) {
          return region.inner.data() + offset_bytes;
        }
        fault = "is not committed";
      }
    }
    std::fprintf(stderr, "%s: %s at %p, %lld bytes, %s\n", op, what, address,
                 static_cast<long long>(bytes), fault);
    std::abort();
  }

 private:
  struct Region {
    Buffer inner;
    bool unmapped = false;                               // its address is not the inner one's
    std::vector<std::pair<int64_t, int64_t>> committed;  // begin, end
  };

  static bool IsCommitted(const Region& region, int64_t begin, int64_t end) {
    for (const auto& [from, to] : region.committed) {
      if (from > begin) break;
      begin = std::max(begin, to);
    }
    return begin >= end;
  }

  static void Release(std::byte* data, int64_t bytes) {
    Memory& memory = Get();
    const std::lock_guard<std::mutex> lock(memory.mutex_);
    const auto it = memory.regions_.find(data);
    if (it->second.unmapped) munmap(data, bytes);
    memory.regions_.erase(it);
  }

  std::mutex mutex_;
  std::map<std::byte*, Region> regions_;
};

// The arrays of one operation, with the addresses that the inner device is to use.
struct Arrays {
  std::vector<TokenCopy> token_copies;
  std::vector<ByteCopy> byte_copies;
  std::vector<ProjectBlock> project_blocks;
  std::vector<ScoreBlock> score_blocks;
  std::vector<AttendSequence> sequences;
  std::vector<const std::byte*> addresses;
  std::vector<RunningState> parts;
};

// Replaces an address by the inner one; null stays null where it is allowed.
class Address {
 public:
  explicit Address(const char* op) : op_(op) {}

  template <typename T>
  void Needed(const char* what, T** address, int64_t bytes) const {
    if (bytes == 0) return;
    *address = reinterpret_cast<T*>(
        const_cast<std::byte*>(Memory::Get().Find(op_, what, *address, bytes)));
  }
  template <typename T>
  void Optional(const char* what, T** address, int64_t bytes) const {
    if (*address != nullptr) Needed(what, address, bytes);
  }
  void State(RunningState* state, int64_t rows, int64_t heads, int64_t head_dim) const {
    Needed("state.m", &state->m, rows * heads * 4);
    Needed("state.l", &state->l, rows * heads * 4);
    Needed("state.o", &state->o, rows * heads * head_dim * 4);
  }

 private:
  const char* const op_;
};

int64_t RowBytes(const KvLayout& layout) { return layout.head_dim * DTypeBytes(layout.dtype); }
// From the first byte of the first token to the last of the last one, V included.
int64_t BlockBytes(const KvLayout& layout, int64_t tokens) {
  return layout.v_offset_bytes + (tokens - 1) * layout.token_stride_bytes +
         (layout.num_kv_heads - 1) * layout.kv_head_stride_bytes + RowBytes(layout);
}

class StrictOps final : public Ops {
 public:
  explicit StrictOps(Ops& inner) : inner_(inner) {}

  StreamPosition StoreTokens(const TokenCopyParams& params, Stream& stream) override {
    auto arrays = std::make_unique<Arrays>();
    const TokenCopyParams inner = CopiesOf("StoreTokens", params, true, arrays.get());
    return Keep(std::move(arrays), stream, inner_.StoreTokens(inner, stream));
  }
  StreamPosition GatherTokens(const TokenCopyParams& params, Stream& stream) override {
    auto arrays = std::make_unique<Arrays>();
    const TokenCopyParams inner = CopiesOf("GatherTokens", params, false, arrays.get());
    return Keep(std::move(arrays), stream, inner_.GatherTokens(inner, stream));
  }

  StreamPosition CopyBytes(const ByteCopyParams& params, Stream& stream) override {
    const Address address("CopyBytes");
    auto arrays = std::make_unique<Arrays>();
    arrays->byte_copies.assign(params.copies, params.copies + params.num_copies);
    for (ByteCopy& copy : arrays->byte_copies) {
      address.Needed("to", &copy.to, copy.bytes);
      address.Needed("from", &copy.from, copy.bytes);
    }
    const ByteCopyParams inner{arrays->byte_copies.data(), params.num_copies};
    return Keep(std::move(arrays), stream, inner_.CopyBytes(inner, stream));
  }

  StreamPosition ProjectKeys(const ProjectKeysParams& params, Stream& stream) override {
    const Address address("ProjectKeys");
    auto arrays = std::make_unique<Arrays>();
    arrays->project_blocks.assign(params.blocks, params.blocks + params.num_blocks);
    ProjectKeysParams inner = params;
    const KvLayout& layout = params.layout;
    address.Needed("projection", &inner.projection,
                   (layout.num_kv_heads - 1) * params.projection_kv_head_stride_bytes +
                       layout.head_dim * params.rank * int64_t{2});
    for (ProjectBlock& block : arrays->project_blocks) {
      address.Needed("block", &block.block, BlockBytes(layout, layout.block_tokens));
      address.Needed("projected", &block.projected,
                     int64_t{2} * layout.num_kv_heads * layout.block_tokens * params.rank);
    }
    inner.blocks = arrays->project_blocks.data();
    return Keep(std::move(arrays), stream, inner_.ProjectKeys(inner, stream));
  }

  int64_t ScoreWorkspaceBytes(const ScoreParams& params) const override {
    return inner_.ScoreWorkspaceBytes(params);
  }
  StreamPosition ScoreBlocks(const ScoreParams& params, Stream& stream) override {
    const Address address("ScoreBlocks");
    auto arrays = std::make_unique<Arrays>();
    arrays->score_blocks.assign(params.blocks, params.blocks + params.num_blocks);
    ScoreParams inner = params;
    for (ScoreBlock& block : arrays->score_blocks) {
      address.Optional("projected", &block.projected,
                       int64_t{2} * params.num_kv_heads * params.block_tokens * params.rank);
    }
    inner.blocks = arrays->score_blocks.data();
    address.Needed("projection", &inner.projection,
                   (params.num_kv_heads - 1) * params.projection_kv_head_stride_bytes +
                       int64_t{2} * params.head_dim * params.rank);
    address.Needed("q", &inner.q, int64_t{2} * params.num_query_heads * params.head_dim);
    address.Needed("scores", &inner.scores, params.num_blocks * 4);
    address.Needed("top", &inner.top, params.top_k * 8);
    address.Needed("workspace", &inner.workspace, inner_.ScoreWorkspaceBytes(params));
    return Keep(std::move(arrays), stream, inner_.ScoreBlocks(inner, stream));
  }

  int64_t AttendWorkspaceBytes(const AttendParams& params) const override {
    return inner_.AttendWorkspaceBytes(params);
  }
  StreamPosition Attend(const AttendParams& params, Stream& stream) override {
    const Address address("Attend");
    auto arrays = std::make_unique<Arrays>();
    AttendParams inner = params;
    const KvLayout& layout = params.layout;
    arrays->sequences.assign(params.sequences, params.sequences + params.num_sequences);
    const auto num_blocks = [&](const AttendSequence& sequence) {
      return (sequence.context_tokens + layout.block_tokens - 1) / layout.block_tokens;
    };
    for (const AttendSequence& sequence : arrays->sequences) {
      for (int64_t i = 0; i < num_blocks(sequence); ++i) {
        arrays->addresses.push_back(sequence.blocks[i]);
        address.Needed("block", &arrays->addresses.back(), BlockBytes(layout, layout.block_tokens));
      }
    }
    const std::byte* const* next = arrays->addresses.data();
    for (AttendSequence& sequence : arrays->sequences) {
      sequence.blocks = next;
      next += num_blocks(sequence);
    }
    inner.sequences = arrays->sequences.data();
    const int64_t row_heads = params.num_rows * params.num_query_heads;
    address.Needed("q", &inner.q, row_heads * RowBytes(layout));
    address.Optional("sink_logits", &inner.options.sink_logits,
                     params.num_query_heads * int64_t{4});
    if (params.out == nullptr) {
      address.State(&inner.state, params.num_rows, params.num_query_heads, layout.head_dim);
    }
    address.Optional("out", &inner.out, row_heads * layout.head_dim * DTypeBytes(params.out_dtype));
    address.Optional("lse", &inner.lse, row_heads * 4);
    address.Needed("workspace", &inner.workspace, inner_.AttendWorkspaceBytes(params));
    return Keep(std::move(arrays), stream, inner_.Attend(inner, stream));
  }

  StreamPosition BeginStates(const BeginParams& params, Stream& stream) override {
    BeginParams inner = params;
    Address("BeginStates")
        .State(&inner.state, params.num_rows, params.num_query_heads, params.head_dim);
    return inner_.BeginStates(inner, stream);
  }
  StreamPosition MergeStates(const MergeParams& params, Stream& stream) override {
    const Address address("MergeStates");
    auto arrays = std::make_unique<Arrays>();
    arrays->parts.assign(params.parts, params.parts + params.num_parts);
    MergeParams inner = params;
    address.State(&inner.into, params.num_rows, params.num_query_heads, params.head_dim);
    for (RunningState& part : arrays->parts) {
      address.State(&part, params.num_rows, params.num_query_heads, params.head_dim);
    }
    inner.parts = arrays->parts.data();
    return Keep(std::move(arrays), stream, inner_.MergeStates(inner, stream));
  }
  StreamPosition FinalizeStates(const FinalizeParams& params, Stream& stream) override {
    const Address address("FinalizeStates");
    FinalizeParams inner = params;
    const int64_t row_heads = params.num_rows * params.num_query_heads;
    address.State(&inner.state, params.num_rows, params.num_query_heads, params.head_dim);
    address.Optional("sink_logits", &inner.sink_logits, params.num_query_heads * int64_t{4});
    address.Needed("out", &inner.out, row_heads * params.head_dim * DTypeBytes(params.out_dtype));
    address.Optional("lse", &inner.lse, row_heads * 4);
    return inner_.FinalizeStates(inner, stream);
  }

 private:
  struct Kept {
    const Stream* stream;
    StreamPosition position;
    std::unique_ptr<Arrays> arrays;
  };

  static TokenCopyParams CopiesOf(const char* op, const TokenCopyParams& params, bool store,
                                  Arrays* arrays) {
    const Address address(op);
    const KvLayout& layout = params.layout;
    arrays->token_copies.assign(params.copies, params.copies + params.num_copies);
    for (TokenCopy& copy : arrays->token_copies) {
      address.Needed("block", &copy.block, BlockBytes(layout, layout.block_tokens));
      const int64_t wire_tokens = copy.num_tokens + (store ? 0 : copy.zero_tokens);
      const int64_t wire_bytes = wire_tokens * layout.num_kv_heads * RowBytes(layout);
      address.Needed("k", &copy.k, wire_bytes);
      address.Needed("v", &copy.v, wire_bytes);
    }
    return {layout, arrays->token_copies.data(), params.num_copies};
  }

  // Until the stream has completed the position, or a later stream has it in its place.
  StreamPosition Keep(std::unique_ptr<Arrays> arrays, Stream& stream, StreamPosition position) {
    const StreamPosition completed = stream.completed();
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(kept_, [&](const Kept& kept) {
      return kept.stream == &stream && kept.position <= completed;
    });
    kept_.push_back({&stream, position, std::move(arrays)});
    return position;
  }

  Ops& inner_;
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

class StrictDevice final : public Device {
 public:
  explicit StrictDevice(std::unique_ptr<Device> inner)
      : inner_(std::move(inner)), info_(inner_->info()), ops_(inner_->ops()) {
    info_.reads_any_host_memory = false;
  }

  const DeviceInfo& info() const override { return info_; }
  absl::Status status() const override { return inner_->status(); }
  absl::StatusOr<Buffer> Reserve(MemoryKind kind, int64_t bytes) override {
    return Memory::Get().Reserve(*inner_, kind, bytes);
  }
  absl::Status Commit(const Buffer& buffer, int64_t offset_bytes, int64_t bytes) override {
    return Memory::Get().Commit(*inner_, buffer, offset_bytes, bytes);
  }
  std::unique_ptr<Stream> CreateStream(StreamPriority priority) override {
    return inner_->CreateStream(priority);
  }
  Ops& ops() override { return ops_; }

 private:
  const std::unique_ptr<Device> inner_;
  DeviceInfo info_;
  StrictOps ops_;
};

}  // namespace

std::unique_ptr<Device> CreateStrictDevice(std::unique_ptr<Device> inner) {
  return std::make_unique<StrictDevice>(std::move(inner));
}

}  // namespace sluice
